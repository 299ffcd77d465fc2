"""What the talker's engine computes: golden frames forced on it, greedy runs, batches of both."""

import numpy as np
import torch

from tests.parity.registry import CLOSE, EXACT, INPUT, Computed, array


# ---------------------------------------------------------------- forced frames
@array(r"case/[^/]+/forced_codes")
def forced_codes(pair):
    return INPUT


@array(r"case/(?P<case>[^/]+)/forced_hidden")
def forced_hidden(pair, case):
    trace = pair.forced(case)
    return Computed(pair.hidden(trace)[: len(pair.golden[f"case/{case}/forced_hidden"])], tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/forced_logits")
def forced_logits(pair, case):
    num_steps = len(pair.golden[f"case/{case}/forced_codes"]) + 1
    return Computed(torch.stack(pair.forced(case).first_logits[:num_steps]), tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/forced_cp_logits")
def forced_code_predictor_logits(pair, case):
    num_frames = len(pair.golden[f"case/{case}/forced_codes"])
    steps = pair.forced(case).next_logits[:num_frames]
    return Computed(torch.stack([torch.stack(step) for step in steps]), tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/forced_layers")
def forced_layers(pair, case):
    """The input of every layer; in the last place the final hidden state.

    Trained weights have layers with rows of hundreds, where float32 itself is coarser: eight roundings of such a
    layer's largest value are allowed, and the errors compared are in units of each layer's own tolerance.
    """
    trace, expected = pair.forced(case), pair.golden[f"case/{case}/forced_layers"]
    rows = torch.cat(trace.layer_rows, dim=1)
    layers = torch.cat([rows[:-1], pair.hidden(trace)[None]])[:, : expected.shape[1]]
    largest = np.abs(expected).max(axis=(1, 2), keepdims=True)
    scale = np.maximum(1.0, 8 * np.finfo(np.float32).eps * largest / CLOSE)
    return Computed(layers.cpu().numpy() / scale, tolerance=CLOSE, expected=expected / scale)


# ---------------------------------------------------------------- greedy runs
@array(r"case/(?P<case>[^/]+)/greedy_first")
def greedy_first_codes(pair, case):
    return Computed(
        *(pair.drawn(trace) for trace in pair.greedy_runs(case)), tolerance=EXACT, note=_runs(pair)
    )


@array(r"case/(?P<case>[^/]+)/greedy_codes")
def greedy_codes(pair, case):
    """At its limit of N samples the reference drops the last; our limit counts frames, so we have it."""
    num_frames = len(pair.golden[f"case/{case}/greedy_codes"])
    frames = [np.array(trace.frames[:num_frames]) for trace in pair.greedy_runs(case)]
    return Computed(*frames, tolerance=EXACT, note=_runs(pair))


def _runs(pair):
    return "step by step and in captured graphs" if pair.has_graphs else ""


@array(r"case/(?P<case>[^/]+)/greedy_hidden")
def greedy_hidden(pair, case):
    num_samples = len(pair.golden[f"case/{case}/greedy_hidden"])
    return Computed(pair.step_hidden(pair.greedy(case), case)[:num_samples], tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/greedy_raw_logits")
def greedy_logits(pair, case):
    num_samples = len(pair.golden[f"case/{case}/greedy_raw_logits"])
    return Computed(torch.stack(pair.greedy(case).first_logits[:num_samples]), tolerance=CLOSE)


@array(r"case/(?P<case>[^/]+)/greedy_margin")
def greedy_margin(pair, case):
    """How far the best score of a step lies above the second best."""
    num_samples = len(pair.golden[f"case/{case}/greedy_margin"])
    trace = pair.greedy(case)
    scores = pair.first_scores(torch.stack(trace.first_logits[:num_samples]), trace)
    best = scores.topk(2).values
    return Computed(best[:, 0] - best[:, 1], tolerance=CLOSE)


# ---------------------------------------------------------------- batches
@array(r"batch/(?P<batch>[^/]+)/greedy_first")
def batch_first_codes(pair, batch):
    """After its end a row of the reference goes on with EOS."""
    expected = pair.golden[f"batch/{batch}/greedy_first"]
    rows = [pair.drawn(trace) for trace in pair.batch(batch).values()]
    eos = pair.config.talker.codec_eos_id
    filled = [np.pad(row, (0, expected.shape[1] - len(row)), constant_values=eos) for row in rows]
    return Computed(np.stack(filled), tolerance=EXACT)


@array(r"batch/(?P<batch>[^/]+)/greedy_codes")
def batch_codes(pair, batch):
    expected = pair.golden[f"batch/{batch}/greedy_codes"]
    ours, theirs = [], []
    for trace, row in zip(pair.batch(batch).values(), expected, strict=True):
        num_frames = min(len(trace.frames), len(row))
        ours.extend(trace.frames[:num_frames])
        theirs.extend(row[:num_frames])
    return Computed(np.array(ours), tolerance=EXACT, expected=np.array(theirs), note=_UP_TO_EOS)


@array(r"batch/(?P<batch>[^/]+)/greedy_hidden")
def batch_hidden(pair, batch):
    expected = pair.golden[f"batch/{batch}/greedy_hidden"]
    ours, theirs = [], []
    for (case, trace), row in zip(pair.batch(batch).items(), expected, strict=True):
        num_samples = len(pair.drawn(trace))
        ours.append(pair.step_hidden(trace, case)[:num_samples].cpu())
        theirs.append(row[:num_samples])
    return Computed(np.concatenate(ours), tolerance=CLOSE, expected=np.concatenate(theirs), note=_UP_TO_EOS)


_UP_TO_EOS = "each row up to its own EOS"
