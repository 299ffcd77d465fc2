"""Decides once, at start-up, who computes: the one door to `ops/cuda/`.

`auto` takes the fastest backend that this machine has; a backend asked for by name raises when it
isn't there, and never falls back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from qwen3tts_core.ops.interface import Capture, Ops, Transfer
from qwen3tts_core.ops.reference import HostTransfer, ReferenceOps, run_eagerly

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """The three seams of one device, and the device itself."""

    device: torch.device
    ops: Ops
    capture: Capture
    transfer: Transfer

    def enter_thread(self) -> None:
        """Call first on a thread that will launch: CUDA's current device belongs to the thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


def select_backend(device: str = "auto", *, deterministic: bool = False) -> Backend:
    """device: "auto", "cpu", or "cuda[:index]". Raises ValueError for a device that isn't there."""
    chosen = _parse(device)
    if chosen.type == "cpu":
        logger.info("ops: reference on cpu (%s)", "asked for" if device != "auto" else "no GPU is visible")
        return Backend(chosen, ReferenceOps(trim_context=not deterministic), run_eagerly, HostTransfer())
    if chosen.type == "cuda":
        return _cuda_backend(chosen)
    raise ValueError(f"device {device!r} has no backend; available: cpu, cuda")


def _parse(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda[:index], got {device!r}") from None


def _cuda_backend(device: torch.device) -> Backend:
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} was asked for, but no GPU is visible")
    from qwen3tts_core.ops.cuda.backend import CudaOps, GraphCapture, PinnedTransfer

    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    has_pdl = properties.major >= 9  # programmatic dependent launch came with Hopper
    logger.info("ops: cuda on %s, dependent launches %s", properties.name, "on" if has_pdl else "off")
    ops = CudaOps(device, num_processors=properties.multi_processor_count, pdl=has_pdl)
    return Backend(device, ops, GraphCapture(device), PinnedTransfer())
