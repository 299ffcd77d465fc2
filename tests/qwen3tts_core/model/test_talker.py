from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.errors import CheckpointMismatch, EngineFault, InvalidCodes, InvalidRequest
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.reference import ReferenceOps
from qwen3tts_core.types import NO_ID, PrefillPlan, ReferenceVoice
from tests.qwen3tts_core.request_kit import make_plan
from tests.qwen3tts_core.talker_kit import (
    FOLDERS,
    OneStream,
    SeededWeights,
    checkpoint_talker,
    forced,
    run_rows,
    scripted,
    small_config,
    small_talker,
)

small = small_talker()


# ---------------------------------------------------------------- what goes in
def test_a_text_feature_is_the_projected_embedding():
    source = SeededWeights(small_config())
    named = {name: source.read(f"talker.{name}", "cpu") for name in (
        "model.text_embedding.weight",
        "text_projection.linear_fc1.weight", "text_projection.linear_fc1.bias",
        "text_projection.linear_fc2.weight", "text_projection.linear_fc2.bias",
    )}  # fmt: skip
    embedding, weight1, bias1, weight2, bias2 = named.values()
    ids = [0, 7, 439]
    hidden = embedding[ids] @ weight1.T + bias1
    expected = (hidden * hidden.sigmoid()) @ weight2.T + bias2
    torch.testing.assert_close(small.text_features(ids), expected)


def test_a_prompt_row_is_the_sum_of_the_two_sides_it_has():
    plan = PrefillPlan((5, NO_ID, 9), (NO_ID, 6, 700), (1,))
    rows = small.prompt_rows(plan)
    assert torch.equal(rows[0], small.text_table[5])
    assert torch.equal(rows[1], small.codec_embedding[6])
    assert torch.equal(rows[2], small.text_table[9] + small.codec_embedding[700])


def test_a_frame_embeds_as_the_sum_over_its_groups():
    codes = torch.tensor([[3, 60, 0, 63], [166, 1, 2, 3]])
    expected = small.codec_embedding[codes[:, 0]] + sum(
        small.group_embeddings[group - 1][codes[:, group]] for group in (1, 2, 3)
    )
    torch.testing.assert_close(small.frame_embeddings(codes), expected)
    torch.testing.assert_close(small.frame_embeddings(codes[None]), expected[None])


def clone_voice(num_frames, width=16):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 64, (num_frames, 4)).astype("<i2")
    vector = rng.standard_normal(width).astype("<f4")
    return ReferenceVoice("voice", vector.tobytes(), codes.tobytes()), vector, codes


def test_a_cloned_voice_adds_its_vector_and_its_frames_where_the_plan_says():
    voice, vector, codes = clone_voice(3)
    plan = replace(make_plan(9), speaker_row=1, reference_row=5)
    plain, cloned = (
        small.prompt_rows(replace(plan, speaker_row=None, reference_row=None)),
        small.prompt_rows(plan, voice),
    )
    expected = plain.clone()
    expected[1] += torch.from_numpy(vector)
    expected[5:8] += small.frame_embeddings(torch.from_numpy(codes.astype(np.int64)))
    torch.testing.assert_close(cloned, expected)


def test_a_voice_of_another_checkpoint_is_refused_by_its_width():
    voice, _, _ = clone_voice(1, width=24)
    with pytest.raises(InvalidRequest, match="24 values, this checkpoint takes 16") as caught:
        small.prompt_rows(replace(make_plan(4), speaker_row=0), voice)
    assert caught.value.param == "voice"


@pytest.mark.parametrize("codes", [b"\0" * 7, b"\0" * 12, b"\xff\xff" * 4, b"\x40\0" * 4])
def test_codes_of_another_checkpoint_are_refused_before_they_are_looked_up(codes):
    """Half a code, a frame of three groups, -1 and 64 where there are 64 codes."""
    voice = replace(clone_voice(1)[0], codes=codes)
    with pytest.raises(InvalidRequest, match="4 code groups") as caught:
        small.prompt_rows(replace(make_plan(9), speaker_row=1, reference_row=5), voice)
    assert caught.value.param == "voice"


def test_more_reference_frames_than_planned_is_ours():
    voice, _, _ = clone_voice(5)
    with pytest.raises(InvalidCodes, match="5 reference frames"):
        small.prompt_rows(replace(make_plan(9), reference_row=5), voice)
    small.prompt_rows(replace(make_plan(9), reference_row=4), voice)


def test_only_codes_and_eos_may_be_drawn():
    config = small.config.talker
    allowed = small.allowed_ids.nonzero().flatten().tolist()
    assert allowed == [*range(config.vocab_size - 1024), config.codec_eos_id]


# ---------------------------------------------------------------- the backbone
@pytest.mark.parametrize("variant", FOLDERS)
def test_forced_frames_give_the_reference_s_hidden_states_and_logits(variant):
    """The first golden case: its prompt in one prefill, then eight forced frames step by step."""
    talker, name = checkpoint_talker(variant), "plain_auto_stream"
    rows = forced(variant, name).input_rows(talker)
    hidden = run_rows(talker, rows, [len(rows) - 8] + [1] * 8)
    arrays = forced(variant, name).arrays
    # The kit's gate is 1e-4; an independent float32 implementation was within 5e-6.
    np.testing.assert_allclose(hidden, arrays["forced_hidden"], rtol=0, atol=1e-5)
    logits = talker.first_logits(hidden[-9:])
    np.testing.assert_allclose(logits, arrays["forced_logits"], rtol=0, atol=2e-5)


class FoldingOps(ReferenceOps):
    """Asks for norms without gains, as a GPU's backend does."""

    folds_gains = True


class NarrowOps(FoldingOps):
    """Reads matrices of eight bits, as a GPU's backend does."""

    reads_float8 = True


def test_weights_of_eight_bits_take_half_the_memory_and_mean_the_same_widened():
    options = {"dtype": torch.bfloat16, "weight_dtype": "float8_e4m3"}
    kept, widened = (checkpoint_talker("custom_voice", ops=ops, **options) for ops in (NarrowOps(), None))

    def layers(talker):
        return [*talker.layers, *talker.code_predictor.layers]

    for narrow, wide in zip(layers(kept), layers(widened), strict=True):
        for name in ("qkv", "o_proj", "gate_up", "down"):
            matrix, same = getattr(narrow, name), getattr(wide, name)
            assert torch.equal(matrix.dequantized(torch.bfloat16), same)
            assert matrix.nbytes < 0.55 * same.nbytes + 4 * len(same)
    heads = kept.code_predictor.heads
    assert torch.equal(heads[3].dequantized(torch.bfloat16), widened.code_predictor.heads[3])
    assert kept.codec_head.dtype == torch.bfloat16  # what decides about the end of speech is left alone


@pytest.mark.parametrize("variant", FOLDERS)
def test_gains_folded_into_matrices_change_rounding_only(variant):
    """Hidden states and the logits of every group."""
    plain, folded = checkpoint_talker(variant), checkpoint_talker(variant, ops=FoldingOps())
    assert all(layer.input_norm is None and layer.mlp_norm is None for layer in folded.layers)
    assert folded.code_predictor.norm is None
    case = forced(variant, "plain_auto_stream")
    rows = case.input_rows(plain)
    hidden = run_rows(plain, rows, [len(rows)])
    torch.testing.assert_close(run_rows(folded, rows, [len(rows)]), hidden, rtol=0, atol=1e-5)
    logs = [], []
    for talker, log in zip((plain, folded), logs, strict=True):
        talker.code_predictor(hidden[-8:], case.codes[:, 0], talker.ops, scripted(case.codes, log))
    for (_, expected), (_, logits) in zip(*logs, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_a_prompt_in_pieces_is_the_whole_prompt(cuts):
    rows = small.prompt_rows(make_plan(sum(cuts)))
    whole = run_rows(small, rows, [len(rows)])
    torch.testing.assert_close(run_rows(small, rows, cuts), whole, rtol=0, atol=1e-5)


def test_later_rows_change_nothing_before_them():
    rows = small.prompt_rows(make_plan(9))
    changed = rows.clone()
    changed[6:] += 1
    before, after = run_rows(small, rows, [9]), run_rows(small, changed, [9])
    torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=1e-6)
    assert not torch.allclose(before[6:], after[6:], atol=1e-2)


# ---------------------------------------------------------------- the code predictor
@pytest.mark.parametrize("variant", [*FOLDERS, "small"])
def test_groups_one_by_one_equal_one_causal_pass_over_the_frame(variant):
    """Spec 2.3: inputs [h, E_0[c0], E_1[c1], ...], head g - 1 at position g."""
    talker = small if variant == "small" else checkpoint_talker(variant)
    predictor, ops = talker.code_predictor, ReferenceOps()
    groups = predictor.config.num_code_groups
    torch.manual_seed(0)
    codes, hidden, log = torch.randint(0, 64, (3, groups)), torch.randn(3, talker.width), []
    made = predictor(hidden, codes[:, 0], ops, scripted(codes, log))
    assert torch.equal(made, codes)
    assert [group for group, _ in log] == list(range(1, groups))

    eps = predictor.config.transformer.rms_norm_eps
    for row in range(3):
        embedded = [hidden[row], talker.codec_embedding[codes[row, 0]]]
        embedded += [talker.group_embeddings[g - 1][codes[row, g]] for g in range(1, groups - 1)]
        x = predictor.project(torch.stack(embedded))
        stream = OneStream(predictor.config.transformer, groups)
        layout = stream.prefill_layout(groups)
        for layer, kv in zip(predictor.layers, stream.cache, strict=True):
            x = layer(x, ops, predictor.rope, layout, kv)
        normed = ops.rms_norm(x, predictor.norm, eps)
        for group, logits in log:
            expected = normed[group] @ predictor.heads[group - 1].T
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=5e-5)


def test_rows_of_a_frame_do_not_mix():
    torch.manual_seed(0)
    codes, hidden = torch.randint(0, 64, (5, 4)), torch.randn(5, 16)
    together, alone = [], []
    small.code_predictor(hidden, codes[:, 0], ReferenceOps(), scripted(codes, together))
    small.code_predictor(hidden[2:3], codes[2:3, 0], ReferenceOps(), scripted(codes[2:3], alone))
    for (_, batch), (_, single) in zip(together, alone, strict=True):
        torch.testing.assert_close(batch[2:3], single, rtol=0, atol=1e-5)


def test_the_projection_exists_exactly_where_the_widths_differ():
    assert small.code_predictor.projection is not None
    assert small_talker(predictor_width=16).code_predictor.projection is None


# ---------------------------------------------------------------- what is loaded
def test_a_start_lists_every_tensor_that_is_missing_or_left_over():
    source = SeededWeights(small_config())
    del source.shapes()["talker.model.norm.weight"]
    source.shapes()["talker.model.layers.2.mlp.up_proj.weight"] = (
        24,
        16,
    )  # a layer more than the config says
    source.shapes()["speaker_encoder.fc.bias"] = (3,)  # somebody else's
    with pytest.raises(CheckpointMismatch) as caught:
        Talker(
            source,
            small_config(),
            num_positions=8,
            ops=ReferenceOps(),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
    named = [problem.partition(":")[0] for problem in caught.value.problems]
    assert named == ["talker.model.norm.weight", "talker.model.layers.2.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("field", "ids"),
    [
        ("text_ids", (3, 10**6)),
        ("text_ids", (-7, 3)),
        ("codec_ids", (NO_ID, 10**6)),
        ("trailing_ids", (10**6,)),
    ],
)
def test_ids_that_no_table_holds_are_told_before_the_lookup(field, ids):
    plan = replace(PrefillPlan((3, 4), (NO_ID, 5), ()), **{field: ids})
    with pytest.raises(EngineFault, match=str(max(ids, key=abs))):
        small.prompt_rows(plan)
