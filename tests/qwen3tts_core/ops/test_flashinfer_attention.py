"""FlashInfer behind the seam: what it is told, and what comes out beside the reference.

On CPU a double stands in for the library and the reference for the kernel before it, so that plans,
buffers and the engine's part are tested there; on a GPU everything is real.
"""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from qwen3tts_core.ops.attention_plan import PlannedSequence
from qwen3tts_core.ops.interface import DecodeLayout, FrameLayout, PrefillLayout, RopeTable
from qwen3tts_core.ops.reference import ReferenceOps, run_eagerly
from qwen3tts_core.ops.select import select_backend
from qwen3tts_core.types import Sampling
from tests.qwen3tts_core.ops import flashinfer_double
from tests.qwen3tts_core.ops_kit import HeadShape, Paged, random_qkv
from tests.qwen3tts_core.request_kit import make_request
from tests.qwen3tts_core.talker_kit import engine_config, small_talker, speak

flashinfer_attention = pytest.importorskip("qwen3tts_core.ops.cuda.flashinfer_attention")  # needs Triton
BOTH = {"prefill_attention": "flashinfer", "decode_attention": "flashinfer"}
GPU = (
    pytest.mark.gpu,
    pytest.mark.xdist_group("flashinfer"),  # it compiles for half a minute
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python, an extra, isn't installed"
    ),
)


class OnCpu(flashinfer_attention.FlashInferAttention):
    """The double, behind the reference's norm, rotation and cache write."""

    def __init__(self, **which):
        super().__init__(torch.device("cpu"), library=flashinfer_double.library(), pdl=False, **which)

    def rotate_and_write(self, *args):
        return ReferenceOps().rotate_and_write(*args)


class PlannedOps(ReferenceOps):
    planner = None

    def attention(self, qkv, q_norm, k_norm, eps, rope, layout, kv):
        if not self.planner.takes(layout):
            return super().attention(qkv, q_norm, k_norm, eps, rope, layout, kv)
        return self.planner(qkv, q_norm, k_norm, eps, rope, layout, kv)


def open_ops(where):
    if where == "cuda":
        backend = select_backend("cuda", **BOTH)
        return backend.ops, backend.device
    ops = PlannedOps()
    ops.planner = OnCpu(prefill=True, decode=True)
    return ops, torch.device("cpu")


class PlannedPaged(Paged):
    """Tells the planner of every step first."""

    def _attend(self, qkv, layout):
        tables = layout.page_table.tolist()
        if isinstance(layout, PrefillLayout):
            planned = [
                PlannedSequence(s.num_rows, s.num_context, tables[i]) for i, s in enumerate(layout.sequences)
            ]
            self.ops.planner.plan_prefill(len(qkv), planned)
        else:
            positions = layout.positions.tolist()
            planned = [PlannedSequence(1, position + 1, tables[i]) for i, position in enumerate(positions)]
            self.ops.planner.plan_decode(len(qkv), planned)
        return super()._attend(qkv, layout)


def beside_the_reference(shape, lengths, where):
    ops, device = open_ops(where)
    actual = PlannedPaged(shape, lengths, page_size=16, ops=ops, device=device, dtype=torch.bfloat16)
    expected = Paged(shape, lengths, page_size=16, ops=ReferenceOps())
    expected.norms = [norm.bfloat16().float() for norm in expected.norms]
    rope = expected.rope
    expected.rope = RopeTable(rope.cos.bfloat16().float(), rope.sin.bfloat16().float())
    return actual, expected


def assert_same(step, actual, expected, parts, num_padding):
    out, padding = getattr(actual, step)(parts, num_padding)
    wide = {stream: (first, qkv.float()) for stream, (first, qkv) in parts.items()}
    expected_out, _ = getattr(expected, step)(wide, num_padding)
    if step == "prefill":
        assert not padding.any()
    for stream, rows in out.items():
        atol = 5e-2 * float(expected_out[stream].abs().max())  # as in test_conformance.py
        torch.testing.assert_close(rows.float(), expected_out[stream], rtol=0, atol=atol)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("shape", [HeadShape(4, 1, 64), HeadShape(16, 8, 128)], ids=str)
def test_prompts_in_pieces_and_steps_after_them(where, shape):
    """At page edges, with NaN in every place that nobody wrote; a bucket is planned again and again."""
    lengths = [18, 33, 49, 35, 87]
    actual, expected = beside_the_reference(shape, lengths, where)
    streams = [random_qkv(shape, length, seed=i, dtype=torch.bfloat16) for i, length in enumerate(lengths)]
    cuts = [1, 16, 31, 17, 69]
    assert_same("prefill", actual, expected, {i: (0, qkv[: cuts[i]]) for i, qkv in enumerate(streams)}, 6)
    second = {i: (cuts[i], qkv[cuts[i] : -2]) for i, qkv in enumerate(streams)}
    assert_same("prefill", actual, expected, second, 3)
    for back in (2, 1):
        parts = {i: (len(qkv) - back, qkv[len(qkv) - back, None]) for i, qkv in enumerate(streams)}
        assert_same("decode", actual, expected, parts, 3)


# ---------------------------------------------------------------- told by the engine
class CheckedOps(PlannedOps):
    """Attends twice, by plan and by what the device says, and wants the same for every row that counts."""

    def __init__(self):
        super().__init__()
        self.planner = OnCpu(prefill=True, decode=True)
        self.checked = {"prefill": 0, "decode": 0}

    def attention(self, qkv, q_norm, k_norm, eps, rope, layout, kv):
        args = (qkv, q_norm, k_norm, eps, rope, layout, kv)
        expected = ReferenceOps.attention(self, *args)
        if isinstance(layout, FrameLayout):
            return expected
        if isinstance(layout, DecodeLayout):
            counts, kind = layout.page_table[:, 0] != len(kv.key) - 1, "decode"  # not in the trash page
        else:
            counts, kind = layout.row_sequence >= 0, "prefill"
        planned = self.planner(*args)
        torch.testing.assert_close(planned[counts], expected[counts], rtol=2e-2, atol=6e-2)  # of some 4
        self.checked[kind] += int(counts.sum())
        return expected


def mixed_requests():
    return [
        make_request(f"{i}", rows=rows, frames=frames, sampling=Sampling(), seed=i)
        for i, (rows, frames) in enumerate([(2, 9), (37, 4), (11, 14), (1, 3), (20, 11), (5, 6)])
    ]


def test_the_engine_plans_what_its_steps_attend_to():
    """Three slots for six requests: prompts in pieces, rows joining and leaving, padded buckets."""
    ops = CheckedOps()
    talker = small_talker(ops=ops, head_dim=64, dtype=torch.bfloat16)
    config = engine_config(num_slots=3, decode_buckets=(2, 4))
    spoken = speak(talker, mixed_requests(), config)
    assert all(stream.error is None for stream in spoken.values())
    num_frames = sum(len(stream.codes) for stream in spoken.values())
    num_layers = len(talker.layers)
    assert ops.checked["decode"] >= num_layers * num_frames
    assert ops.checked["prefill"] == num_layers * sum(r.plan.num_rows - 1 for r in mixed_requests())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_captured_step_attends_to_the_plan_of_its_launch(device):
    """Codes of graphs and of eager steps, through the same kernels."""
    spoken = []
    for capture in (None, run_eagerly):
        backend = select_backend(device, **BOTH)
        talker = small_talker(ops=backend.ops, head_dim=64, device=backend.device, dtype=torch.bfloat16)
        seams = backend if capture is None else replace(backend, capture=capture)
        config = engine_config(num_slots=3, decode_buckets=(2, 4))
        spoken.append(speak(talker, mixed_requests(), config, backend=seams))
    graph, eager = spoken
    for name, stream in graph.items():
        assert stream.error is None
        assert stream.codes.tolist() == eager[name].codes.tolist(), name


# ---------------------------------------------------------------- what it refuses
def test_heads_that_the_library_lacks_are_refused_by_name():
    ops, _ = open_ops("cpu")
    talker = small_talker(ops=ops, head_dim=8)
    with pytest.raises(
        ValueError, match=r"heads of 64, 128, 256 in bfloat16 or float16.* heads of 8 in torch\.float32"
    ):
        speak(talker, [make_request("a", rows=3, frames=2)], engine_config())


def test_a_missing_library_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match="install flashinfer-python, or leave prefill_attention"):
        flashinfer_attention.FlashInferAttention(torch.device("cpu"), prefill=True, decode=False)


def test_a_cpu_has_no_flashinfer():
    with pytest.raises(ValueError, match="flashinfer needs a GPU, the device is cpu"):
        select_backend("cpu", decode_attention="flashinfer")
