"""One suite for every backend: each method of `Ops` against the reference on CPU in float32.

The yardstick gets the very inputs, after they were rounded to the backend's dtype. Where a fused
kernel keeps more digits than the reference's own half precision does, it may only be closer.
"""

import functools

import pytest
import torch

from qwen3tts_core.ops.interface import DrawRows, FrameLayout, LayerKV, NoiseKey, RopeTable
from qwen3tts_core.ops.reference import ReferenceOps, spell_out
from qwen3tts_core.ops.sampling import cut_scores, first_code_scores
from qwen3tts_core.ops.scaled_matrix import ScaledMatrix
from qwen3tts_core.ops.select import select_backend
from tests.qwen3tts_core.ops_kit import EPS, HeadShape, Paged, random_qkv, rope_for

YARDSTICK = ReferenceOps()
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
ROWS = [1, 3, 4, 8, 32, 33]  # decode kernels for up to 32 rows, matrix products beyond


def only_on_gpu(*cases):
    """Sizes that would hold up a CPU and show nothing more there."""
    return [pytest.param(*case, marks=pytest.mark.gpu) for case in cases]


# Relative to the largest expected value.
TOLERANCE = {
    # Sums of up to 2,048 float32 products in another order; attention goes through exp and a rotation.
    torch.float32: {"rows": 5e-6, "attention": 2e-5, "eight bits": 5e-6},
    # 8 bits: half a unit is 2^-9 = 0.2 % of a value. Rows round twice (norm, result); attention rounds q
    # and k after norm and rotation, so that a score of 10 is off by 0.1 and its weight by 10 %, of which
    # a sum over many values keeps a part. The reference rounds a scaled weight too.
    torch.bfloat16: {"rows": 1e-2, "attention": 5e-2, "eight bits": 1.5e-2},
}


@functools.cache
def open_backend(name):
    if name.startswith("reference"):
        return ReferenceOps(trim_context=name == "reference"), torch.device("cpu")
    backend = select_backend(name)
    return backend.ops, backend.device


@pytest.fixture(params=["reference", CUDA])
def backend(request):
    return open_backend(request.param)


both_references = pytest.mark.parametrize("backend", ["reference", "reference_padded", CUDA], indirect=True)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


def assert_conforms(actual, expected, dtype, kind="rows"):
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    atol = TOLERANCE[dtype][kind] * float(expected.abs().max())
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=0, atol=atol)


class Inputs:
    """Seeded tensors: rounded to `dtype`, once for the backend and once, widened, for the yardstick."""

    def __init__(self, dtype, device):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape, scale=1.0, offset=0.0):
        wide = (offset + scale * torch.randn(shape, generator=self.generator)).to(self.dtype)
        return wide.to(self.device), wide.float().clone()  # an op may write into its residual


# ---------------------------------------------------------------- rows
F32, BF16 = torch.float32, torch.bfloat16
# Published matrices, one of them in float32 too: that is compiled for every size, and no server's setting.
WIDTHS = [
    *[(dtype, *sizes) for dtype in (F32, BF16) for sizes in [(48, 80), (64, 1088), (1024, 512), (2048, 256)]],
    *only_on_gpu((F32, 2048, 4096), (BF16, 2048, 4096), (BF16, 2048, 3072), (BF16, 6144, 2048)),
    *only_on_gpu((BF16, 1024, 4096), (BF16, 2048, 1024), (BF16, 3072, 1024)),
]
GATED_WIDTHS = [
    *[(dtype, *sizes) for dtype in (F32, BF16) for sizes in [(48, 80), (64, 96), (1024, 384)]],
    *only_on_gpu((F32, 2048, 6144), (BF16, 1024, 3072), (BF16, 2048, 6144)),
]


def row_counts(device):
    """All in one test, since they share their compiled kernels."""
    return ROWS if device.type == "cpu" else [*ROWS, 64, 128]


def gains(inputs, width):
    """Folded into the matrix, and where the sizes are small apart as well: no server has it so."""
    return [(None, None)] if width > 64 else [(None, None), inputs(width, scale=0.2, offset=1.0)]


@pytest.mark.parametrize("width", [16, 48, 64, 1024, 2048])
def test_rms_norm(backend, dtype, width):
    ops, device = backend
    inputs = Inputs(dtype, device)
    weight, weight32 = inputs(width, scale=0.2, offset=1.0)
    for num_rows in row_counts(device):
        x, x32 = inputs(num_rows, width, scale=3.0)
        assert_conforms(ops.rms_norm(x, weight, EPS), YARDSTICK.rms_norm(x32, weight32, EPS), dtype)


@pytest.mark.parametrize(("dtype", "width", "outputs"), WIDTHS)
def test_linear_maps(backend, dtype, width, outputs):
    """linear, linear_add and norm_linear over one matrix."""
    ops, device = backend
    inputs = Inputs(dtype, device)
    weight, weight32 = inputs(outputs, width, scale=width**-0.5)
    for num_rows in row_counts(device):
        x, x32 = inputs(num_rows, width)
        residual, residual32 = inputs(num_rows, outputs)
        assert_conforms(ops.linear(x, weight), YARDSTICK.linear(x32, weight32), dtype)
        expected = YARDSTICK.linear_add(x32, weight32, residual32)
        assert_conforms(ops.linear_add(x, weight, residual), expected, dtype)
        for gain, gain32 in gains(inputs, width):
            expected = YARDSTICK.norm_linear(x32, gain32, EPS, weight32)
            assert_conforms(ops.norm_linear(x, gain, EPS, weight), expected, dtype)


@pytest.mark.parametrize(("dtype", "width", "inner"), GATED_WIDTHS)
def test_norm_gate_up(backend, dtype, width, inner):
    ops, device = backend
    inputs = Inputs(dtype, device)
    gate_up, gate_up32 = inputs(2 * inner, width, scale=width**-0.5)
    for num_rows in row_counts(device):
        x, x32 = inputs(num_rows, width)
        for gain, gain32 in gains(inputs, width):
            expected = YARDSTICK.norm_gate_up(x32, gain32, EPS, gate_up32)
            assert_conforms(ops.norm_gate_up(x, gain, EPS, gate_up), expected, dtype)


EIGHT_BIT_WIDTHS = [
    *[(dtype, 64, 96) for dtype in (F32, BF16)],
    (BF16, 1024, 512),
    *only_on_gpu((BF16, 1024, 6144), (BF16, 2048, 4096), (BF16, 3072, 1024), (BF16, 6144, 2048)),
]


@pytest.mark.parametrize(("dtype", "width", "outputs"), EIGHT_BIT_WIDTHS)
def test_maps_by_a_matrix_of_eight_bits(backend, dtype, width, outputs):
    """130 rows go where a product's arithmetic counts."""
    ops, device = backend
    inputs = Inputs(dtype, device)
    wide, _ = inputs(outputs, width, scale=width**-0.5)
    matrix32 = ScaledMatrix.quantized(wide.cpu())
    matrix = ScaledMatrix(matrix32.values.to(device), matrix32.scales.to(device))
    for num_rows in [*row_counts(device), *([] if device.type == "cpu" else [130])]:
        x, x32 = inputs(num_rows, width)
        residual, residual32 = inputs(num_rows, outputs)
        assert_conforms(ops.linear(x, matrix), YARDSTICK.linear(x32, matrix32), dtype, "eight bits")
        expected = YARDSTICK.linear_add(x32, matrix32, residual32)
        assert_conforms(ops.linear_add(x, matrix, residual), expected, dtype, "eight bits")
        expected = YARDSTICK.norm_linear(x32, None, EPS, matrix32)
        assert_conforms(ops.norm_linear(x, None, EPS, matrix), expected, dtype, "eight bits")
        expected = YARDSTICK.norm_gate_up(x32, None, EPS, matrix32)
        assert_conforms(ops.norm_gate_up(x, None, EPS, matrix), expected, dtype, "eight bits")


def test_a_row_of_nan_stays_alone(backend, dtype):
    """Padding rows hold whatever an earlier batch left there."""
    ops, device = backend
    inputs = Inputs(dtype, device)
    x, x32 = inputs(8, 64)
    norm, norm32 = inputs(64, offset=1.0)
    weight, weight32 = inputs(96, 64, scale=0.125)
    x[5] = torch.nan
    expected = YARDSTICK.norm_linear(x32, norm32, EPS, weight32)
    kept = [0, 1, 2, 3, 4, 6, 7]
    assert_conforms(ops.norm_linear(x, norm, EPS, weight)[kept], expected[kept], dtype)
    assert_conforms(ops.linear(x, weight)[kept], YARDSTICK.linear(x32, weight32)[kept], dtype)


# ---------------------------------------------------------------- attention
HEADS = [  # grouped-query ratios 1, 2, 4; head dims 16, 32, 128
    HeadShape(2, 2, 16),
    HeadShape(4, 2, 32),
    HeadShape(4, 1, 16),
    HeadShape(8, 8, 32),
    HeadShape(8, 2, 128),
    HeadShape(16, 8, 128),
]
PAGE = 16
EDGES = [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE + 3]


def beside_the_yardstick(shape, lengths, backend, dtype, page_size=PAGE):
    """The same streams twice: on the backend, and on the reference in float32."""
    ops, device = backend
    actual = Paged(shape, lengths, page_size=page_size, ops=ops, device=device, dtype=dtype)
    expected = Paged(shape, lengths, page_size=page_size, ops=YARDSTICK)
    expected.norms = [norm.to(dtype).float() for norm in expected.norms]
    expected.rope = RopeTable(expected.rope.cos.to(dtype).float(), expected.rope.sin.to(dtype).float())
    return actual, expected


def widened(parts):
    return {stream: (first, qkv.float()) for stream, (first, qkv) in parts.items()}


def assert_same_attention(actual, expected, parts, dtype, step, num_padding=0):
    out, padding = getattr(actual, step)(parts, num_padding)
    expected_out, _ = getattr(expected, step)(widened(parts), num_padding)
    assert torch.isfinite(padding).all()
    for stream in parts:
        assert_conforms(out[stream], expected_out[stream], dtype, "attention")
    written, expected_written = actual.written().float(), expected.written()
    tolerance = TOLERANCE[dtype]["rows"] * float(expected_written.nan_to_num().abs().max())
    torch.testing.assert_close(written, expected_written, rtol=0, atol=tolerance, equal_nan=True)


@both_references
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_prefill_attention_packs_prompts_at_page_edges(backend, dtype, shape):
    """Whole prompts, then a second piece for each, with padding rows behind."""
    lengths = [length + PAGE for length in EDGES]
    actual, expected = beside_the_yardstick(shape, lengths, backend, dtype)
    streams = [random_qkv(shape, length, seed=i, dtype=dtype) for i, length in enumerate(lengths)]
    first = {i: (0, qkv[: EDGES[i]]) for i, qkv in enumerate(streams)}
    second = {i: (EDGES[i], qkv[EDGES[i] :]) for i, qkv in enumerate(streams)}
    assert_same_attention(actual, expected, first, dtype, "prefill", num_padding=5)
    assert_same_attention(actual, expected, second, dtype, "prefill", num_padding=1)


@both_references
@pytest.mark.parametrize(
    ("dtype", "shape", "num_rows"),
    [
        *(
            (dtype, *case)
            for dtype in (F32, BF16)
            for case in [*zip(HEADS, ROWS, strict=True), (HEADS[1], 33)]
        ),
        # A batch size may be a kernel of its own (how many splits), so these only as they are served.
        *only_on_gpu(*((BF16, HEADS[5], num_rows) for num_rows in (1, 8, 32)), (BF16, HEADS[4], 128)),
    ],
    ids=str,
)
def test_decode_attention_at_page_edges(backend, dtype, shape, num_rows):
    """Two steps of rows with unequal contexts, in batches with padding rows."""
    lengths = [EDGES[i % len(EDGES)] + 2 for i in range(num_rows)]
    actual, expected = beside_the_yardstick(shape, lengths, backend, dtype)
    streams = [random_qkv(shape, length, seed=i, dtype=dtype) for i, length in enumerate(lengths)]
    prompts = {i: (0, qkv[:-2]) for i, qkv in enumerate(streams)}
    actual.prefill(prompts)
    expected.prefill(widened(prompts))
    for back in (2, 1):
        parts = {i: (len(qkv) - back, qkv[len(qkv) - back, None]) for i, qkv in enumerate(streams)}
        assert_same_attention(actual, expected, parts, dtype, "decode", num_padding=back)


@both_references
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_attention_from_the_first_position(backend, dtype, page_size):
    shape, length = HeadShape(4, 2, 32), 2 * page_size + 1
    actual, expected = beside_the_yardstick(shape, [length], backend, dtype, page_size)
    qkv = random_qkv(shape, length, seed=0, dtype=dtype)
    for position in range(length):
        part = {0: (position, qkv[position, None])}
        assert_same_attention(actual, expected, part, dtype, "decode", num_padding=3)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), [(F32, HEADS[1]), (BF16, HEADS[1]), (BF16, HEADS[5])], ids=str)
def test_attention_over_long_contexts(backend, dtype, shape):
    """Enough pages that a kernel may split them among blocks, at the edges of powers of two."""
    lengths = [1023, 1026, 2, 1500]
    actual, expected = beside_the_yardstick(shape, lengths, backend, dtype)
    streams = [random_qkv(shape, length, seed=i, dtype=dtype) for i, length in enumerate(lengths)]
    prompts = {i: (0, qkv[:-1]) for i, qkv in enumerate(streams)}
    assert_same_attention(actual, expected, prompts, dtype, "prefill", num_padding=7)
    parts = {i: (len(qkv) - 1, qkv[-1:]) for i, qkv in enumerate(streams)}
    assert_same_attention(actual, expected, parts, dtype, "decode", num_padding=4)


@pytest.mark.parametrize(
    ("shape", "batch", "is_spelled_out"),
    [
        *((shape, 3, False) for shape in HEADS),
        (HEADS[1], 1, False),
        (HEADS[1], 8, True),
        *only_on_gpu(*((HEADS[5], batch, False) for batch in (1, 8, 32, 33, 128)), (HEADS[5], 8, True)),
    ],
    ids=str,
)
def test_attention_over_the_code_predictor_s_scratch(backend, dtype, shape, batch, is_spelled_out):
    """One page of 16 per row: positions 0 and 1 together, where rows share a page, then one by one."""
    ops, device = backend
    streams = torch.stack([random_qkv(shape, 16, seed=i, dtype=dtype) for i in range(batch)])

    def run(ops, device, qkv, norms, rope, dtype):
        scratch_shape = (batch, 16, shape.num_kv_heads, shape.head_dim)
        kv = LayerKV(*(torch.full(scratch_shape, torch.nan, dtype=dtype, device=device) for _ in range(2)))
        steps = [(FrameLayout(0, num_positions=2), torch.cat([qkv[:, 0], qkv[:, 1]]))]
        steps += [(FrameLayout(position), qkv[:, position].contiguous()) for position in range(2, 16)]
        out = []
        for layout, new in steps:
            if is_spelled_out:
                layout = spell_out(layout, len(new), 16, torch.device(device))
            out.append(ops.attention(new, *norms, EPS, rope, layout, kv).cpu())
        return torch.cat(out)

    norms, rope = shape.norms(dtype), rope_for(shape.head_dim, 16, dtype)
    on_device = RopeTable(rope.cos.to(device), rope.sin.to(device))
    actual = run(ops, device, streams.to(device), [n.to(device) for n in norms], on_device, dtype)
    wide = RopeTable(rope.cos.float(), rope.sin.float())
    expected = run(YARDSTICK, "cpu", streams.float(), [norm.float() for norm in norms], wide, torch.float32)
    assert_conforms(actual, expected, dtype, "attention")


@pytest.mark.parametrize("is_frame", [False, True], ids=["paged", "frame"])
@pytest.mark.parametrize("has_gain", [False, True], ids=["folded", "gain"])
@pytest.mark.parametrize(
    ("shape", "num_rows"),
    [(HEADS[1], 5), (HEADS[5], 3), (HEADS[5], 40), *only_on_gpu((HEADS[5], 128))],
    ids=str,
)
def test_norm_attention(backend, dtype, shape, num_rows, has_gain, is_frame):
    """Rows of small and of large scale: whatever applies the norm's scale must not forget it anywhere."""
    ops, device = backend
    inputs, position, width = Inputs(dtype, device), 3, 256
    x, x32 = inputs(num_rows, width)
    sizes = 4.0 ** (torch.arange(num_rows) % 7 - 3)[:, None]  # powers of two: exact in any dtype
    x, x32 = x * sizes.to(device, dtype), x32 * sizes
    gains = inputs(width, scale=0.2, offset=1.0) if has_gain else (None, None)
    weights = inputs(shape.qkv_width, width, scale=width**-0.5)
    places = (num_rows, PAGE, shape.num_kv_heads, shape.head_dim)
    keys, values = inputs(*places), inputs(*places)
    norms, rope = shape.norms(dtype), rope_for(shape.head_dim, PAGE, dtype)

    def run(ops, side, to):
        layout = FrameLayout(position)
        if not is_frame:
            layout = spell_out(layout, num_rows, PAGE, (x, x32)[side].device)
        kv = LayerKV(keys[side].clone(), values[side].clone())
        rotation = RopeTable(to(rope.cos), to(rope.sin))
        out = ops.norm_attention(
            (x, x32)[side], gains[side], EPS, weights[side], *(to(n) for n in norms), rotation, layout, kv
        )
        return out, kv.key.float().cpu(), kv.value.float().cpu()

    out, *cache = run(ops, 0, lambda t: t.to(device))
    expected, *expected_cache = run(YARDSTICK, 1, lambda t: t.float())
    assert_conforms(out, expected, dtype, "attention")
    for written, wanted in zip(cache, expected_cache, strict=True):
        limit = TOLERANCE[dtype]["attention"] * float(wanted.abs().max())
        torch.testing.assert_close(written, wanted, rtol=0, atol=limit)


# ---------------------------------------------------------------- noise and draws
SETTINGS = [  # do_sample, temperature, top_k, top_p
    (True, 0.9, 50, 1.0),
    (True, 1.0, 0, 1.0),
    (False, 1.0, 50, 1.0),
    (True, 0.6, 20, 0.8),
    (True, 3.0, 1, 1.0),
    (True, 1.0, 0, 0.3),
    (True, 0.2, 10_000, 1e-6),
    (True, 1.3, 3, 0.999),
]
GROUPS = 16


def distinct_logits(num_rows, vocab_size, dtype, device):
    """No two of a row are equal, in bfloat16 either: which of two equals wins is nobody's promise."""
    stride = 1536 // (vocab_size // 2)  # from 8 down over 12 octaves of 128 values each
    bits = 0x4100 - stride * torch.arange(vocab_size // 2, dtype=torch.int16)
    values = torch.cat([bits.view(torch.bfloat16), -bits.view(torch.bfloat16)])
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    return values[order].to(dtype).to(device), values[order].float()


def mixed_draw(num_rows, device):
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(num_rows)]
    do_sample, temperature, top_k, top_p = zip(*settings, strict=True)
    return DrawRows(
        do_sample=torch.tensor(do_sample, device=device),
        temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, device=device),
        tail_mass=torch.tensor([1 - p for p in top_p], dtype=torch.float32, device=device),
    )


def plain_draw(num_rows, device):
    """Everything may be drawn, as it is."""
    ones = torch.ones(num_rows, device=device)
    return DrawRows(
        do_sample=ones > 0, temperature=ones, top_k=torch.zeros_like(ones).long(), tail_mass=0 * ones
    )


def noise_key(num_rows, device):
    """Seeds beyond 32 bits and below 0, late frames, later pieces."""
    rows = torch.arange(num_rows)
    seeds = torch.tensor([0, 1, -1, 2**32, -(2**63), 2**63 - 1, 123_456_789_012])[rows % 7] + rows // 7
    return NoiseKey(seeds.to(device), (rows % 3).to(device), (rows * 37 % 4096).to(device))


def margin(scores, draw, noise):
    """How far the winner is ahead of the next: below 1e-4 another logarithm may pick that one."""
    noise = torch.where(draw.do_sample[:, None], noise, 0.0)
    best = (cut_scores(scores, draw) + noise).topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def assert_same_codes(actual, expected, margins):
    clear = margins > 1e-4
    assert clear.float().mean() >= 0.9, "too many near ties to show anything"
    assert torch.equal(actual.cpu()[clear], expected[clear])


@pytest.mark.parametrize("vocab_size", [1088, 3072])
def test_draw_first(backend, dtype, vocab_size):
    for num_rows in ROWS:
        check_draw_first(*backend, dtype, num_rows, vocab_size)


def check_draw_first(ops, device, dtype, num_rows, vocab_size):
    logits, logits32 = distinct_logits(num_rows, vocab_size, dtype, device)
    eos_id = vocab_size - 900
    logits[:, eos_id] = logits32[:, eos_id] = 20.0  # on top, so that forbidding it shows
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(num_rows, vocab_size, generator=generator) < 0.05
    penalty = torch.tensor([1.05, 1.0, 1.7])[torch.arange(num_rows) % 3]
    forbid_eos = torch.arange(num_rows) % 2 == 0
    allowed = torch.arange(vocab_size) < vocab_size - 1024
    allowed[eos_id] = True

    def draw_on(ops, device, logits):
        noise = ops.frame_noise(noise_key(num_rows, device), GROUPS, vocab_size, 64)
        rows = (tensor.to(device) for tensor in (seen, penalty, forbid_eos, allowed))
        return ops.draw_first(logits, *rows, eos_id, mixed_draw(num_rows, device), noise), noise

    expected, noise = draw_on(YARDSTICK, "cpu", logits32)
    actual, _ = draw_on(ops, device, logits)
    scores = first_code_scores(logits32, seen, penalty, forbid_eos, allowed, eos_id)
    assert_same_codes(actual, expected, margin(scores, mixed_draw(num_rows, "cpu"), noise.first))
    assert not (actual.cpu()[forbid_eos] == eos_id).any()
    assert allowed[actual.cpu()].all()


@pytest.mark.parametrize("codebook_size", [64, 2048])
def test_draw_next(backend, dtype, codebook_size):
    """Codes of the first groups and the last ones, and the rows that they feed."""
    for num_rows in ROWS:
        check_draw_next(*backend, dtype, num_rows, codebook_size)


def check_draw_next(ops, device, dtype, num_rows, codebook_size):
    inputs = Inputs(dtype, device)
    table, table32 = inputs(codebook_size, 48)
    key = noise_key(num_rows, device)
    noise = ops.frame_noise(key, GROUPS, 1088, codebook_size)
    cpu_noise = YARDSTICK.frame_noise(noise_key(num_rows, "cpu"), GROUPS, 1088, codebook_size)
    draw, cpu_draw = mixed_draw(num_rows, device), mixed_draw(num_rows, "cpu")
    for group in (1, 2, GROUPS - 2, GROUPS - 1):
        logits, logits32 = distinct_logits(num_rows, codebook_size, dtype, device)
        feeds = group < GROUPS - 1
        codes, fed = ops.draw_next(logits, draw, noise, group, table if feeds else None)
        expected, _ = YARDSTICK.draw_next(logits32, cpu_draw, cpu_noise, group, None)
        assert_same_codes(codes, expected, margin(logits32, cpu_draw, cpu_noise.rest[:, group - 1]))
        assert (fed is not None) == feeds
        if fed is not None:
            assert torch.equal(fed.cpu().float(), table32[codes.cpu()])


def test_noise_alone_decides_between_equal_logits(backend):
    """Every group of many keys: the ids that the written definition of the noise picks."""
    ops, device = backend
    num_rows = 32
    noise = ops.frame_noise(noise_key(num_rows, device), GROUPS, 1088, 64)
    expected = YARDSTICK.frame_noise(noise_key(num_rows, "cpu"), GROUPS, 1088, 64)
    draw = plain_draw(num_rows, device)
    first = ops.draw_first(
        torch.zeros(num_rows, 1088, device=device),
        torch.zeros(num_rows, 1088, dtype=torch.bool, device=device),
        torch.ones(num_rows, device=device),
        torch.zeros(num_rows, dtype=torch.bool, device=device),
        torch.ones(1088, dtype=torch.bool, device=device),
        166,
        draw,
        noise,
    )
    lead = {"draw": plain_draw(num_rows, "cpu"), "noise": expected.first}
    assert_same_codes(first, expected.first.argmax(-1), margin(torch.zeros(num_rows, 1088), **lead))
    for group in range(1, GROUPS):
        codes, _ = ops.draw_next(torch.zeros(num_rows, 64, device=device), draw, noise, group, None)
        lead["noise"] = expected.rest[:, group - 1]
        assert_same_codes(codes, lead["noise"].argmax(-1), margin(torch.zeros(num_rows, 64), **lead))


def test_a_row_draws_alone_what_it_draws_in_a_batch(backend):
    ops, device = backend
    logits = Inputs(torch.float32, device)(32, 64, scale=2.0)[0]
    key, draw = noise_key(32, device), mixed_draw(32, device)

    def draw_all(rows):
        some_key = NoiseKey(key.seed[rows], key.piece[rows], key.frame[rows])
        some_draw = DrawRows(*(getattr(draw, name)[rows] for name in DrawRows.__slots__))
        noise = ops.frame_noise(some_key, GROUPS, 1088, 64)
        return torch.stack(
            [ops.draw_next(logits[rows], some_draw, noise, g, None)[0] for g in range(1, GROUPS)]
        )

    together = draw_all(slice(None))
    for i in range(32):
        assert torch.equal(draw_all(slice(i, i + 1))[:, 0], together[:, i])


def test_equal_logits_at_the_kth_place_all_stay(backend):
    """Spec 2.4: ties are kept, so all 64 ids of a flat row can be drawn with top-k 3."""
    ops, device = backend
    num_rows = 512
    key = NoiseKey(*(torch.arange(num_rows, device=device) * step for step in (1, 0, 0)))
    draw = plain_draw(num_rows, device)
    draw = DrawRows(draw.do_sample, draw.temperature, draw.top_k + 3, draw.tail_mass)
    noise = ops.frame_noise(key, GROUPS, 1088, 64)
    codes, _ = ops.draw_next(torch.zeros(num_rows, 64, device=device), draw, noise, 1, None)
    assert len(codes.unique()) == 64
