"""Compiles `decode.cu` at run time and launches its kernels.

NVRTC comes with torch's CUDA wheels, so no toolkit is needed. A kernel is compiled when it is
first asked for (about a second) and its binary kept on disk under a hash of source, instance and
architecture, so that only the first start on a machine compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from qwen3tts_core.errors import EngineFault

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("decode.cu")


def cache_folder() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME` or `~/.cache`, as other compilers do."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "qwen3tts" / "kernels"


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """cuda.bindings returns (error, value …)."""
    error, *values = result
    if int(error) != 0:
        raise EngineFault(f"{what} failed: {error.name}")
    return values[0] if len(values) == 1 else values


class Kernel:
    """One compiled instance."""

    def __init__(self, function: Any, name: str) -> None:
        self._function, self._name = function, name

    def launch(
        self,
        grid: tuple[int, int, int],
        num_threads: int,
        args: Sequence[Tensor | int | float | None],
    ) -> None:
        """On torch's current stream, as a dependent launch: it may start before its predecessor ends.

        Tensors pass their address, None a null pointer, int a 32-bit int, float a 32-bit float.
        """
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in args)
        types = tuple(_ctype(a) for a in args)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [attribute], 1
        _checked(
            driver.cuLaunchKernelEx(config, self._function, (values, types), 0), f"launching {self._name}"
        )


def _ctype(arg: Tensor | int | float | None) -> Any:
    if isinstance(arg, Tensor) or arg is None:
        return ctypes.c_void_p
    return ctypes.c_int if isinstance(arg, int) else ctypes.c_float


class KernelLibrary:
    """The instances of `decode.cu` on one device."""

    def __init__(self, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        self._arch = f"sm_{major}{minor}"
        self._source = _SOURCE.read_bytes()
        self._kernels: dict[str, Kernel] = {}

    def get(self, instance: str) -> Kernel:
        """instance: a template instance as C++ writes it, e.g. `attention_kernel<2,true>`."""
        if instance not in self._kernels:
            binary, symbol = self._binary(instance)
            module = _checked(driver.cuModuleLoadData(binary), f"loading {instance}")
            function = _checked(driver.cuModuleGetFunction(module, symbol), f"finding {instance}")
            self._kernels[instance] = Kernel(function, instance)
        return self._kernels[instance]

    def _binary(self, instance: str) -> tuple[bytes, bytes]:
        key = hashlib.sha256(b"\0".join([self._source, instance.encode(), self._arch.encode()])).hexdigest()
        file = cache_folder() / f"{key}.cubin"
        try:
            symbol, _, binary = file.read_bytes().partition(b"\n")
            return binary, symbol
        except FileNotFoundError:
            symbol, binary = compile_instance(self._source, instance, self._arch)
            _write_atomically(file, symbol + b"\n" + binary)
            return binary, symbol


def compile_instance(source: bytes, instance: str, arch: str) -> tuple[bytes, bytes]:
    """(symbol, machine code). Raises EngineFault with the compiler's log."""
    program = _checked(nvrtc.nvrtcCreateProgram(source, b"decode.cu", 0, [], []), "creating a program")
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, instance.encode()), f"naming {instance}")
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(error) != 0:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading the log's size")
            nvrtc.nvrtcGetProgramLog(program, log)
            raise EngineFault(f"compiling {instance} for {arch} failed:\n{log.decode(errors='replace')}")
        symbol: bytes = _checked(nvrtc.nvrtcGetLoweredName(program, instance.encode()), "finding the symbol")
        binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program), "reading the binary's size")
        _checked(nvrtc.nvrtcGetCUBIN(program, binary), "reading the binary")
        return symbol, binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _write_atomically(file: Path, content: bytes) -> None:
    """Several replicas may start at once; a reader sees a whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as handle:
        handle.write(content)
    Path(handle.name).replace(file)
