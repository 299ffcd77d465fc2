"""The Triton kernels' arithmetic, wherever there is no GPU: see `interpreted.py`."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def numbers(package):
    return tuple(int(part) for part in version(package).split(".")[:2])


def interpreter_is_broken():
    """Triton 3.6's interpreter turns arrays of one element into ints, which NumPy 2.4 refuses."""
    try:
        return numbers("triton") < (3, 9) and numbers("numpy") >= (2, 4)
    except PackageNotFoundError:
        return sys.platform != "linux"  # no wheels elsewhere; on Linux it is a dependency, so let it fail


@pytest.mark.skipif(
    interpreter_is_broken(), reason="no working Triton interpreter for this platform and NumPy"
)
def test_interpreted_kernels_compute_what_the_reference_does():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.qwen3tts_core.ops.interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for kernel in (
        "linear",
        "rms_norm",
        "norm_linear",
        "linear_add",
        "norm_gate_up",
        "attention",
        "draw_next",
        "draw_first",
    ):
        assert any(line.startswith(f"{kernel}:") for line in lines), f"{kernel} was not compared"
