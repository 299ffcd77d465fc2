"""The API's description is complete and true: its examples run, and schemathesis finds nothing against it."""

import asyncio
import hashlib
import json
from collections import Counter

import jsonschema
import pytest
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import Status, events, from_schema
from starlette.routing import WebSocketRoute

from deployments import http_errors
from deployments.cluster_metrics import ClusterMetrics
from deployments.openapi import api_document
from deployments.schemas import SpeechBody
from deployments.websocket_messages import MESSAGE_TYPES, SessionOptions
from tests.clips import form, wav_clip
from tests.deployments.conftest import GOLDEN, TINY
from tests.fakes import FakeReferenceEncoder, Script, until

MODELS = {"tiny": TINY, "design": str(GOLDEN / "voice_design"), "base": str(GOLDEN / "base")}
KEY = "sk-only-31d2"
FETCHED_BY_BROWSERS = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/", "/page/{name:path}"}

CONFIG = {
    "seed": 8,
    "generation": {"max-examples": 20, "deterministic": True, "database": "none"},
    "phases": {"stateful": {"max-steps": 4}},
    "checks": {
        # A body of the right form may still name a voice, language or clip that isn't there, or ask for what
        # its model doesn't do: 400 is the documented answer to that.
        "positive_data_acceptance": {
            "expected-statuses": ["2xx", "400", "401", "404", "409", "413", "415"],
        },
    },
}


@pytest.fixture
def open_all(open_chain):
    def opened(**others):
        return open_chain(
            talker=Script(num_frames=3), models=MODELS, encoders={"base": FakeReferenceEncoder()}, **others
        )

    return opened


async def document_of(chain, **headers):
    return json.loads((await chain.call("GET", "/openapi.json", **headers).finish()).body)


# ---------------------------------------------------------------- complete
async def test_every_route_is_described_and_nothing_else(open_all):
    async with open_all() as chain:
        document = await document_of(chain)
        routes = {
            (route.path.replace(":path", ""), method.lower())
            for route in chain.app.routes
            if not isinstance(route, WebSocketRoute)
            for method in route.methods - {"HEAD"}
            if route.path not in FETCHED_BY_BROWSERS
        }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert described == routes


async def test_the_websocket_is_described_in_words_with_every_message_and_field_of_it(open_all):
    async with open_all() as chain:
        document = await document_of(chain)
        (path,) = [route.path for route in chain.app.routes if isinstance(route, WebSocketRoute)]
    guide = document["info"]["description"]
    messages = [*MESSAGE_TYPES, "session.configured", "audio.start", "audio.done", "session.done", "error"]
    for name in (
        path,
        *messages,
        *SessionOptions.model_fields,
        "1000",
        "1001",
        "1008",
        "1009",
        "1011",
        "1013",
    ):
        assert name in guide


async def test_every_operation_says_what_it_answers_and_what_can_go_wrong(open_all):
    async with open_all() as chain:
        document = await document_of(chain)
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {"operationId", "summary", "responses"} <= set(operation), (method, path)
            assert {"200", "500"} <= set(operation["responses"])
            for status, response in operation["responses"].items():
                assert response["description"]
                for content_type, content in response["content"].items():
                    assert content["schema"], (path, status, content_type)
                    name = content["schema"].get("$ref", "").rpartition("/")[2]
                    assert not name or name in schemas
                    if int(status) >= 400 and (path, status) != ("/health", "503"):
                        assert (content_type, name) == ("application/json", "Error")
    assert set(schemas["SpeechBody"]["properties"]) == set(SpeechBody.model_fields)
    assert set(schemas["BatchBody"]["properties"]) == {*SpeechBody.model_fields, "items"}


async def test_every_status_of_ours_is_described_somewhere(open_all):
    """But for 405, which is no route's, and 499, which nobody hears."""
    async with open_all(api_key_hashes=(b"",)) as chain:
        described = api_document(chain.ingress._models, asks_for_keys=True)["paths"].values()
    statuses = {
        int(status)
        for methods in described
        for operation in methods.values()
        for status in operation["responses"]
    }
    ours = {row.status for row in http_errors._TABLE.values()} | set(http_errors._HTTP_CODES)
    assert statuses == (ours | {200}) - {405, 499}


async def test_keys_are_described_where_they_are_asked_for(open_all):
    async with open_all() as chain:
        assert "securitySchemes" not in (await document_of(chain))["components"]
    hashes = (hashlib.sha256(KEY.encode()).digest(),)
    async with open_all(api_key_hashes=hashes) as chain:
        document = await document_of(chain, x_api_key=KEY)
    assert document["security"] == [{"bearer": []}, {"header": []}]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path != "/health")


# ---------------------------------------------------------------- true
def json_examples(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for name, example in content.get("examples", {}).items():
                yield f"{method} {path} {name}", method.upper(), path, example["value"]


async def test_every_example_of_a_body_runs(open_all):
    async with open_all() as chain:
        ran = []
        for label, method, path, value in json_examples(await document_of(chain)):
            body = json.dumps(value).encode()
            call = await chain.call(method, path, body, content_type="application/json").finish()
            assert call.status == 200, (label, call.body)
            assert call.is_complete
            if "data" in (told := json.loads(call.body) if path.endswith("batch") else {}):
                assert told["num_failed"] == 0, label
            ran.append(label)
    assert len(ran) >= 7


async def test_every_example_of_a_parameter_runs(open_all):
    async with open_all() as chain:
        for path in ("/v1/models/{model}", "/v1/audio/voices"):
            operation = (await document_of(chain))["paths"][path]["get"]
            value = operation["parameters"][0]["examples"]["served"]["value"]
            target = path.replace("{model}", value) if "{" in path else f"{path}?model={value}"
            assert (await chain.call("GET", target).finish()).status == 200


async def test_events_are_as_described(open_all):
    async with open_all() as chain:
        document = await document_of(chain)
        body = json.dumps({"input": "Hello there.", "stream_format": "sse"}).encode()
        call = await chain.call("POST", "/v1/audio/speech", body, content_type="application/json").finish()
    data = document["components"]["schemas"]["SpeechEvent"]["properties"]["data"]["contentSchema"]
    validator = jsonschema.Draft202012Validator({**data, "components": document["components"]})
    events_sent = [
        json.loads(block.split("data: ", 1)[1]) for block in call.body.decode().strip().split("\n\n")
    ]
    assert [event["type"] for event in events_sent] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    for event in events_sent:
        validator.validate(event)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**events_sent[-1], "seed": "3"})


REFUSED = {
    413: (b" " * (1 << 27), {}),
    415: (b"{}", {}),
    500: (b"", {"talker": Script(fail_after_frames=0)}),
    503: (b"", {"talker": Script(capacity=0)}),
    504: (b"", {"talker": Script(seconds_per_item=1.0), "first_audio_timeout_s": 0.1}),
}


@pytest.mark.parametrize("status", REFUSED)
async def test_what_schemathesis_cannot_bring_about_is_described_too(open_chain, status):
    body, chain_args = REFUSED[status]
    async with open_chain(**chain_args) as chain:
        responses = (await document_of(chain))["paths"]["/v1/audio/speech"]["post"]["responses"]
        content_type = "text/plain" if status == 415 else "application/json"
        body = body or json.dumps({"input": "Hello there."}).encode()
        call = await chain.call("POST", "/v1/audio/speech", body, content_type=content_type).finish()
    assert call.status == status
    assert str(status) in responses
    for name, header in responses[str(status)].get("headers", {}).items():
        assert not header["required"] or name.lower() in call.headers


# ---------------------------------------------------------------- schemathesis
class Bridge:
    """The app on the loop where its engines live, for a client that brings a loop of its own."""

    def __init__(self, app, loop):
        self._app, self._loop = app, loop
        self.statuses = Counter()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        running = asyncio.run_coroutine_threadsafe(self._collect(scope, body), self._loop)
        for message in await asyncio.wrap_future(running):
            await send(message)

    async def _collect(self, scope, body):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1
            sent.append(message)

        await self._app(scope, receive, send)
        return sent


def hunt(app, headers):
    """Every phase of schemathesis; what it found, and how many scenarios each phase ran."""
    auth = {"auth": {"openapi": {"header": {"api_key": headers["X-API-Key"]}}}} if headers else {}
    config = SchemathesisConfig.from_dict({**CONFIG, **auth})
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=headers)
    found, ran = [], Counter()
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            ran[event.phase.value] += 1
            for checks in event.recorder.checks.values():
                found += [
                    f"{event.phase.value} {event.recorder.label}: {check.name}: {check.failure_info.failure}"
                    for check in checks
                    if check.status == Status.FAILURE
                ]
        elif isinstance(event, events.NonFatalError):
            found.append(f"{event.label}: {event.value!r}")
        elif isinstance(event, events.FatalError):
            raise event.exception
    return found, ran


async def one_node_s_page(agent):
    return "# TYPE ray_serve_num_http_requests counter\nray_serve_num_http_requests 3\n"


@pytest.mark.timeout(900)  # seconds, where nothing else runs
@pytest.mark.parametrize("key", [None, KEY])
async def test_schemathesis_finds_nothing(open_all, key):
    headers = {} if key is None else {"X-API-Key": key}
    hashes = () if key is None else (hashlib.sha256(key.encode()).digest(),)
    async with open_all(api_key_hashes=hashes) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        chain.ingress._cluster_metrics = ClusterMetrics(lambda: ["node:1"], one_node_s_page)
        body, content_type = form(audio_sample=wav_clip(), name="ada", ref_text="Hello.")
        upload = chain.call("POST", "/v1/audio/voices", body, content_type=content_type, **headers)
        assert (await upload.finish()).status == 200
        bridge = Bridge(chain.app, asyncio.get_running_loop())
        found, ran = await asyncio.to_thread(hunt, bridge, headers)
        await until(lambda: chain.num_held == 0)
    assert not found, "\n\n".join(found)
    assert {"examples", "coverage", "fuzzing"} <= set(ran)
    assert bridge.statuses[200] > 50
    assert bridge.statuses[400] > 50
