"""Long texts through the real app: pieces that are spoken ahead and joined.

Greedy, and with text that follows frame by frame, the tiny checkpoint stops at frame 9 of whatever begins as
the golden sentence does; so every piece that starts with it is those 9 frames again, and quick.
"""

from pathlib import Path

import numpy as np
import pytest

from deployments.frontend import Frontend
from deployments.schemas import SpeechBody
from qwen3tts_core.text.sentences import cut_text

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "parity" / "golden" / "seed0" / "custom_voice.npz"
FRAMES = 9
BYTES_PER_FRAME = 1920 * 2
GREEDY = {
    "voice": "vivian",
    "language": "Auto",
    "non_streaming_mode": False,
    "temperature": 0,
    "subtalker_temperature": 0,
    "response_format": "pcm",
    "seed": 1,
}
ENGLISH = " ".join(["Hello there, how are you today?"] * 22)
CHINESE = "Hello there, how are you today，清晨的港口十分安静，还没有人来到船边。" * 17


def samples(pcm):
    return np.frombuffer(pcm, "<i2").astype(np.int32)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_a_long_text_is_its_pieces_joined_whole_streamed_and_limited(app, text):
    assert len(text) >= 700
    frontend = Frontend.from_checkpoint(ROOT / "checkpoints" / "tiny", model_name="tiny", max_positions=4096)
    body = {**GREEDY, "input": text}
    num_pieces = len(frontend.prepare(SpeechBody(**body)).requests)
    assert num_pieces >= len(cut_text(text)) >= 3

    whole = app.speak(**body)
    assert whole.headers["x-num-frames"] == str(FRAMES * num_pieces)
    assert whole.headers["x-finish-reason"] == "stop"
    assert app.speak(**body, stream=True).content == whole.content
    golden = np.load(GOLDEN)["wrapper/plain_auto_stream_wav"]
    for piece in samples(whole.content).reshape(num_pieces, -1):
        assert np.abs(piece / 32767 - golden).max() <= 1e-4 + 0.5 / 32767  # as for the sentence alone

    limited = app.speak(**body, max_new_tokens=FRAMES + 4)  # within the second piece, while a third is begun
    assert limited.headers["x-finish-reason"] == "length"
    assert limited.content == whole.content[: (FRAMES + 4) * BYTES_PER_FRAME]
    app.wait_until_free()  # the piece that was started ahead, too


def test_a_text_beyond_the_total_is_refused_by_name(app):
    response = app.client.post("v1/audio/speech", json={"input": "word " * 4001})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("text_too_long", "input")
    assert "20,005 characters, the limit is 20,000" in error["message"]
