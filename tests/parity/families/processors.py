"""The logit processors, bit for bit: golden raw logits in, golden scores out.

History, step and settings are those of a run of the engine that makes the golden run's draws, so a
wrong bitmap of seen codes or a setting lost on the way to the device shows here too.
"""

import torch

from qwen3tts_core.types import DrawParams, Sampling
from tests.parity.registry import CLOSE, EXACT, Computed, NotCompared, array

# What make_golden.py of the kit changes for its second sampled run.
_SECOND_RUN = Sampling(talker=DrawParams(temperature=0.6, top_k=20, top_p=0.8), repetition_penalty=1.7)


@array(r"case/(?P<case>[^/]+)/greedy_scores")
def greedy_scores(pair, case):
    logits = _golden_logits(pair, case, "greedy")
    return Computed(pair.first_scores(logits, pair.greedy(case)), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/(?P<run>sampled2?)_scores")
def sampled_scores(pair, case, run):
    logits = _golden_logits(pair, case, run)
    return Computed(pair.first_scores(logits, _sampled_run(pair, case, run), cut=True), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/sampled_raw_logits")
def sampled_logits(pair, case):
    """The sampled frames forced on the engine must lead to the same logits."""
    num_samples = len(pair.golden[f"case/{case}/sampled_raw_logits"])
    trace = _sampled_run(pair, case, "sampled")
    return Computed(torch.stack(trace.first_logits[:num_samples]), tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/sampled2_raw_logits")
def second_sampled_logits(pair, case):
    return Computed(
        torch.stack(_sampled_run(pair, case, "sampled2").first_logits[:1]),
        tolerance=CLOSE,
        expected=pair.golden[f"case/{case}/sampled2_raw_logits"][:1],
        note="the first step; the file doesn't hold the frames that led to the others",
    )


@array(r"case/[^/]+/sampled2?_first", r"case/[^/]+/sampled_codes")
def draws(pair):
    return NotCompared("drawn by torch's generator; an input of the sampled logits and scores")


def _sampled_run(pair, case, run):
    return pair.sampled(case, run, pair.config.sampling if run == "sampled" else _SECOND_RUN)


def _golden_logits(pair, case, run):
    return torch.from_numpy(pair.golden[f"case/{case}/{run}_raw_logits"])
