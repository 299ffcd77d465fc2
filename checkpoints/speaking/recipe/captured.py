"""A training step as one CUDA graph, so that the GPU never waits for Python.

Eagerly a step of these small models is some thousand launches, most of which take longer to make than to
run. Source: PyTorch's notes on CUDA graphs, "whole-network capture".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

_WARM_UP = 3  # eager steps of a kind: kernels are chosen, the optimizer's state is made

Kind = TypeVar("Kind", bound=Hashable)


@dataclass(slots=True)
class _Recording:
    num_eager: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: tuple[Tensor, ...] = ()
    results: dict[str, Tensor] = field(default_factory=dict)


class CapturedStep(Generic[Kind]):
    """Calls `step(kind, *inputs)`: at first eagerly, then as a graph, on a CPU always eagerly.

    kind: all that makes a step another program: its phase, its shapes. Every call is one step of the
    training, however it runs. Results are overwritten by the next call of that kind. What changes from step to
    step must lie in tensors: the inputs, the optimizer's rate (`adamw`), the generator's seed.
    """

    def __init__(self, step: Callable[..., dict[str, Tensor]], device: torch.device) -> None:
        self._step, self._is_captured = step, device.type == "cuda"
        self._recordings: dict[Kind, _Recording] = {}
        self._stream = torch.cuda.Stream(device) if self._is_captured else None

    def __call__(self, kind: Kind, *inputs: Tensor) -> dict[str, Tensor]:
        if not self._is_captured:
            return self._step(kind, *inputs)
        recording = self._recordings.setdefault(kind, _Recording())
        if recording.num_eager < _WARM_UP:
            recording.num_eager += 1
            return self._run_aside(kind, *inputs)
        if recording.graph is None:
            self._capture(recording, kind, inputs)
        else:
            for static, new in zip(recording.inputs, inputs, strict=True):
                static.copy_(new)
        assert recording.graph is not None
        recording.graph.replay()
        return recording.results

    def _run_aside(self, kind: Kind, *inputs: Tensor) -> dict[str, Tensor]:
        """On another stream, as a capture's warm-up must be."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            results = self._step(kind, *inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return results

    def _capture(self, recording: _Recording, kind: Kind, inputs: tuple[Tensor, ...]) -> None:
        recording.inputs = tuple(one.clone() for one in inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            recording.results = self._step(kind, *recording.inputs)
        recording.graph = graph


def adamw(
    parameters: Iterable[nn.Parameter], device: torch.device, *, rate: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """An optimizer whose step can be captured: its rate lies on the device."""
    is_cuda = device.type == "cuda"
    return torch.optim.AdamW(
        parameters,
        lr=torch.tensor(rate, device=device) if is_cuda else rate,
        betas=betas,
        weight_decay=0.01,
        fused=is_cuda,
        capturable=is_cuda,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
