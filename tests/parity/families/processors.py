"""The logit processors, bit for bit: golden raw logits and history in, golden scores out."""

import torch

from qwen3tts_core.ops.interface import DrawRows
from qwen3tts_core.ops.sampling import cut_scores
from tests.parity.families.generation import processed
from tests.parity.registry import CLOSE, EXACT, Computed, NotCompared, array

# What make_golden.py of the kit changes for its second sampled run: penalty, temperature, top-k, top-p.
_SECOND_RUN = (1.7, 0.6, 20, 0.8)


@array(r"case/(?P<case>[^/]+)/greedy_scores")
def greedy_scores(pair, case):
    penalty = pair.config.sampling.repetition_penalty
    return Computed(_golden_processed(pair, case, "greedy", penalty), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/sampled_scores")
def sampled_scores(pair, case):
    sampling = pair.config.sampling
    draw = sampling.talker
    settings = (sampling.repetition_penalty, draw.temperature, draw.top_k, draw.top_p)
    return Computed(_golden_scores(pair, case, "sampled", *settings), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/sampled2_scores")
def second_sampled_scores(pair, case):
    return Computed(_golden_scores(pair, case, "sampled2", *_SECOND_RUN), tolerance=EXACT)


@array(r"case/(?P<case>[^/]+)/sampled_raw_logits")
def sampled_logits(pair, case):
    """The sampled frames forced on the engine must lead to the same logits."""
    num_samples = len(pair.golden[f"case/{case}/sampled_raw_logits"])
    return Computed(torch.stack(pair.forced_as_sampled(case).first_logits[:num_samples]), tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/sampled2_raw_logits")
def second_sampled_logits(pair, case):
    return Computed(
        torch.stack(pair.forced(case).first_logits[:1]),
        tolerance=CLOSE,
        expected=pair.golden[f"case/{case}/sampled2_raw_logits"][:1],
        note="the first step; the file doesn't hold the frames that led to the others",
    )


@array(r"case/[^/]+/sampled2?_first", r"case/[^/]+/sampled_codes")
def draws(pair):
    return NotCompared("drawn by torch's generator; an input of the sampled logits and scores")


def _golden_processed(pair, case, run, penalty):
    logits = torch.from_numpy(pair.golden[f"case/{case}/{run}_raw_logits"])
    return processed(pair, logits, pair.golden[f"case/{case}/{run}_first"], penalty)


def _golden_scores(pair, case, run, penalty, temperature, top_k, top_p):
    scores = _golden_processed(pair, case, run, penalty)
    num_steps = len(scores)
    draw = DrawRows(
        do_sample=torch.ones(num_steps, dtype=torch.bool),
        temperature=torch.full((num_steps,), temperature),
        top_k=torch.full((num_steps,), top_k),
        tail_mass=torch.full((num_steps,), 1.0 - top_p),
    )
    return cut_scores(scores, draw)
