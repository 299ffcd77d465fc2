"""Long texts through the API, over fake engines."""

import asyncio
import base64
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from deployments.app import AppArgs, build_app
from deployments.frontend import Frontend
from deployments.ingress import Ingress
from deployments.schemas import SpeechBody
from qwen3tts_core.errors import EngineFault, TextTooLong
from qwen3tts_core.text.sentences import LongText, cut_text
from qwen3tts_core.types import FrameBatch
from tests.fakes import AsgiCall, Script, fake_codes, until

ROOT = Path(__file__).parents[2]
TINY = ROOT / "checkpoints" / "tiny"
SPEECH = "/v1/audio/speech"
SENTENCE = "Then the quiet harbour woke, and one by one the boats went out to sea. "
LONG = SENTENCE * 15  # of 71 characters: four pieces
NUM_PIECES = len(cut_text(LONG))


def speak(chain, **fields):
    body = json.dumps({"input": LONG, "seed": 3, "response_format": "pcm", **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json")


def expected_pcm(num_frames, num_pieces=NUM_PIECES, seed=3):
    codes = [fake_codes(seed, 0, num_frames, piece)[:, 0] for piece in range(num_pieces)]
    return np.repeat(np.concatenate(codes), 1920).astype("<i2").tobytes()


def events(body):
    return [json.loads(block.split("data: ", 1)[1]) for block in body.decode().strip().split("\n\n")]


def sse_audio(body):
    return b"".join(base64.b64decode(e["audio"]) for e in events(body) if e["type"] == "speech.audio.delta")


# ---------------------------------------------------------------- one request
async def test_a_long_text_is_one_response_of_its_pieces_whole_streamed_and_as_events(open_chain):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        whole, raw, sse, wav = [
            await speak(chain, **mode).finish()
            for mode in (
                {},
                {"stream": True},
                {"stream_format": "sse"},
                {"stream": True, "response_format": "wav"},
            )
        ]
        await until(lambda: chain.num_held == 0)
    assert NUM_PIECES == 4
    assert whole.body == raw.body == sse_audio(sse.body) == wav.body[44:] == expected_pcm(60)
    assert wav.body.count(b"RIFF") == 1
    assert whole.headers["x-num-frames"] == str(60 * NUM_PIECES)
    assert whole.headers["x-finish-reason"] == "stop"
    done = events(sse.body)[-1]
    assert (done["num_frames"], done["finish_reason"]) == (60 * NUM_PIECES, "stop")
    assert raw.is_complete


async def test_every_piece_has_the_requests_seed_voice_and_instructions_and_a_number_of_its_own(open_chain):
    """known_faults row 34: one seed throughout, also where the request names none."""
    models = {"large": str(ROOT / "tests" / "parity" / "golden" / "seed0" / "custom_voice_large")}
    async with open_chain(models=models) as chain:
        call = await speak(chain, seed=None, voice="vivian", instructions="Whisper.", top_k=7).finish()
        assert call.status == 200, call.body
        requests = chain.talker_engine.requests
    assert [request.piece for request in requests] == list(range(NUM_PIECES))
    assert {str(request.seed) for request in requests} == {call.headers["x-seed"]}
    assert len({request.sampling for request in requests}) == 1
    assert requests[0].sampling.talker.top_k == 7
    assert len({request.request_id for request in requests}) == NUM_PIECES
    heads = {request.plan.text_ids[:12] for request in requests}  # instruction and role: the same rows
    assert len(heads) == 1


async def test_a_short_text_is_piece_0_alone_with_the_prompt_it_always_had(open_chain):
    frontend = Frontend.from_checkpoint(TINY, model_name="tiny", max_positions=4096)
    never = LongText(from_chars=10**6, aim_chars=300, max_piece_chars=400)
    uncut = Frontend.from_checkpoint(TINY, model_name="tiny", max_positions=4096, long_text=never)
    for text in ("Hello there.", "\n Hello. ", LONG[:599]):
        body = SpeechBody(input=text, seed=3, max_new_tokens=50)
        (request,) = frontend.prepare(body).requests
        assert request.piece == 0
        assert request.plan == uncut.prepare(body).request.plan
        assert request.max_frames == 50


async def test_the_log_says_how_many_pieces_there_were(open_chain, caplog):
    caplog.set_level(logging.INFO, "deployments.metrics")
    async with open_chain() as chain:
        await speak(chain).finish()
        await speak(chain, input="Hello there.").finish()
    lines = [
        json.loads(r.message.split(" ", 1)[1]) for r in caplog.records if r.name == "deployments.metrics"
    ]
    assert [line["pieces"] for line in lines] == [NUM_PIECES, 1]
    assert [line["frames"] for line in lines] == [9 * NUM_PIECES, 9]


# ---------------------------------------------------------------- time
async def test_the_next_sentence_is_begun_before_the_last_of_this_one_is_sent(open_chain):
    """known_faults row 33: no gap. And the first audio is as fast as a short text's: nothing of the others is in its way."""
    async with open_chain(talker=Script(num_frames=60)) as chain:
        generate, decode, num_sent = chain.talker.generate, chain.codec.decode, []

        async def in_step(request):
            """The next item when the one before has been heard."""
            num_bytes = 60 * 3840 * request.piece
            async for item in generate(request):
                await until(lambda expected=num_bytes: len(call.body) == expected)
                num_bytes += 3840 * FrameBatch.from_bytes(item).num_frames
                yield item

        async def noted(request):
            num_sent.append(len(call.parts))
            async for item in decode(request):
                yield item

        chain.talker.generate, chain.codec.decode = in_step, noted
        call = speak(chain, stream=True)
        await call.finish()
    assert call.body == expected_pcm(60)
    num_parts = 7  # of a piece: six chunks, one of them in two parts
    assert len(call.parts) == num_parts * NUM_PIECES
    # The call itself begins a turn or two of the event loop after it was started, as in Serve.
    begun_after = [sent - num_parts * piece for piece, sent in enumerate(num_sent[1:])]
    assert all(num_parts - 1 <= sent <= num_parts for sent in begun_after)


# ---------------------------------------------------------------- limits
async def test_beyond_the_configured_total_a_400_names_the_limit(open_chain):
    async with open_chain() as chain:
        assert (await speak(chain, input="word " * 4000).finish()).status == 200
        num_requests = len(chain.talker_engine.requests)
        call = await speak(chain, input="word " * 4001).finish()
        assert call.status == 400
        error = json.loads(call.body)["error"]
        assert (error["code"], error["param"]) == ("text_too_long", "input")
        assert error["message"] == "input is 20,005 characters, the limit is 20,000"
        assert len(chain.talker_engine.requests) == num_requests


def test_the_limit_and_the_sizes_are_the_configs():
    sizes = LongText(from_chars=50, aim_chars=30, max_piece_chars=40, max_chars=100)
    frontend = Frontend.from_checkpoint(TINY, model_name="tiny", max_positions=4096, long_text=sizes)
    prepared = frontend.prepare(SpeechBody(input="word " * 19))
    assert len(prepared.requests) == len(cut_text("word " * 19, sizes)) > 1
    with pytest.raises(TextTooLong, match="101 characters, the limit is 100"):
        frontend.prepare(SpeechBody(input="x" * 101))
    with pytest.raises(TextTooLong):
        frontend.check(SpeechBody(input="x" * 101))


async def test_the_configs_sizes_reach_the_text(open_chain):
    args = AppArgs(checkpoint=str(TINY), long_text={"max_chars": 100})
    settings = build_app(args)._bound_deployment.init_args[0]
    assert settings.long_text == LongText(max_chars=100)
    async with open_chain() as chain:
        handles = {"Codec": chain.codec_handle, "Talker": chain.talker_handle}
        ingress = Ingress(settings, handles, "value")
        call = AsgiCall(
            ingress.build_http_app(),
            "POST",
            SPEECH,
            json.dumps({"input": "x" * 101}).encode(),
            [("content-type", "application/json")],
        )
        await call.finish()
    assert call.status == 400
    assert "101 characters, the limit is 100" in call.body.decode()


def test_a_piece_of_too_many_tokens_is_cut_again():
    """A script that the tokenizer hardly knows takes several tokens a character."""
    frontend = Frontend.from_checkpoint(TINY, model_name="tiny", max_positions=1000)  # 200 tokens at once
    prepared = frontend.prepare(SpeechBody(input="ᚠᚢᚦᚨᚱᚲ" * 120))
    assert prepared.num_text_tokens > 1000
    assert len(prepared.requests) > 6
    assert [request.piece for request in prepared.requests] == list(range(len(prepared.requests)))


async def test_a_runaway_in_every_piece_is_stopped_by_its_own_text_and_says_length(open_chain):
    """known_faults rows 3, 40 and 41: max(192, 12 x text tokens) frames for each piece; the finish tells."""
    async with open_chain(talker=Script(num_frames=20_000)) as chain:
        whole = await speak(chain).finish()
        sse = await speak(chain, stream_format="sse").finish()
        requests = chain.talker_engine.requests[:NUM_PIECES]
    num_frames = int(whole.headers["x-num-frames"])
    assert num_frames == sum(request.max_frames for request in requests)
    tokens = [request.max_frames // 12 for request in requests]
    assert sum(tokens) == events(sse.body)[-1]["usage"]["input_tokens"]
    assert whole.headers["x-finish-reason"] == events(sse.body)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [1, 59, 60, 61, 150])
@pytest.mark.parametrize("mode", [{}, {"stream": True}])
async def test_max_new_tokens_is_the_number_of_frames_of_the_whole(open_chain, limit, mode):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        call = await speak(chain, max_new_tokens=limit, **mode).finish()
        assert call.body == expected_pcm(60)[: limit * 3840]
        assert call.is_complete
        if not mode:
            assert call.headers["x-finish-reason"] == "length"
        await until(lambda: chain.num_held == 0)


async def test_max_new_tokens_may_be_more_than_fits_behind_one_piece(open_chain):
    async with open_chain() as chain:
        call = await speak(chain, max_new_tokens=20_000).finish()
        assert (call.status, call.headers["x-finish-reason"]) == (200, "stop")
        assert max(request.max_frames for request in chain.talker_engine.requests) < 4096


# ---------------------------------------------------------------- overload, faults, leaving
@pytest.mark.parametrize("full", ["talker", "codec"])
async def test_a_full_server_refuses_the_first_piece_at_once(open_chain, full):
    async with open_chain(**{full: Script(capacity=0)}) as chain:
        call = await speak(chain, stream=True).finish()
        assert (call.status, call.headers["retry-after"]) == (503, "3")


@pytest.mark.parametrize("full", ["talker", "codec"])
async def test_with_one_place_in_all_the_pieces_come_one_after_the_other(open_chain, full):
    async with open_chain(**{full: Script(num_frames=9, capacity=1, seconds_per_item=0.01)}) as chain:
        call = await speak(chain, stream=True).finish()
        assert call.body == expected_pcm(9)
        await until(lambda: chain.num_held == 0)


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"stream_format": "sse"}])
async def test_a_fault_in_a_later_piece_is_never_a_clean_end(open_chain, mode):
    async with open_chain() as chain:
        decode = chain.codec.decode

        async def breaks(request):
            if request.piece == 2:
                raise EngineFault("secret detail")
            async for item in decode(request):
                yield item

        chain.codec.decode = breaks
        call = await speak(chain, **mode).finish()
        assert "secret" not in call.body.decode("latin-1")
        if not mode:
            assert call.status == 500
        else:
            assert (call.status, call.is_complete) == (200, False)
        if "stream_format" in mode:
            assert [event["type"] for event in events(call.body)][-1] == "speech.audio.error"
        await until(lambda: chain.num_held == 0)


@pytest.mark.parametrize("mode", [{}, {"stream": True}])
async def test_a_client_that_leaves_frees_what_its_piece_holds(open_chain, mode):
    async with open_chain(talker=Script(num_frames=20_000, seconds_per_item=0.05)) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        tasks_before = asyncio.all_tasks()
        for _ in range(10):
            call = speak(chain, max_new_tokens=4000, **mode)
            await until(lambda: chain.num_held == 2)
            await call.leave()
            await until(lambda: chain.num_held == 0)
        await until(lambda: asyncio.all_tasks() <= tasks_before)
