"""Compare our code with the reference's arrays on one checkpoint.

    python -m tests.parity.check --checkpoint DIR --golden FILE.npz [--device cuda]

Always in float32, without TF32. On a GPU what serves there is compared: the kernels of ops/cuda, step
by step, and the greedy codes of captured graphs too. Prints one line per array of the file: ok or FAIL, name, largest error, tolerance. Exits with 1 when
an array fails, when one is unknown, or when nothing was compared. What can't be compared by its
nature (inputs, draws of another generator) is listed with the reason.
"""

import argparse
import sys
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qwen3tts_core.ops.select import select_backend

# Importing a family registers it.
from tests.parity.families import (  # noqa: F401
    codec,
    generation,
    processors,
    prompts,
    reference_audio,
    text,
    wrapper,
)
from tests.parity.pair import Pair
from tests.parity.registry import REGISTRY, Result, compare

_ON_CPU = partial(select_backend, "cpu")


def check_arrays(checkpoint, golden, open_backend=_ON_CPU):
    """Yield a Result for every array of `golden`, {name: array}."""
    with without_tf32(), Pair(checkpoint, golden, open_backend) as pair:
        for name in sorted(golden):
            yield _check_array(pair, name)


@contextmanager
def without_tf32():
    """cuDNN's convolutions would use it by default; matrix products wouldn't."""
    assert torch.get_float32_matmul_precision() == "highest"
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def _check_array(pair, name):
    found = REGISTRY.find(name)
    if found is None:
        return Result(name, "FAIL", np.inf, note="unknown array: nothing compares it")
    function, arguments = found
    try:
        with torch.no_grad():
            return compare(name, pair.golden[name], function(pair, **arguments))
    except Exception as error:  # noqa: BLE001 - reported as this array's failure; the others still get their line
        traceback.print_exc()
        return Result(name, "FAIL", np.inf, note=f"{type(error).__name__}: {error}")


def summarise(results):
    """(last line of the report, whether all is well)."""
    count = {status: sum(result.status == status for result in results) for status in ("ok", "FAIL", "-")}
    line = f"{len(results)} arrays: {count['ok']} ok, {count['FAIL']} failed, {count['-']} not compared"
    if not count["ok"] and not count["FAIL"]:
        return f"{line}; FAIL: nothing was compared", False
    return line, not count["FAIL"]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--golden", type=Path, required=True, help="what the reference computes on it")
    parser.add_argument("--device", default="cpu", help="cpu (the default), or cuda[:index]")
    args = parser.parse_args(argv)
    with np.load(args.golden, allow_pickle=False) as file:
        golden = {name: file[name] for name in file.files}
    results = []
    for result in check_arrays(args.checkpoint, golden, partial(select_backend, args.device)):
        print(result, flush=True)
        results.append(result)
    line, is_well = summarise(results)
    print(line)
    return 0 if is_well else 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny
    sys.exit(main())
