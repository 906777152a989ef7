"""What the machine can do at best, measured in the process that times the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tritonattn.kernels import read as read_op
from tritonattn.kernels._config import chip
from tritonattn.perf.timing import Work, queued_ms

_GPU_BYTES, _CPU_BYTES = 2 << 30, 32 << 20
_GPU_MATMUL, _CPU_MATMUL = 8192, 256


@dataclass(frozen=True, slots=True)
class Roofs:
    """Rates of a large copy, a large reduction and a large matrix product."""

    copy_gbps: float  # read + written
    read_gbps: float
    matmul_tflops: float  # bf16; fp32 on a CPU


def measure_roofs(device: torch.device, rounds: int = 30) -> Roofs:
    """Measure the roofs of a device, on random data: the best of some rounds, as roofs are."""
    gpu = device.type == "cuda"
    elements = (_GPU_BYTES if gpu else _CPU_BYTES) // 4
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    n = _GPU_MATMUL if gpu else _CPU_MATMUL
    dtype = torch.bfloat16 if gpu else torch.float32
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))

    def best_ms(*works: Work) -> float:
        return min(queued_ms(work, device) for _ in range(rounds) for work in works)

    copy = best_ms(lambda: target.copy_(source))
    read = best_ms(*_reads(source))
    matmul = best_ms(lambda: torch.mm(a, b, out=c))
    return Roofs(
        copy_gbps=2 * source.nbytes / copy / 1e6,
        # Whatever a copy moves can be read as well.
        read_gbps=max(source.nbytes / read, 2 * source.nbytes / copy) / 1e6,
        matmul_tflops=2 * n**3 / matmul / 1e9,
    )


def _reads(source: Tensor) -> list[Work]:
    """Return ways to read a tensor and keep next to nothing of it."""
    if source.device.type != "cuda":
        return [source.sum]
    sums = [
        torch.empty(programs * chip(source.device).num_sms, device=source.device)
        for programs in (2, 8, 32, 128)
    ]
    return [partial(read_op.read, source, out) for out in sums]
