"""Decides once, at start-up, who computes: the one door to `ops/cuda/`.

`auto` takes the fastest backend that this machine has; a backend asked for by name raises when it
isn't there, and never falls back.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from qwen3tts_core.config import Attention
from qwen3tts_core.ops.codec_interface import CodecKernels
from qwen3tts_core.ops.interface import Capture, Ops, Transfer
from qwen3tts_core.ops.reference import HostTransfer, ReferenceOps, run_eagerly

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """The seams of one device, and the device itself.

    codec_kernels: None where the plain codec decoder is the fast one. memory_gib: what this process
    may allocate on the device; 0 is no limit.
    """

    device: torch.device
    ops: Ops
    capture: Capture
    transfer: Transfer
    codec_kernels: CodecKernels | None = None
    memory_gib: float = 0.0

    def enter_thread(self) -> None:
        """Call first on a thread that will launch: CUDA's current device belongs to the thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device.index or 0)

    def free_bytes(self) -> float:
        """What may still be allocated here; not limited on CPU."""
        if self.device.type != "cuda":
            return math.inf
        allocated = torch.cuda.memory_allocated(self.device)
        cached = torch.cuda.memory_reserved(self.device) - allocated
        free = torch.cuda.mem_get_info(self.device)[0] + cached
        return min(free, self.memory_gib * 2**30 - allocated) if self.memory_gib else free


def select_backend(
    device: str = "auto",
    *,
    deterministic: bool = False,
    memory_gib: float = 0.0,
    prefill_attention: Attention = "own",
    decode_attention: Attention = "own",
    high_priority: bool = False,
) -> Backend:
    """device: "auto", "cpu", or "cuda[:index]". Raises ValueError for a device or attention that isn't there.

    memory_gib: see `Backend`; the allocator of this process keeps to it from now on. high_priority: of captured
    steps, on a GPU.
    """
    chosen = _parse(device)
    by_flashinfer = (prefill_attention == "flashinfer", decode_attention == "flashinfer")
    if any(by_flashinfer) and chosen.type != "cuda":
        raise ValueError(f"attention by flashinfer needs a GPU, the device is {chosen.type}")
    if chosen.type == "cpu":
        logger.info("ops: reference on cpu (%s)", "asked for" if device != "auto" else "no GPU is visible")
        return Backend(chosen, ReferenceOps(trim_context=not deterministic), run_eagerly, HostTransfer())
    if chosen.type == "cuda":
        return _cuda_backend(chosen, memory_gib, by_flashinfer, high_priority)
    raise ValueError(f"device {device!r} has no backend; available: cpu, cuda")


def _parse(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda[:index], got {device!r}") from None


def _cuda_backend(
    device: torch.device, memory_gib: float, by_flashinfer: tuple[bool, bool], high_priority: bool
) -> Backend:
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was asked for, but no GPU is visible")
    from qwen3tts_core.ops.cuda.backend import CudaOps, GraphCapture, PinnedTransfer
    from qwen3tts_core.ops.cuda.codec_kernels import TritonCodecKernels

    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    has_pdl = properties.major >= 9  # programmatic dependent launch came with Hopper
    logger.info("ops: cuda on %s, dependent launches %s", properties.name, "on" if has_pdl else "off")
    planner = None
    if any(by_flashinfer):
        from qwen3tts_core.ops.cuda.flashinfer_attention import FlashInferAttention

        prefill, decode = by_flashinfer
        logger.info("ops: flashinfer attends in prefill: %s, in decode steps: %s", prefill, decode)
        planner = FlashInferAttention(device, prefill=prefill, decode=decode, pdl=has_pdl)
    processors = properties.multi_processor_count
    ops = CudaOps(device, num_processors=processors, pdl=has_pdl, planner=planner)
    codec = TritonCodecKernels(device, num_processors=processors, pdl=has_pdl)
    if memory_gib:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, memory_gib * 2**30 / properties.total_memory), device
        )
    capture = GraphCapture(device, high_priority=high_priority)
    return Backend(device, ops, capture, PinnedTransfer(), codec, memory_gib)
