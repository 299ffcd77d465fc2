"""Requests for tests, by what matters to the case at hand. Imports no torch."""

import random

from qwen3tts_core.types import NO_ID, DrawParams, PrefillPlan, Sampling, SpeechRequest

GREEDY = Sampling(DrawParams(do_sample=False), DrawParams(do_sample=False))


def make_plan(num_rows, num_trailing=1, seed=0):
    """A random prompt over ids that every tiny checkpoint has; some rows lack one of their two sides."""
    rng = random.Random(f"{num_rows}/{num_trailing}/{seed}")
    text = [rng.choice([NO_ID, *range(400)]) for _ in range(num_rows)]
    codec = [rng.choice([NO_ID, *range(1000)]) if t != NO_ID else rng.randrange(1000) for t in text]
    trailing = [rng.randrange(400) for _ in range(num_trailing)]
    return PrefillPlan(tuple(text), tuple(codec), tuple(trailing))


def make_request(request_id, *, rows=5, frames=4, trailing=1, sampling=GREEDY, seed=0, plan=None, **others):
    plan = plan or make_plan(rows, trailing)
    return SpeechRequest(request_id, plan, sampling, seed, frames, **others)
