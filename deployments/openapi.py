"""The OpenAPI description: every route with what goes in, what comes out, and what can go wrong.

Written by hand, since bodies are read and refused by hand; request schemas come from the very
models that parse them. Its examples name what this server serves, so they run as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deployments.audio_formats import SSE_MEDIA_TYPE
from deployments.batch import MAX_ITEMS
from deployments.cluster_metrics import MEDIA_TYPE as METRICS_TYPE
from deployments.schemas import SpeechBody
from deployments.served_models import ServedModel, ServedModels
from deployments.voices import UPLOAD_OPENAPI
from deployments.websocket_messages import GUIDE as WEBSOCKET_GUIDE
from qwen3tts_core.audio.encoding import MEDIA_TYPES

_Schema = dict[str, Any]

_STRING: _Schema = {"type": "string"}
_INTEGER: _Schema = {"type": "integer"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_SECONDS: _Schema = {"type": "number", "minimum": 0}
_FINISH: _Schema = {"type": "string", "enum": ["stop", "length"]}
_VOICE_NAME: _Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"}

_ERRORS = {
    400: "A field is wrong, and `param` names it; or the body can't be read.",
    401: "No valid API key.",
    403: "A page of another site asked, and `allowed_origins` doesn't name it.",
    404: "There is no such model, voice or route.",
    408: "The body did not arrive in time.",
    409: "The name is a built-in voice's, or an alias.",
    413: "The body is larger than the limit.",
    415: "The body is of another content type.",
    500: "The server failed.",
    503: "Every slot and every place in the queue is taken, or a part of the server restarts; nothing was started.",
    504: "There was no audio by the deadline; the request was given up.",
    507: "The disk has no room for the voice; nothing of it was kept.",
}


def api_document(models: ServedModels, asks_for_keys: bool) -> dict[str, Any]:
    """The whole description, of this server with these models."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "qwen3tts-serve",
            "version": "1",
            "description": f"Text to speech with Qwen3-TTS.\n{WEBSOCKET_GUIDE}",
        },
        "paths": _paths(models, asks_for_keys),
        "components": {"schemas": _schemas()},
    }
    if asks_for_keys:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"header": []}]
        document["paths"]["/health"]["get"]["security"] = []
    return document


# ---------------------------------------------------------------- routes
def _paths(models: ServedModels, asks_for_keys: bool) -> dict[str, Any]:
    shut = (401,) if asks_for_keys else ()
    examples = _speech_examples(models)
    model_name = models.default.name
    return {
        "/v1/audio/speech": {
            "post": {
                "operationId": "speak",
                "summary": "Speak a text.",
                "requestBody": _json_body("SpeechBody", examples),
                "responses": {
                    "200": _spoken(),
                    **_errors(*shut, 400, 403, 404, 408, 413, 415, 500, 503, 504),
                },
            }
        },
        "/v1/audio/speech/batch": {
            "post": {
                "operationId": "speakMany",
                "summary": f"Speak up to {MAX_ITEMS} texts, each with a result of its own.",
                "requestBody": _json_body("BatchBody", _batch_examples(examples)),
                "responses": {
                    "200": _answer("Every item's result, in order.", "BatchResults"),
                    **_errors(*shut, 400, 403, 408, 413, 415, 500, 503),
                },
            }
        },
        "/v1/audio/voices": {
            "get": {
                "operationId": "listVoices",
                "summary": "Every voice, or one model's.",
                "parameters": [
                    {
                        "name": "model",
                        "in": "query",
                        "description": "Only this model's voices.",
                        "schema": _STRING,
                        "examples": {"served": {"value": model_name}},
                    }
                ],
                "responses": {
                    "200": _answer("Built-in voices, uploaded ones, and aliases.", "Voices"),
                    **_errors(*shut, 404, 500),
                },
            },
            "post": {
                "operationId": "uploadVoice",
                "summary": "Name a clip's voice, or give a name another clip.",
                **UPLOAD_OPENAPI,
                "responses": {
                    "200": _answer("The voice as it is now.", "Voice"),
                    **_errors(*shut, 400, 403, 408, 409, 413, 415, 500, 503, 507),
                },
            },
        },
        "/v1/audio/voices/{name}": {
            "delete": {
                "operationId": "deleteVoice",
                "summary": "Delete an uploaded voice.",
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": _VOICE_NAME}],
                "responses": {
                    "200": _answer("Gone for every request from now on.", "DeletedVoice"),
                    **_errors(*shut, 400, 403, 404, 500),
                },
            }
        },
        "/v1/models": {
            "get": {
                "operationId": "listModels",
                "summary": "What this server speaks with.",
                "responses": {"200": _answer("The default model first.", "Models"), **_errors(*shut, 500)},
            }
        },
        "/v1/models/{model}": {
            "get": {
                "operationId": "getModel",
                "summary": "One model.",
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "description": "Its name, or one of its aliases.",
                        "schema": {"type": "string", "minLength": 1},
                        "examples": {"served": {"value": model_name}},
                    }
                ],
                "responses": {"200": _answer("The model.", "Model"), **_errors(*shut, 404, 500)},
            }
        },
        "/health": {
            "get": {
                "operationId": "health",
                "summary": "Whether every deployment answers.",
                "responses": {
                    "200": _answer("All do.", "Ready"),
                    "503": {**_answer("The message names those that don't.", "NotReady"), "headers": _RETRY},
                    **_errors(500),
                },
            }
        },
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "The whole cluster's metrics, for Prometheus.",
                "responses": {
                    "200": {
                        "description": "Prometheus' text format.",
                        "content": {METRICS_TYPE: {"schema": {"type": "string"}}},
                    },
                    **_errors(*shut, 500, 503),
                },
            }
        },
    }


# ---------------------------------------------------------------- examples
def _speech_examples(models: ServedModels) -> dict[str, Any]:
    """Bodies that this server answers with audio. Base models need a clip, which is no example's size."""
    able = [model for model in models if model.cloner is None]
    if not able:
        return {}
    first = able[0]
    examples = {
        "plain": _example("A WAV file.", _body(models, first, "Hello there.")),
        "seeded": _example(
            "The same seed gives the same speech.",
            _body(models, first, "Hello there.", seed=42, max_new_tokens=50),
        ),
        "streamed": _example(
            "Bare PCM as it is made.",
            _body(models, first, "Hello there.", stream=True, response_format="pcm"),
        ),
        "events": _example(
            "Server-sent events.", _body(models, first, "Hello there.", stream=True, stream_format="sse")
        ),
    }
    if first.frontend.voices:
        voice = first.frontend.voices[-1]
        examples["voice"] = _example("A voice by name.", _body(models, first, "Hello there.", voice=voice))
    for model in able:
        if model.frontend.config.model_type == "voice_design":
            body = _body(models, model, "Hello there.", instructions="A low, calm voice.")
            examples["described"] = _example("A voice by its description.", body)
    return examples


def _body(models: ServedModels, model: ServedModel, text: str, **fields: Any) -> dict[str, Any]:
    named = {} if model is models.default else {"model": model.name}
    return {**named, "input": text, **fields}


def _batch_examples(examples: Mapping[str, Any]) -> dict[str, Any]:
    bodies = [example["value"] for example in examples.values() if "stream" not in example["value"]]
    if not bodies:
        return {}
    return {
        "batch": _example("WAV unless an item says otherwise.", {"items": bodies, "response_format": "wav"})
    }


def _example(summary: str, value: Any) -> dict[str, Any]:
    return {"summary": summary, "value": value}


# ---------------------------------------------------------------- responses
def _header(schema: _Schema, description: str, required: bool = False) -> dict[str, Any]:
    return {"schema": schema, "description": description, "required": required}


_RETRY = {"Retry-After": _header(_COUNT, "Seconds until another try makes sense.", required=True)}


def _spoken() -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    return {
        "description": "The speech. What only its end can tell is in the header of a whole body alone.",
        "headers": {
            "X-Request-Id": _header(_STRING, "The client's own, if it sent one."),
            "X-Seed": _header(_INTEGER, "The same request with it draws the same codes.", required=True),
            "X-Sample-Rate-Hz": _header(_COUNT, "Of the audio.", required=True),
            "X-Input-Tokens": _header(_COUNT, "Of the text.", required=True),
            "X-Finish-Reason": _header(_FINISH, "`length`: a limit cut the speech."),
            "X-Num-Frames": _header(_COUNT, "80 ms each."),
            "X-Audio-Seconds": _header(_SECONDS, "The audio's duration."),
            "Server-Timing": _header(_STRING, "Milliseconds: prepared, first_audio, total.", required=True),
        },
        "content": {
            **dict.fromkeys(MEDIA_TYPES.values(), binary),
            SSE_MEDIA_TYPE: {"schema": _ref("SpeechEvent")},
        },
    }


def _answer(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _errors(*statuses: int) -> dict[str, Any]:
    answers = {str(status): _answer(_ERRORS[status], "Error") for status in statuses}
    if "503" in answers:
        answers["503"]["headers"] = _RETRY
    if "401" in answers:
        answers["401"]["headers"] = {"WWW-Authenticate": _header(_STRING, "Bearer.", required=True)}
    return answers


def _json_body(schema: str, examples: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": _ref(schema)}
    if examples:
        content["examples"] = dict(examples)
    return {"required": True, "content": {"application/json": content}}


# ---------------------------------------------------------------- schemas
def _ref(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Mapping[str, _Schema], optional: Iterable[str] = ()) -> _Schema:
    required = [name for name in properties if name not in set(optional)]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def _list_of(schema: _Schema) -> _Schema:
    return {"type": "array", "items": schema}


def _or_null(schema: _Schema) -> _Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _schemas() -> dict[str, _Schema]:
    speech = SpeechBody.model_json_schema(ref_template="#/components/schemas/{model}")
    error = _object(
        {
            "message": _STRING,
            "type": {"type": "string", "enum": ["invalid_request_error", "server_error"]},
            "param": _or_null(_STRING),
            "code": _STRING,
        }
    )
    usage = _object(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _COUNT))
    return {
        **speech.pop("$defs", {}),
        "SpeechBody": speech,
        "BatchBody": _batch_body(speech),
        "BatchResults": _object(
            {
                "object": {"const": "list"},
                "data": {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": _batch_result()},
                "num_failed": _COUNT,
                "usage": _ref("Usage"),
            }
        ),
        "SpeechEvent": _event(),
        "Usage": usage,
        "ErrorFields": error,
        "Error": _object({"error": _ref("ErrorFields")}),
        "Model": _object(
            {
                "id": _STRING,
                "object": {"const": "model"},
                "created": _COUNT,
                "owned_by": _STRING,
                "aliases": _list_of(_STRING),
                "task_type": {"type": "string", "enum": ["CustomVoice", "VoiceDesign", "Base"]},
                "size": _STRING,
                "takes_instructions": {"type": "boolean"},
                "sample_rate_hz": _COUNT,
                "max_new_tokens": _COUNT,
            }
        ),
        "Models": _object({"object": {"const": "list"}, "data": _list_of(_ref("Model"))}),
        "Voice": _object(
            {
                "id": _STRING,
                "object": {"const": "voice"},
                "built_in": {"type": "boolean"},
                "dialect": _or_null(_STRING),
                "models": _list_of(_STRING),
                "ref_text": _or_null(_STRING),
                "clip_seconds": _SECONDS,
                "created_at": _COUNT,
                "alias_of": _STRING,
            },
            optional=("ref_text", "clip_seconds", "created_at", "alias_of"),
        ),
        "Voices": _object(
            {
                "object": {"const": "list"},
                "data": _list_of(_ref("Voice")),
                "voices": _list_of(_STRING),
                "default": _or_null(_STRING),
                "languages": _list_of(_STRING),
            }
        ),
        "DeletedVoice": _object({"id": _STRING, "object": {"const": "voice"}, "deleted": {"const": True}}),
        "Ready": _object({"status": {"const": "ready"}}),
        "NotReady": _object({"status": {"const": "not ready"}, "error": _ref("ErrorFields")}),
    }


def _event() -> _Schema:
    """Of a stream of server-sent events, which ends in `done` or `error`."""
    kinds = {
        "speech.audio.delta": {"audio": {"type": "string", "contentEncoding": "base64"}},
        "speech.audio.done": {
            "finish_reason": _FINISH,
            "usage": _ref("Usage"),
            "num_frames": _COUNT,
            "audio_seconds": _SECONDS,
            "seed": _INTEGER,
            "request_id": _STRING,
            "timings": _object(dict.fromkeys(("prepared_s", "first_audio_s", "total_s"), _SECONDS)),
        },
        "speech.audio.error": {"error": _ref("ErrorFields")},
    }
    data = {"oneOf": [_object({"type": {"const": kind}, **fields}) for kind, fields in kinds.items()]}
    return _object(
        {
            "event": {"type": "string", "enum": list(kinds)},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data},
        }
    )


def _batch_body(speech: _Schema) -> _Schema:
    """Fields of a request as defaults, `input` too, and the items."""
    properties = {**speech["properties"], "input": _or_null(speech["properties"]["input"])}
    items = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_ITEMS,
        "items": {"type": "object"},
        "description": "Bodies of /v1/audio/speech; what is wrong with one is told in its result.",
    }
    return {
        "type": "object",
        "description": "Body of `POST /v1/audio/speech/batch`.",
        "properties": {**properties, "items": items},
        "required": ["items"],
        "additionalProperties": False,
    }


def _batch_result() -> _Schema:
    place = {"index": _COUNT, "request_id": _STRING}
    spoken = {
        **place,
        "status": {"const": 200},
        "audio": {"type": "string", "contentEncoding": "base64"},
        "content_type": {"type": "string", "enum": list(MEDIA_TYPES.values())},
        "finish_reason": _FINISH,
        "num_frames": _COUNT,
        "audio_seconds": _SECONDS,
        "seed": _INTEGER,
        "usage": _ref("Usage"),
    }
    failed = {**place, "status": {"type": "integer", "minimum": 400}, "error": _ref("ErrorFields")}
    return {"oneOf": [_object(spoken), _object(failed)]}
