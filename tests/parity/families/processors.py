"""The logit processors: golden raw logits in, golden scores out, bit for bit.

A kernel that draws keeps its scores in registers. Of such a backend the codes are compared that it
draws from the golden logits, under many seeds, with what the golden scores and the written noise give.

History, step and settings are those of a run of the engine that makes the golden run's draws, so a
wrong bitmap of seen codes or a setting lost on the way to the device shows here too.
"""

import torch

from qwen3tts_core.types import DrawParams, Sampling
from tests.parity.registry import CLOSE, EXACT, Computed, NotCompared, array

# What make_golden.py of the kit changes for its second sampled run.
_NUM_SEEDS = 16
_SECOND_RUN = Sampling(talker=DrawParams(temperature=0.6, top_k=20, top_p=0.8), repetition_penalty=1.7)


@array(r"case/(?P<case>[^/]+)/greedy_scores")
def greedy_scores(pair, case):
    logits, trace = _golden_logits(pair, case, "greedy"), pair.greedy(case)
    if not pair.keeps_scores:
        return _draws(pair, logits, trace, pair.golden[f"case/{case}/greedy_scores"])
    return Computed(pair.first_scores(logits, trace), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/(?P<run>sampled2?)_scores")
def sampled_scores(pair, case, run):
    logits, trace = _golden_logits(pair, case, run), _sampled_run(pair, case, run)
    if not pair.keeps_scores:
        return _draws(pair, logits, trace, pair.golden[f"case/{case}/{run}_scores"])
    return Computed(pair.first_scores(logits, trace, cut=True), tolerance=EXACT)


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
    return torch.from_numpy(pair.golden[f"case/{case}/{run}_raw_logits"]).to(pair.device)


def _draws(pair, logits, trace, golden_scores):
    """Codes of every step under `_NUM_SEEDS` seeds, where the winner is not within rounding of the next."""
    drawn, noise, is_sampled = pair.draws(logits, trace, _NUM_SEEDS)
    scores = torch.from_numpy(golden_scores).repeat(_NUM_SEEDS, 1)
    best = (scores + torch.where(is_sampled[:, None], noise, 0.0)).topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 1e-4
    expected = best.indices[:, 0][clear].numpy()
    assert len(expected) >= 0.9 * len(clear), "too many near ties to show anything"
    note = f"codes drawn under {_NUM_SEEDS} seeds: the kernel keeps no scores"
    return Computed(drawn[clear], tolerance=EXACT, expected=expected, note=note)
