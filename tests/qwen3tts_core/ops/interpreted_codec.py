"""The codec's Triton kernels on CPU, in Triton's own interpreter, against the plain decoder.

    TRITON_INTERPRET=1 python -m tests.qwen3tts_core.ops.interpreted_codec

A program of its own, as `interpreted.py` says. A small model, whole in half precision, and in float32
also in steps beside a padding row. bfloat16 products the interpreter can't do.
"""

import torch

from qwen3tts_core.model.codec_fused import PRECISIONS, FusedCodecDecoder
from qwen3tts_core.ops.codec_reference import ReferenceCodecKernels
from qwen3tts_core.ops.cuda.codec_kernels import TritonCodecKernels
from qwen3tts_core.streaming.pcm import NOT_A_NUMBER
from tests.qwen3tts_core.codec_kit import MINI, mini_decoder, random_codes

LIMITS = {torch.float16: 2e-3, torch.float32: 2e-5}
CUTS = (1, 4, 2)  # the last reaches over a full window of attention


def compare(name, actual, expected, limit):
    error = float((actual.float() - expected.float()).abs().max())
    print(f"{name:40s} {error:.1e}")
    if not error <= limit:
        raise SystemExit(f"{name}: off by {error:.1e}, the limit is {limit:.0e}")


def check(dtype):
    plain = mini_decoder()
    kernels = TritonCodecKernels(torch.device("cpu"), num_processors=8, pdl=False)
    fused = FusedCodecDecoder(plain, kernels, PRECISIONS[dtype])
    meaning = FusedCodecDecoder(plain, ReferenceCodecKernels(), PRECISIONS[dtype])
    name, limit, frames = str(dtype).removeprefix("torch."), LIMITS[dtype], sum(CUTS)
    codes = torch.from_numpy(random_codes(frames)).long()[None]
    whole = plain.decode(codes)
    compare(f"{name}: whole", fused.decode(codes), whole, limit)
    if dtype != torch.float32:
        return
    compare(f"{name}: samples", fused.decode_samples(codes), plain.decode_samples(codes), limit * 32767 + 1)

    states = [model.new_state(4) for model in (fused, meaning)]
    first = 0
    for num_frames in CUTS:
        batch = torch.zeros(2, max(CUTS), MINI.num_quantizers, dtype=torch.long)
        batch[0, :num_frames] = codes[0, first : first + num_frames]
        rows, num_valid = torch.tensor([2, 3]), torch.tensor([num_frames, 0])
        for state in states:
            state.values[3] = torch.nan  # the spare row
        wave = fused.decode_step(batch, states[0], rows, num_valid)
        meaning.decode_step(batch, states[1], rows, num_valid)
        samples = slice(first * MINI.samples_per_frame, (first + num_frames) * MINI.samples_per_frame)
        compare(
            f"{name}: step of {num_frames}", wave[0, : samples.stop - samples.start], whole[0, samples], limit
        )
        first += num_frames
        compare(f"{name}: positions", *(state.positions for state in states), 0)
        compare(f"{name}: row after {first}", *(state.values[2] for state in states), 20 * limit)
    for state in states:
        state.values[2] = torch.nan
    step = [batch[:, :1], rows, torch.tensor([1, 0])]
    spoilt = [
        model.decode_step_samples(step[0], state, *step[1:])
        for model, state in zip((fused, meaning), states, strict=True)
    ]
    compare(f"{name}: samples of NaN", *spoilt, 0)
    assert (spoilt[0][0] == NOT_A_NUMBER).any()


if __name__ == "__main__":
    for dtype in LIMITS:
        check(dtype)
