"""Read a tensor once and keep next to nothing of it: what memory gives to reads alone.

    layout   x [n] float32, contiguous; out [programs] float32
    grid     a few programs a multiprocessor, each with every programs-th tile
    method   add the tiles up, element by element; write one sum a program

The ruler for kernels that read K and V and write little.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import on_device

BLOCK = 4096  # elements
NUM_WARPS = 8


def _metadata(grid, kernel, args):
    size = args["num_tiles"] * args["BLOCK"] * 4
    return {"name": f"read_kernel_{size}B", "bytes": size}


@triton.jit(launch_metadata=_metadata)
def read_kernel(x_ptr, out_ptr, num_tiles, BLOCK: tl.constexpr):
    """Add up the tiles of one program."""
    x_ptrs = x_ptr + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        total += tl.load(x_ptrs)
        x_ptrs += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def read(x: Tensor, out: Tensor) -> None:
    """Launch one program for each element of `out`.

    Parameters
    ----------
    x : Tensor, shape [n], float32, contiguous
        n a multiple of `BLOCK`.
    out : Tensor, shape [programs], float32
        The sum over all of it is the sum of x.
    """
    assert x.numel() % BLOCK == 0
    with on_device(x.device):
        read_kernel[(out.numel(),)](x, out, x.numel() // BLOCK, BLOCK=BLOCK, num_warps=NUM_WARPS)
