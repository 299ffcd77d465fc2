import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.ops.interface import DecodeLayout, LayerKV
from qwen3tts_core.ops.reference import HostTransfer, ReferenceOps, run_eagerly
from qwen3tts_core.ops.select import select_backend
from tests.qwen3tts_core.ops_kit import EPS, HeadShape, Paged, dense, random_qkv, rope_for

SHAPES = [HeadShape(2, 2, 16), HeadShape(4, 2, 32), HeadShape(4, 1, 6)]
PAGE = 4
EDGES = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 1]
ROUNDING = {"rtol": 0, "atol": 5e-6}  # float32 against float64, outputs around 1


@pytest.fixture(params=[True, False], ids=["trimmed", "padded"])
def ops(request):
    return ReferenceOps(trim_context=request.param)


# ---------------------------------------------------------------- attention over pages
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_over_pages_is_dense_causal_attention(ops, shape):
    """Streams of every awkward length, one position at a time, each in its own rhythm."""
    paged = Paged(shape, EDGES, page_size=PAGE, ops=ops)
    streams = {i: random_qkv(shape, length, seed=i) for i, length in enumerate(EDGES)}
    results = {i: [] for i in streams}
    for position in range(max(EDGES)):
        parts = {i: (position, qkv[position, None]) for i, qkv in streams.items() if position < len(qkv)}
        step, padding = paged.decode(parts, num_padding=2)
        assert torch.isfinite(padding).all()
        for i, row in step.items():
            results[i].append(row)
    for i, qkv in streams.items():
        expected, _, _ = dense(shape, qkv)
        torch.testing.assert_close(torch.cat(results[i]).double(), expected, **ROUNDING)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_prefill_over_pages_is_dense_causal_attention(ops, shape):
    paged = Paged(shape, EDGES, page_size=PAGE, ops=ops)
    streams = {i: random_qkv(shape, length, seed=i) for i, length in enumerate(EDGES)}
    results, padding = paged.prefill({i: (0, qkv) for i, qkv in streams.items()}, num_padding=3)
    for i, qkv in streams.items():
        expected, _, _ = dense(shape, qkv)
        torch.testing.assert_close(results[i].double(), expected, **ROUNDING)
    assert torch.equal(padding, torch.zeros_like(padding))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_into_prefills_and_decode_steps_equals_the_whole(data):
    """Prefill in pieces, several streams packed, then decode: dense attention at every row."""
    shape = HeadShape(4, 2, 6)
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    paged = Paged(shape, lengths, page_size=data.draw(st.sampled_from([1, 3, 4])), ops=ReferenceOps())
    streams = {i: random_qkv(shape, length, seed=i) for i, length in enumerate(lengths)}
    results, done = {i: [] for i in streams}, dict.fromkeys(streams, 0)
    while unfinished := [i for i in streams if done[i] < lengths[i]]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        if data.draw(st.booleans()):
            sizes = {i: data.draw(st.integers(1, lengths[i] - done[i])) for i in chosen}
            parts = {i: (done[i], streams[i][done[i] : done[i] + sizes[i]]) for i in chosen}
            step, _ = paged.prefill(parts, num_padding=data.draw(st.integers(0, 2)))
        else:
            parts = {i: (done[i], streams[i][done[i], None]) for i in chosen}
            step, _ = paged.decode(parts, num_padding=data.draw(st.integers(0, 2)))
        for i, rows in step.items():
            results[i].append(rows)
            done[i] += len(rows)
    for i, qkv in streams.items():
        torch.testing.assert_close(torch.cat(results[i]).double(), dense(shape, qkv)[0], **ROUNDING)


def test_the_order_of_pages_changes_no_bit(ops):
    shape, outputs = SHAPES[1], []
    for seed in range(3):
        paged = Paged(shape, [9], page_size=PAGE, seed=seed, ops=ops)
        qkv = random_qkv(shape, 9, seed=0)
        prompt, _ = paged.prefill({0: (0, qkv[:8])})
        frame, _ = paged.decode({0: (8, qkv[8:])})
        outputs.append(torch.cat([prompt[0], frame[0]]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_keys_and_values_go_to_their_places_and_nowhere_else(ops, shape):
    paged = Paged(shape, [6, 5], page_size=PAGE, ops=ops)
    streams = {i: random_qkv(shape, length, seed=i) for i, length in enumerate([6, 5])}
    paged.prefill({i: (0, qkv[:-1]) for i, qkv in streams.items()}, num_padding=3)
    paged.decode({i: (len(qkv) - 1, qkv[-1:]) for i, qkv in streams.items()}, num_padding=1)
    expected = torch.full_like(paged.written(), torch.nan).double()
    flat = expected.view(2, -1, *expected.shape[-2:])
    for i, qkv in streams.items():
        _, key, value = dense(shape, qkv)
        for position in range(len(qkv)):
            flat[0, paged.place(i, position)] = key[position]
            flat[1, paged.place(i, position)] = value[position]
    torch.testing.assert_close(paged.written().double(), expected, equal_nan=True, **ROUNDING)


def test_two_rows_of_one_page_see_each_other_in_the_same_step(ops):
    """The code predictor's first pass: positions 0 and 1 of every row's page go in together."""
    shape, batch = SHAPES[1], 3
    streams = [random_qkv(shape, 2, seed=i) for i in range(batch)]
    kv = LayerKV(*(torch.full((batch, 16, shape.num_kv_heads, shape.head_dim), torch.nan) for _ in range(2)))
    rows = torch.arange(batch).repeat(2)
    positions = torch.tensor([0, 1]).repeat_interleave(batch)
    layout = DecodeLayout(positions, rows * 16 + positions, rows[:, None], rows_share_pages=True)
    packed = torch.cat([torch.stack([qkv[p] for qkv in streams]) for p in (0, 1)])
    out = ops.attention(packed, *shape.norms(), EPS, rope_for(shape.head_dim, 16), layout, kv)
    for i, qkv in enumerate(streams):
        expected, _, _ = dense(shape, qkv)
        torch.testing.assert_close(out[[i, batch + i]].double(), expected, **ROUNDING)


# ---------------------------------------------------------------- rows
def test_rms_norm_casts_back_before_the_weight():
    """Spec 2.1: in half precision the order of the two roundings shows."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8).bfloat16()
    mean = x.double().square().mean(dim=-1, keepdim=True)
    expected = (x.double() * (mean + 1e-6).rsqrt()).float().bfloat16() * weight
    assert torch.equal(ReferenceOps().rms_norm(x, weight, 1e-6), expected)


def test_fused_rows_are_the_sum_of_their_parts():
    torch.manual_seed(0)
    ops = ReferenceOps()
    x, norm, weight, down = torch.randn(3, 8), torch.randn(8), torch.randn(12, 8), torch.randn(8, 6)
    normed = ops.rms_norm(x, norm, EPS)
    torch.testing.assert_close(ops.norm_linear(x, norm, EPS, weight), normed @ weight.T)
    gate, up = (normed @ weight[:6].T, normed @ weight[6:].T)
    gated = ops.norm_gate_up(x, norm, EPS, weight)
    torch.testing.assert_close(gated, gate / (1 + (-gate).exp()) * up)
    torch.testing.assert_close(ops.linear_add(gated, down, x), x + gated @ down.T)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)


# ---------------------------------------------------------------- the other two seams
def test_a_host_result_outlives_the_next_launch():
    buffer = torch.zeros(3)
    launch = run_eagerly(lambda: buffer.add_(1), "count")
    launch()
    first = HostTransfer().start(buffer)
    launch()
    assert first.is_ready()
    assert first.wait().tolist() == [1, 1, 1]
    assert buffer.tolist() == [2, 2, 2]


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", "xpu", "meta", "tpu", "", "cpu:x"])
def test_a_device_asked_for_by_name_is_there_or_an_error(device, monkeypatch):
    """Never another one instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"(?i)device"):
        select_backend(device)


def test_auto_takes_the_cpu_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("auto", "cpu"):
        backend = select_backend(device)
        assert backend.device.type == "cpu"
        assert backend.ops.name == "reference"
