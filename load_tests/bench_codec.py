"""The codec decoder alone: ms per step, audio per second, and what each dtype costs in accuracy.

    python -m load_tests.bench_codec --checkpoint DIR [--shapes 1x1,8x25,32x25,64x25] [--dtypes …]

Needs `config.json`, `generation_config.json` and `speech_tokenizer/` of a checkpoint. Three questions.
How long does a captured step of B rows x F frames take, next to the same model in plain PyTorch modules
inside a graph, in the same run? How far is each dtype from float32, whole streams through an arena, cut
as the chunk ramp cuts? And what does a window with 25 or 72 frames of context lose at its seams? Random
weights will do, but their wave may be far beyond full scale: then the last layer is scaled to a speech
level, which changes no ratio. On a GPU TF32 is off and cuDNN picks its fastest algorithm for the plain
modules. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qwen3tts_core.config import CheckpointConfig, CodecDecoderConfig
from qwen3tts_core.engine.codec_engine import DTYPES
from qwen3tts_core.engine.codec_rows import CodecModel
from qwen3tts_core.model.codec_decoder import CodecDecoder, open_codec_decoder
from qwen3tts_core.model.codec_fused import PRECISIONS, FusedCodecDecoder
from qwen3tts_core.model.codec_state import NoPast
from qwen3tts_core.ops.select import Backend, select_backend
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.streaming.codec_window import window_at

SPEECH_RMS = 0.1
CONTEXTS = (25, 72)


def random_codes(
    config: CodecDecoderConfig, rows: int, frames: int, seed: int, device: torch.device
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, frames, config.num_quantizers)
    return torch.randint(0, config.codebook_size, shape, generator=generator).to(device)


@torch.inference_mode()
def level(decoder: CodecDecoder) -> tuple[float, float]:
    """Peak and root mean square of the wave before it is clamped."""
    codes = random_codes(decoder.config, 1, 12, 0, decoder.device)
    *_, (_, wave) = decoder.stages(codes, NoPast(1, decoder.device))
    return float(wave.abs().max()), float(wave.std())


def scaled_to_speech(decoder: CodecDecoder) -> float:
    """Scale the last layer if it clips; the factor."""
    peak, rms = level(decoder)
    factor = SPEECH_RMS / rms if peak > 1 else 1.0
    decoder.conv_out.weight.mul_(factor)
    decoder.conv_out.bias.mul_(factor)
    return factor


def open_plain(
    checkpoint: Path, config: CodecDecoderConfig, device: torch.device, dtype: torch.dtype, factor: float
):
    plain = open_codec_decoder(checkpoint, config, device, dtype)
    plain.conv_out.weight.mul_(factor)
    plain.conv_out.bias.mul_(factor)
    return plain


def error(exact: Tensor, actual: Tensor) -> dict[str, float]:
    exact, actual = exact.double(), actual.double()
    noise = (actual - exact).square().mean()
    return {
        "snr_db": round(10 * float(torch.log10(exact.square().mean() / noise)), 1) if noise > 0 else 999.0,
        "max_abs": float((actual - exact).abs().max()),
    }


# ---------------------------------------------------------------- accuracy
def in_steps(model: CodecModel, codes: Tensor) -> Tensor:
    """Whole streams through an arena, cut by the chunk ramp."""
    state, rows = model.new_state(len(codes)), torch.arange(len(codes), device=codes.device)
    parts, first, ramp = [], 0, ChunkRamp()
    while first < codes.shape[1]:
        part = codes[:, first : first + ramp.chunk_frames(len(parts))]
        parts.append(model.decode_step(part, state, rows, torch.full_like(rows, part.shape[1])))
        first += part.shape[1]
    return torch.cat(parts, dim=1)


def in_windows(model: CodecModel, codes: Tensor, context: int) -> Tensor:
    """Stateless windows of the steady chunk, each with its left context."""
    parts, steady = [], ChunkRamp().steady
    for first in range(0, codes.shape[1], steady):
        window = window_at(first, min(steady, codes.shape[1] - first), context)
        wave = model.decode(codes[:, first - window.num_context : first + window.num_new])
        parts.append(wave[:, window.kept_samples(model.config.samples_per_frame)])
    return torch.cat(parts, dim=1)


def prepared(model: CodecModel, run: Callable[[], Tensor]) -> Tensor:
    """Its kernels are compiled side by side first; met one by one they would take minutes."""
    model.prepare([run])
    return run()


# ---------------------------------------------------------------- time
def step_of(model: CodecModel, rows: int, frames: int, backend: Backend) -> Callable[[], None]:
    """A captured step of the arena's first rows. Positions run on from replay to replay."""
    state = model.new_state(rows + 1)
    codes = random_codes(model.config, rows, frames, rows * frames, backend.device)
    places = torch.arange(rows, device=backend.device)
    num_valid = torch.full_like(places, frames)

    def step() -> None:
        model.decode_step_samples(codes, state, places, num_valid)

    with torch.inference_mode():
        model.prepare([step])
        return backend.capture(step, f"codec step of {rows} rows x {frames} frames")


def time_ms(launch: Callable[[], None], device: torch.device, budget_s: float) -> float:
    """Median of three rounds, each back to back for a third of the budget."""
    launch()
    if device.type != "cuda":
        start = time.perf_counter()
        launch()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def round_of(count: int) -> float:
        start.record()
        for _ in range(count):
            launch()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count

    once = round_of(1)
    count = max(1, min(100, int(budget_s * 1e3 / 3 / once)))
    return statistics.median(round_of(count) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", default="1x1,1x25,8x1,8x25,16x25,32x1,32x25,64x25", help="rows x frames")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--frames", type=int, default=150, help="length of the streams that measure accuracy")
    parser.add_argument("--no-plain", action="store_true", help="skip the plain PyTorch modules")
    parser.add_argument("--budget-s", type=float, default=0.5, help="time to spend on each step")
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]

    backend = select_backend(args.device)
    torch.backends.cudnn.allow_tf32 = False
    config = CheckpointConfig.from_checkpoint(args.checkpoint).codec
    device = backend.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result: dict = {"bench": "codec", "device": name, "torch": torch.__version__, "dtypes": {}, "seams": {}}

    exact_model = open_plain(args.checkpoint, config, device, torch.float32, 1.0)
    peak, rms = level(exact_model)
    factor = result["scaled_by"] = scaled_to_speech(exact_model)
    print(
        f"{name}, torch {torch.__version__}; wave of random codes: rms {rms:.3g}, peak {peak:.3g}, scaled by {factor:.3g}"
    )
    codes = random_codes(config, 2, args.frames, 1, device)
    exact = torch.cat([exact_model.decode(row[None]) for row in codes])
    frame_s = 1 / config.frame_rate_hz

    for dtype_name in args.dtypes.split(","):
        dtype = DTYPES[dtype_name]
        model: CodecModel
        if backend.codec_kernels is None:
            model = open_plain(args.checkpoint, config, device, dtype, factor)
        else:
            model = FusedCodecDecoder(exact_model, backend.codec_kernels, PRECISIONS[dtype])
        plain = None if args.no_plain else open_plain(args.checkpoint, config, device, dtype, factor)
        row = result["dtypes"][dtype_name] = {
            "accuracy": error(exact, prepared(model, partial(in_steps, model, codes))),
            "steps": {},
        }
        said = "SNR {snr_db} dB, max {max_abs:.1e}"
        against = f"; plain modules {said.format(**error(exact, in_steps(plain, codes)))}" if plain else ""
        print(
            f"\n{dtype_name}, in steps against plain float32 whole: {said.format(**row['accuracy'])}{against}"
        )
        print("| rows x frames | ms | audio-s/s | plain ms | ratio |\n|---|---|---|---|---|")
        for rows, frames in shapes:
            ms = time_ms(step_of(model, rows, frames, backend), device, args.budget_s)
            step = row["steps"][f"{rows}x{frames}"] = {
                "ms": ms,
                "audio_s_per_s": rows * frames * frame_s / ms * 1e3,
            }
            if plain is not None:
                with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                    step["plain_ms"] = time_ms(step_of(plain, rows, frames, backend), device, args.budget_s)
            beside = f"{step['plain_ms']:.2f} | {step['plain_ms'] / ms:.1f}" if plain else "- | -"
            print(f"| {rows} x {frames} | {ms:.3f} | {step['audio_s_per_s']:.0f} | {beside} |", flush=True)
        if dtype == torch.float32:
            for context in CONTEXTS:
                seam = result["seams"][str(context)] = error(
                    exact, prepared(model, partial(in_windows, model, codes, context))
                )
                print(f"windows of 25 frames with {context} of context: {said.format(**seam)}")
        del model, plain
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
