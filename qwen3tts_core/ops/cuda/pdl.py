"""Programmatic dependent launch: a kernel starts while the one before it still runs.

Each kernel first asks for its weights (`prefetch_l2`), which no earlier kernel writes, then waits
for its inputs (`wait_for_inputs`). So the memory never idles between two small kernels. A kernel
that neither reads nor writes before the wait can follow any other, whatever that one is.
`PDL` is a compile-time switch: off where the interpreter runs the kernels on CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Everything earlier kernels wrote is visible from here on; the next kernel may start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, PDL: tl.constexpr):
    """Ask for the 128-byte lines at `pointers` without waiting for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
