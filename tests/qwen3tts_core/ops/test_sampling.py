import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.ops.interface import DrawRows
from qwen3tts_core.ops.sampling import cut_scores, draw_codes, first_code_scores

ROOT = Path(__file__).parents[3]
SEED0 = ROOT / "tests" / "parity" / "golden" / "seed0"
FOLDERS = {"custom_voice": ROOT / "checkpoints" / "tiny", "custom_voice_large": SEED0 / "custom_voice_large"}
NOTHING = float("-inf")

# penalty, temperature, top_k, top_p of the golden runs (their README).
RUNS = {"greedy": (1.05, None, 0, 1.0), "sampled": (1.05, 0.9, 50, 1.0), "sampled2": (1.7, 0.6, 20, 0.8)}


def draw_rows(*rows):
    """rows: (do_sample, temperature, top_k, top_p) each."""
    do_sample, temperature, top_k, top_p = zip(*rows, strict=True)
    return DrawRows(
        do_sample=torch.tensor(do_sample),
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k),
        tail_mass=torch.tensor([1.0 - p for p in top_p], dtype=torch.float32),
    )


# ---------------------------------------------------------------- the reference's numbers
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("variant", FOLDERS)
def test_processed_logits_equal_the_reference_bit_for_bit(variant, run):
    """All steps of a run as one batch: each row has its own history."""
    config = CheckpointConfig.from_checkpoint(FOLDERS[variant]).talker
    arrays = np.load(SEED0 / f"{variant}.npz")
    penalty, temperature, top_k, top_p = RUNS[run]
    cases = [name.split("/")[1] for name in arrays if name.endswith(f"/{run}_raw_logits")]
    assert cases
    for case in cases:
        raw, expected, drawn = (
            torch.from_numpy(arrays[f"case/{case}/{run}_{what}"])
            for what in ("raw_logits", "scores", "first")
        )
        steps = len(raw)
        seen = torch.zeros(raw.shape, dtype=torch.bool)
        for step in range(steps):
            seen[step, drawn[:step]] = True
        allowed = torch.arange(config.vocab_size) < config.vocab_size - 1024
        allowed[config.codec_eos_id] = True
        forbid_eos = torch.arange(steps) < 2
        scores = first_code_scores(
            raw, seen, torch.full((steps,), penalty), forbid_eos, allowed, config.codec_eos_id
        )
        if temperature is not None:
            scores = cut_scores(scores, draw_rows(*[(True, temperature, top_k, top_p)] * steps))
        assert torch.equal(scores, expected), json.loads(str(arrays[f"case/{case}/spec_json"]))


# ---------------------------------------------------------------- group 0 alone
def test_penalty_pushes_every_seen_id_down_once_and_no_other():
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0, -3.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    allowed = torch.ones(5, dtype=torch.bool)
    scores = first_code_scores(logits, seen, torch.tensor([2.0]), torch.tensor([False]), allowed, 4)
    assert scores.tolist() == [[1.0, -4.0, 0.0, 3.0, -3.0]]


def test_each_row_has_its_own_penalty_history_and_minimum_length():
    logits = torch.ones(3, 4)
    seen = torch.tensor([[True, False, False, False], [False, True, False, False], [True] * 4])
    scores = first_code_scores(
        logits,
        seen,
        torch.tensor([2.0, 4.0, 1.0]),
        torch.tensor([True, False, True]),
        torch.tensor([True, True, False, True]),
        3,
    )
    assert scores.tolist() == [
        [0.5, 1.0, NOTHING, NOTHING],
        [1.0, 0.25, NOTHING, 1.0],
        [1.0, 1.0, NOTHING, NOTHING],
    ]


# ---------------------------------------------------------------- the cut, against its definition
def cut_one_row(scores, temperature, top_k, top_p):
    """Spec 2.4 step 4 for one row, each step only where it is switched on."""
    scores = scores / torch.tensor(temperature)
    if top_k > 0:
        threshold = scores.sort(descending=True).values[min(top_k, len(scores)) - 1]
        scores = torch.where(scores < threshold, NOTHING, scores)
    if top_p < 1:
        ordered, index = scores.sort()
        in_tail = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        in_tail[-1] = False
        scores = scores.clone()
        scores[index[in_tail]] = NOTHING
    return scores


VOCAB = 12
settings_of_a_row = st.tuples(
    st.just(True),
    st.sampled_from([0.05, 0.6, 1.0, 7.0]),
    st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 9]),
    st.sampled_from([1e-9, 1e-6, 0.3, 0.5, 0.8, 0.999999, 1.0]),
)
# Few values, so that ties are everywhere, the k-th place and the tail's edge included.
scores_of_a_row = st.lists(
    st.sampled_from([NOTHING, -40.0, -1.0, 0.0, 1.0, 1.5, 30.0]), min_size=VOCAB, max_size=VOCAB
).filter(lambda row: max(row) > NOTHING)
rows = st.lists(st.tuples(scores_of_a_row, settings_of_a_row), min_size=1, max_size=5)


@given(rows)
def test_any_mix_of_settings_cuts_each_row_as_if_it_were_alone(rows):
    scores = torch.tensor([row for row, _ in rows])
    cut = cut_scores(scores, draw_rows(*[setting for _, setting in rows]))
    for i, (row, (_, temperature, top_k, top_p)) in enumerate(rows):
        expected = cut_one_row(torch.tensor(row), temperature, top_k, top_p)
        assert torch.equal(cut[i], expected), (row, temperature, top_k, top_p)


@given(rows)
def test_the_best_id_always_survives_the_cut(rows):
    scores = torch.tensor([row for row, _ in rows])
    cut = cut_scores(scores, draw_rows(*[setting for _, setting in rows]))
    best = scores.max(dim=-1).values
    for row, kept, top in zip(scores, cut, best, strict=True):
        assert (kept[row == top] > NOTHING).any()
        assert (kept[row == NOTHING] == NOTHING).all()


def test_ties_at_the_kth_place_all_stay():
    cut = cut_scores(torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]), draw_rows((True, 1.0, 2, 1.0)))
    assert (cut[0] > NOTHING).tolist() == [True, True, True, True, False]


# ---------------------------------------------------------------- the draw
def test_a_greedy_row_ignores_noise_and_settings():
    scores = torch.tensor([[0.0, 1.0, 0.5]]).repeat(2, 1)
    noise = torch.tensor([[50.0, 0.0, 0.0]]).repeat(2, 1)
    draw = draw_rows((False, 1.0, 0, 1.0), (True, 1.0, 0, 1.0))
    assert draw_codes(scores, draw, noise).tolist() == [1, 0]


@pytest.mark.parametrize("setting", [(True, 1.0, 1, 1.0), (True, 1.0, 0, 1e-9), (True, 1e-4, 0, 1.0)])
def test_k_1_a_tiny_p_and_a_tiny_temperature_are_the_arg_max(setting):
    torch.manual_seed(0)
    scores, noise = torch.randn(50, 30), 3 * torch.randn(50, 30)
    draw = draw_rows(*[setting] * 50)
    assert torch.equal(draw_codes(scores, draw, noise), scores.argmax(dim=-1))


def test_only_kept_ids_are_drawn_and_each_of_them_is():
    torch.manual_seed(0)
    scores = torch.tensor([0.0, 0.1, 0.2, -0.1, NOTHING]).repeat(500, 1)
    noise = -torch.log(-torch.log(torch.rand(500, 5)))
    drawn = draw_codes(scores, draw_rows(*[(True, 1.0, 3, 1.0)] * 500), noise)
    assert set(drawn.tolist()) == {0, 1, 2}
