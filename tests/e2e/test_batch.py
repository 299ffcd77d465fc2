"""A batch through the real app: results are what single requests give, and leaving frees everything."""

import base64
import time

import numpy as np

from tests.e2e.conftest import LASTING_SEED

BATCH = "v1/audio/speech/batch"


def samples(pcm):
    return np.frombuffer(pcm, "<i2").astype(np.int32)


def test_a_batch_of_32_is_spoken_as_each_is_alone(app):
    """known_faults row 27: within the advertised limits nothing is refused."""
    items = [{"seed": seed, "max_new_tokens": 10 + seed % 3} for seed in range(31)] + [{"voice": "nope"}]
    body = {"items": items, "input": "Hello there.", "response_format": "pcm"}
    told = app.client.post(BATCH, json=body).json()
    assert [result["status"] for result in told["data"]] == [200] * 31 + [400]
    alone = app.speak(response_format="pcm", **items[7])
    among = base64.b64decode(told["data"][7]["audio"])
    assert len(among) == len(alone.content)
    assert np.abs(samples(among) - samples(alone.content)).max() <= 1  # same codes; rounding aside
    assert told["data"][7]["num_frames"] == int(alone.headers["x-num-frames"])


def test_leaving_a_batch_frees_all_of_it_and_starts_no_more(app):
    items = [{"seed": LASTING_SEED, "max_new_tokens": 2000}] * 32
    with app.freed_before(4 * 2000):
        app.leave_while_it_speaks(BATCH, {"items": items, "input": "Hello there."}, num_running=4)
        app.wait_until_free()
        time.sleep(1)
        assert app.num_held == 0
