"""API keys: off unless asked for, then asked for everywhere but at /health; and nothing of them in the log."""

import hashlib
import hmac
import json
import logging

import pytest

from deployments import app
from deployments.api_keys import ApiKeys, read_key_hashes
from deployments.app import API_KEYS_VARIABLE, AppArgs, build_app
from tests.deployments.conftest import TINY
from tests.fakes import Script, until

SPEECH = "/v1/audio/speech"
KEYS = ["sk-first-8c1f", "sk-second-77ab"]
SECRET_TEXT = "The word is swordfish."
ROUTES = [
    ("POST", SPEECH),
    ("POST", f"{SPEECH}/batch"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/audio/voices"),
    ("POST", "/v1/audio/voices"),
    ("DELETE", "/v1/audio/voices/ada"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nope"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/v1/models/health"),
]


def hashes_of(*keys):
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def speak(chain, headers=None, **fields):
    body = json.dumps({"input": SECRET_TEXT, "seed": 3, "max_new_tokens": 5, **fields}).encode()
    return chain.call(
        "POST", SPEECH, body, **{"content_type": "application/json", **(headers or {})}
    ).finish()


@pytest.fixture
def open_locked(open_chain):
    return lambda **others: open_chain(api_key_hashes=hashes_of(*KEYS), **others)


# ---------------------------------------------------------------- requests
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["bearer", "BEARER", "x_api_key"])
async def test_any_of_the_keys_in_either_header_lets_in(open_locked, key, header):
    headers = {"x_api_key": key} if header == "x_api_key" else {"authorization": f"{header} {key}"}
    async with open_locked() as chain:
        assert (await speak(chain, headers)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": KEYS[0]},
        {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": f"Bearer {KEYS[0]}x"},
        {"authorization": f"Bearer {KEYS[0][:-1]}"},
        {"authorization": f"Bearer {KEYS[0]},{KEYS[1]}"},
        {"x_api_key": "é" * 2000},
        {"x_api_key": hashes_of(KEYS[0])[0].hex()},
    ],
)
async def test_anything_else_is_a_401_that_says_how(open_locked, headers):
    async with open_locked() as chain:
        call = await speak(chain, headers)
        assert call.status == 401
        assert call.headers["www-authenticate"].startswith("Bearer ")
        error = json.loads(call.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
        assert chain.talker_engine.requests == []


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_health_is_closed(open_locked, method, path):
    async with open_locked() as chain:
        assert (await chain.call(method, path).finish()).status == 401


async def test_health_is_open_under_any_prefix(open_locked):
    async with open_locked() as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        assert (await chain.call("GET", "/health").finish()).status == 200
    seen = []

    async def inner(scope, receive, send):
        seen.append(scope["path"])

    layer = ApiKeys(inner, hashes_of(*KEYS))
    await layer({"type": "http", "path": "/tts/health", "root_path": "/tts", "headers": []}, None, None)
    assert seen == ["/tts/health"]


async def test_a_client_that_fills_one_header_with_nonsense_may_use_the_other(open_locked):
    async with open_locked() as chain:
        for headers in (
            {"authorization": f"Bearer {KEYS[0]}", "x_api_key": "none"},
            {"authorization": "Bearer none", "x_api_key": KEYS[0]},
        ):
            assert (await speak(chain, headers)).status == 200


async def test_without_keys_nobody_is_asked(open_chain):
    async with open_chain() as chain:
        assert (await speak(chain)).status == 200
        assert (await speak(chain, {"authorization": "Bearer whatever"})).status == 200


async def test_a_key_is_compared_with_every_hash_in_constant_time(open_locked, monkeypatch):
    compared = []

    def compare(presented, known):
        compared.append(known)
        return real(presented, known)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with open_locked() as chain:
        for key in (KEYS[0], "sk-nobodys"):
            compared.clear()
            await speak(chain, {"x_api_key": key})
            assert compared == list(hashes_of(*KEYS))


# ---------------------------------------------------------------- where keys come from
def test_keys_come_from_the_file_and_from_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# whose\n{KEYS[0]}\n\n  {KEYS[1]}  \n")
    bound = {}

    def bind(self, settings, handles, transport):
        bound["hashes"] = settings.api_key_hashes
        return real(self, settings, handles, transport)

    real = app.serve.Deployment.bind
    monkeypatch.setattr(
        app.serve.Deployment,
        "bind",
        lambda self, *a: bind(self, *a) if self.name == "Ingress" else real(self, *a),
    )
    for variable, key_file, expected in [
        (None, None, ()),
        (None, file, KEYS),
        (f"{KEYS[0]}, sk-third", None, [KEYS[0], "sk-third"]),
        (f"{KEYS[0]},sk-third", file, [*KEYS, "sk-third"]),
    ]:
        if variable is None:
            monkeypatch.delenv(API_KEYS_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(API_KEYS_VARIABLE, variable)
        build_app(AppArgs(checkpoint=TINY, api_keys_file=key_file))
        assert bound["hashes"] == hashes_of(*expected)


@pytest.mark.parametrize("text", ["", "# none\n", "sk one\n", "schlüssel\n", f"{'k' * 600}\n"])
def test_a_file_without_a_usable_key_stops_the_start_and_doesnt_tell_it(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="keys") as caught:
        read_key_hashes(file, None, "VARIABLE")
    assert not text.strip("# \n") or text.strip() not in str(caught.value)


@pytest.mark.parametrize("variable", ["", " , "])
def test_a_variable_without_a_key_stops_the_start(variable):
    with pytest.raises(ValueError, match="VARIABLE holds no API key"):
        read_key_hashes(None, variable, "VARIABLE")


def test_a_missing_file_stops_the_start(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_key_hashes(tmp_path / "keys", None, "VARIABLE")


# ---------------------------------------------------------------- logs
async def test_no_log_line_holds_a_text_or_a_key(open_locked, caplog):
    caplog.set_level(logging.DEBUG)
    good = {"authorization": f"Bearer {KEYS[0]}"}
    async with open_locked() as chain:
        await speak(chain, good)
        await speak(chain, good, stream=True)
        await speak(chain, good, stream_format="sse")
        await speak(chain, {"x_api_key": "sk-nobodys"})
        await speak(chain)
        await speak(chain, good, voice=SECRET_TEXT)
        await speak(chain, good, instructions=SECRET_TEXT)
        await speak(chain, good, seed=SECRET_TEXT)
        await chain.call(
            "POST", SPEECH, SECRET_TEXT.encode(), content_type="application/json", **good
        ).finish()
    for broken in ({"talker": Script(fail_after_frames=0)}, {"codec": Script(fail_after_frames=2)}):
        async with open_locked(**broken) as chain:
            await speak(chain, good)
            await speak(chain, good, stream=True)
    told = caplog.text
    assert told.count("request {") >= 10
    for secret in (SECRET_TEXT, "swordfish", *KEYS, "sk-nobodys", *(h.hex() for h in hashes_of(*KEYS))):
        assert secret not in told
    for digest in hashes_of(*KEYS):
        assert repr(digest) not in told
