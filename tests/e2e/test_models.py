"""Several models in one real app, voice clone among them: serve_configs/tiny_all.yaml, and a fifth model whose
codec files are those of the Base, so that two talkers share one codec. Two ingress replicas."""

import asyncio
import copy
import json
import os
import signal
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from load_tests.__main__ import main as load_main
from tests.clips import as_base64, audio_file, tone, wav_clip
from tests.e2e.conftest import DEADLINE_S, PATIENCE

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "serve_configs" / "tiny_all.yaml"
GOLDEN = ROOT / "tests" / "parity" / "golden" / "seed0"
SPEECH, VOICES = "v1/audio/speech", "v1/audio/voices"
CHECKPOINTS = {
    "tiny": "custom_voice",
    "tiny-large": "custom_voice_large",
    "tiny-design": "voice_design",
    "tiny-base": "base",
}
NUM_SLOTS = 2  # of the Base's talker
HEALTH_S = 0.1
ATTEMPTS = 5


@pytest.fixture(scope="module")
def app(server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (application,) = copy.deepcopy(yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["applications"])
    application["name"], application["route_prefix"] = "models", "/models"
    args, deployments = application["args"], application["deployments"]
    args["voices"]["folder"] = str(folder / "voices")
    args |= PATIENCE
    args["resume_timeout_s"] = 0.2  # sooner than any process starts: see the last test
    args["models"][-1]["talker"] = {"num_slots": NUM_SLOTS, "max_queued": 30}
    args["models"].append({"checkpoint": mixed_checkpoint(folder / "mixed"), "model_name": "mixed"})
    deployments.append({"name": "Talker-mixed", "ray_actor_options": {"num_cpus": 0}})
    next(d for d in deployments if d["name"] == "Ingress")["num_replicas"] = 2
    app = server.add(application)
    server.start(app)
    yield app
    server.stop(app)


def mixed_checkpoint(folder):
    """The talker of one checkpoint with the codec of another."""
    folder.mkdir()
    for file in (GOLDEN / "custom_voice_large").iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    (folder / "speech_tokenizer").symlink_to(GOLDEN / "base" / "speech_tokenizer")
    return str(folder)


def golden_of(checkpoint):
    with np.load(GOLDEN / f"{checkpoint}.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("wrapper/", "case/", "enc/"))}


def golden_request(golden, case):
    """A golden case as the body of a request."""
    spec = json.loads(str(golden[f"case/{case}/spec_json"]))
    body = {
        "input": spec["text"],
        "language": spec["language"],
        "non_streaming_mode": not spec["streaming"],
        "temperature": 0,
        "subtalker_temperature": 0,
        "max_new_tokens": 14,
        "response_format": "pcm",
        "voice": spec.get("speaker"),
        "instructions": spec.get("instruct"),
    }
    if "enc/clip_int16" in golden:
        body["ref_audio"] = as_base64(audio_file(golden["enc/clip_int16"], subtype="PCM_16"))
        body["ref_text"] = spec.get("ref_text")
        body["x_vector_only_mode"] = spec.get("xvec")
        body["max_new_tokens"] = len(golden[f"case/{case}/greedy_codes"]) + (spec.get("xvec") is True)
    return body


def samples(response):
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2").astype(np.int32)


def assert_near(response, expected):
    found = samples(response) / 32767
    assert found.shape == expected.shape
    # The reference's tolerance, and the rounding to 16 bits.
    assert np.abs(found - expected).max() <= 1e-4 + 0.5 / 32767


def post(app, **fields):
    return app.client.post(SPEECH, json={"input": "Hello there.", **fields})


def clone(app, clip, **fields):
    fields = {"seed": 1, "max_new_tokens": 20, "response_format": "pcm", "ref_text": "Good day.", **fields}
    return post(app, model="tiny-base", ref_audio=as_base64(clip), **fields)


async def post_all(app, bodies):
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=app.url, timeout=300, limits=limits) as client:
        return await asyncio.gather(
            *[client.post(SPEECH, json={"input": "Hello there.", **b}) for b in bodies]
        )


def base_body(clip, **fields):
    body = {
        "model": "tiny-base",
        "ref_audio": as_base64(clip),
        "ref_text": "Good day.",
        "seed": 1,
        "max_new_tokens": 20,
        "response_format": "pcm",
    }
    return {**body, **fields}


# ---------------------------------------------------------------- each model's own voice
@pytest.mark.parametrize(
    ("model", "case"),
    [
        ("tiny", "plain_auto_stream"),
        ("tiny-large", "plain_auto_stream"),
        ("tiny-design", "design_auto_stream"),
        ("tiny-base", "xvec_auto_stream"),
        ("tiny-base", "icl_auto_stream_textshort"),
    ],
)
def test_each_model_sounds_as_the_reference_does_on_its_checkpoint(app, model, case):
    golden = golden_of(CHECKPOINTS[model])
    response = post(app, model=model, **golden_request(golden, case))
    assert_near(response, golden[f"wrapper/{case}_wav"])


def test_talkers_that_share_a_codec_each_hear_themselves(app):
    from qwen3tts_core.config import CheckpointConfig
    from qwen3tts_core.model.codec_decoder import open_codec_decoder

    torch = pytest.importorskip("torch", reason="the tests without torch leave out this folder")
    golden = golden_of("custom_voice_large")
    codes = torch.tensor(golden["case/plain_auto_stream/greedy_codes"])[None]
    decoder = open_codec_decoder(GOLDEN / "base", CheckpointConfig.from_checkpoint(GOLDEN / "base").codec)
    body = golden_request(golden, "plain_auto_stream")
    bodies = [{**body, "model": "mixed"}, base_body(wav_clip()), {**body, "model": "mixed"}]
    one, other, again = asyncio.run(post_all(app, bodies))
    for response in (one, again):
        assert_near(response, decoder.decode(codes)[0].numpy())
    assert other.status_code == 200
    assert app.stats("Codec-tiny-base")["num_rows_in_use"] == 0


def test_models_are_listed_and_the_first_is_meant_where_none_is_named(app):
    models = app.client.get("v1/models").json()["data"]
    assert [model["id"] for model in models] == [*CHECKPOINTS, "mixed"]
    assert post(app, voice="vivian", max_new_tokens=2).status_code == 200
    assert post(app, model="nope").status_code == 404
    refusal = post(app, task_type="Base")
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "task_type")


# ---------------------------------------------------------------- clones at once
async def test_clones_at_once_on_fewer_slots_all_sound_as_each_alone(app):
    clips = [wav_clip(pitch_hz=pitch) for pitch in (110.0, 220.0, 330.0, 440.0, 550.0)]
    bodies = [base_body(clip, seed=seed) for seed, clip in enumerate(clips)]
    assert len(bodies) > NUM_SLOTS
    alone = [samples((await post_all(app, [body]))[0]) for body in bodies]
    pair = [samples(response) for response in await post_all(app, bodies[:2])]
    together = [samples(response) for response in await post_all(app, bodies)]
    assert len({tuple(s[:3840]) for s in alone}) == len(alone)
    for apart, joined in [*zip(alone, pair, strict=False), *zip(alone, together, strict=True)]:
        assert len(joined) == len(apart)
        assert np.abs(joined - apart).max() <= 1  # the same codes; bytes are `deterministic`'s promise


# ---------------------------------------------------------------- the encoder's work
def num_encodes(app):
    return app.stats("ReferenceEncoder")["num_runs"]


def test_twenty_requests_with_one_clip_are_one_encode_and_two_modes_two(app):
    clip = wav_clip(pitch_hz=175.0)
    before = num_encodes(app)
    same = [base_body(clip, seed=seed, max_new_tokens=3) for seed in range(20)]
    for response in asyncio.run(post_all(app, same)):
        assert response.status_code == 200
    assert num_encodes(app) - before == 1
    other = wav_clip(pitch_hz=185.0)
    modes = [base_body(other, x_vector_only_mode=i % 2 == 0, max_new_tokens=3) for i in range(20)]
    for response in asyncio.run(post_all(app, modes)):
        assert response.status_code == 200
    assert num_encodes(app) - before == 3


def test_a_warm_voice_starts_about_as_fast_as_a_built_in_one(app, record_property):
    """A weak bound on the quickest of each, for a machine that others use; the numbers are in the report."""
    upload(app, "warm", wav_clip())
    bodies = {
        "built_in": {"model": "tiny", "non_streaming_mode": False},
        "warm": {"model": "tiny-base", "voice": "warm"},
        "warm_in_context": {"model": "tiny-base", "voice": "warm", "ref_text": "Good day."},
    }
    for body in bodies.values():
        first_audio_s(app, body)
    encodes_before = num_encodes(app)
    ttfa = {name: [] for name in bodies}
    for _ in range(12):
        for name, body in bodies.items():
            ttfa[name].append(first_audio_s(app, body))
    assert num_encodes(app) == encodes_before
    medians = {name: statistics.median(times) for name, times in ttfa.items()}
    for name, median in medians.items():
        record_property(f"ttfa_{name}_ms", round(1000 * median, 1))
    print(medians)
    best = {name: min(times) for name, times in ttfa.items()}  # others' load only ever adds to it
    assert best["warm"] < 2 * best["built_in"] + 0.05
    assert best["warm_in_context"] < 2 * best["built_in"] + 0.1  # a longer prompt


def first_audio_s(app, body):
    began = time.perf_counter()
    body = {"input": "Hello there.", "stream": True, "max_new_tokens": 2, "seed": 1, **body}
    with app.client.stream("POST", SPEECH, json=body) as response:
        assert response.status_code == 200
        parts = response.iter_raw()
        next(parts)
        elapsed = time.perf_counter() - began
        for _ in parts:
            pass
    return elapsed


# ---------------------------------------------------------------- odd clips
WAVE_600_S = 0.3 * np.sin(0.1 * np.arange(600 * 8_000))
ODD_CLIPS = {
    "corrupt": (lambda: wav_clip()[:30] + b"\xff" * 100, "can't be decoded"),
    "empty": (lambda: b"", "empty"),
    "0.2 s": (lambda: wav_clip(seconds=0.2), "lasts 0.20 s, expected 1 to 30 s"),
    # Few bytes a second, so that its length and not its size is what is refused.
    "10 minutes": (
        lambda: audio_file(WAVE_600_S, 8_000, subtype="PCM_U8"),
        "lasts 600.00 s, expected 1 to 30 s",
    ),
    "silent": (lambda: audio_file(np.zeros(48_000)), "silent"),
    "8 channels": (lambda: audio_file(tone(channels=8)), None),
    "8 kHz": (lambda: audio_file(tone(rate_hz=8_000), 8_000), None),
    "192 kHz": (lambda: audio_file(tone(rate_hz=192_000), 192_000), None),
    "float64": (lambda: audio_file(tone(), subtype="DOUBLE"), None),
    "MP3": (lambda: audio_file(tone(), file_format="MP3"), None),
}


class HealthProbe:
    """Asks /health over and over on a connection of its own, and keeps the answers' times."""

    def __init__(self, app):
        self._app, self._ends, self.times_s = app, threading.Event(), []
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with httpx.Client(base_url=self._app.url, timeout=DEADLINE_S) as client:
            while not self._ends.is_set():
                began = time.perf_counter()
                assert client.get("health").status_code == 200
                self.times_s.append(time.perf_counter() - began)
                time.sleep(0.01)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()


def test_odd_clips_get_their_answers_and_health_answers_meanwhile(app, record_property):
    answers = {}
    made = {name: make() for name, (make, _) in ODD_CLIPS.items()}
    with HealthProbe(app) as idle:  # what an answer takes on this machine as it is now
        while len(idle.times_s) <= 20:
            time.sleep(0.01)
    with HealthProbe(app) as probe:
        for name, data in made.items():
            answers[name] = clone(app, data, max_new_tokens=2)
    for name, (_, words) in ODD_CLIPS.items():
        response = answers[name]
        if words is None:
            assert response.status_code == 200, (name, response.text)
            assert len(response.content) == 2 * 3840
        else:
            assert response.status_code == 400, (name, response.text)
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("ref_audio", "invalid_reference_audio")
            assert words in error["message"], name
    times = probe.times_s
    record_property("health_median_ms", round(1000 * statistics.median(times), 1))
    record_property("health_max_ms", round(1000 * max(times), 1))
    print(f"/health: {len(times)} probes, median {statistics.median(times):.4f} s, max {max(times):.4f} s")
    assert len(times) > 20
    assert statistics.median(times) < HEALTH_S + 5 * statistics.median(idle.times_s)


# ---------------------------------------------------------------- uploaded voices
def upload(app, name, clip, **fields):
    return app.client.post(VOICES, data={"name": name, **fields}, files={"audio_sample": ("a.wav", clip)})


def speak_with(app, name, **fields):
    """On a connection of its own, so that either ingress replica may get it."""
    body = {"input": "Hello there.", "model": "tiny-base", "voice": name, "seed": 1, "max_new_tokens": 3}
    return httpx.post(app.url + SPEECH, json={**body, "response_format": "pcm", **fields}, timeout=300)


def test_an_uploaded_voice_speaks_at_once_on_every_replica_until_it_is_deleted(app):
    clip, other = wav_clip(pitch_hz=200.0), wav_clip(pitch_hz=300.0)
    expected = {pitch: samples(clone(app, c, max_new_tokens=3)) for pitch, c in ((200, clip), (300, other))}
    assert upload(app, "Ada", clip, ref_text="Good day.").status_code == 200
    for _ in range(8):
        assert np.abs(samples(speak_with(app, "ada")) - expected[200]).max() <= 1
    assert upload(app, "ada", other, ref_text="Good day.").status_code == 200
    for _ in range(8):
        assert np.abs(samples(speak_with(app, "ADA")) - expected[300]).max() <= 1
    listed = app.client.get(VOICES, params={"model": "tiny-base"}).json()
    assert "ada" in listed["voices"]
    assert app.client.delete(f"{VOICES}/Ada").status_code == 200
    for _ in range(8):
        assert speak_with(app, "ada").status_code == 400
    assert app.client.delete(f"{VOICES}/Ada").status_code == 404


def test_uploads_that_cannot_be_are_refused(app):
    clip = wav_clip()
    for name, status in {"Vivian": 409, "../ada": 400, "a b": 400, "": 400}.items():
        response = upload(app, name, clip)
        assert (response.status_code, response.json()["error"]["param"]) == (status, "name"), name
    assert upload(app, "ada", wav_clip(seconds=0.2)).json()["error"]["param"] == "audio_sample"
    assert upload(app, "ada", clip * 400).status_code == 413
    assert app.client.get(VOICES, params={"model": "tiny-base"}).json()["voices"] in ([], ["warm"])


# ---------------------------------------------------------------- under load
@pytest.mark.parametrize("sent", ["inline", "uploaded"])
def test_the_load_client_uses_cloned_voices_again_and_again(app, tmp_path, sent):
    options = ["--model", "tiny-base", "--voices", "2", "--sent", sent, "--frames", "2-4", "--workers", "1"]
    closed = ["--concurrency", "2", "--sentences", "4", "--repeats", "1"]
    before = app.client.get(VOICES).json()
    assert load_main(["clones", "--url", app.url, "--out", str(tmp_path), *options, *closed]) == 0
    (level,) = json.loads((tmp_path / "clones.json").read_text())["levels"]
    assert (level["num_ok"], level["num_failed"]) == (4, 0)
    assert app.client.get(VOICES).json() == before, "uploaded voices are deleted"


# ---------------------------------------------------------------- the last test: it costs a replica
def seed_that_lasts(app, body):
    """One whose speech doesn't end before the frame limit."""
    for seed in range(20):
        answer = app.client.post(SPEECH, json={**body, "seed": seed})
        assert answer.status_code == 200
        if int(answer.headers["x-num-frames"]) == body["max_new_tokens"]:
            return seed
    raise AssertionError("every seed's speech is short")


def test_a_stream_that_nothing_takes_over_in_time_is_cut_or_told(app):
    """One talker, and no other for it: raw bodies end unterminated, events in an error, whole bodies in a 503."""
    body = {"model": "tiny-design", "input": "Hello.", "instructions": "A calm voice.", "max_new_tokens": 900}
    body["seed"] = seed_that_lasts(app, {**body, "max_new_tokens": 300})
    assert any(dies_under_streams(app, body) for _ in range(ATTEMPTS))


def dies_under_streams(app, body):
    """False, and nothing has died, where the first of them, all as long, was over before the last had begun."""
    streamed = {**body, "stream": True, "response_format": "pcm"}
    with ThreadPoolExecutor(1) as pool:
        pid = app.stats("Talker-tiny-design")["pid"]
        whole = pool.submit(app.client.post, SPEECH, json=body)
        deadline = time.monotonic() + DEADLINE_S
        while not whole.done() and app.stats("Talker-tiny-design")["num_running"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with (
            app.client.stream("POST", SPEECH, json=streamed) as raw,
            app.client.stream("POST", SPEECH, json={**streamed, "stream_format": "sse"}) as sse,
        ):
            parts, more = raw.iter_raw(), sse.iter_raw()
            next(parts)
            events = bytearray(next(more))
            if whole.done():
                return False
            os.kill(pid, signal.SIGKILL)  # one replica of this run's own, by its id
            for rest in (parts, map(events.extend, more)):
                with pytest.raises(httpx.RemoteProtocolError):
                    deque(rest, 0)
    last = json.loads(events.strip().rpartition(b"data: ")[2])
    assert (last["type"], last["error"]["code"]) == ("speech.audio.error", "unavailable")
    assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "unavailable")
    return True
