"""Block ops beside the plain copies of the same bytes: 1,000 pages of 16 x 8 x 128 bf16, 32 layers.

    python -m tritonattn.perf.block_ops [--out FILE.csv]

Pages are drawn at random, so neither side of a copy is contiguous. A device copy counts bytes read
and written. The time on the device and the time of an eager call, host work included, are columns
of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

import tritonattn
from tritonattn.perf.timing import elapsed_us, environment, timing_events

LAYERS, PAGES, MOVED = 32, 2048, 1000
PAGE_SHAPE = (2, 16, 8, 128)
PAGE_BYTES = 2 * 2 * 16 * 8 * 128

Work = Callable[[], Any]


def device_us(work: Work, rounds: int = 15) -> float:
    """Return the median time on the device: a spinning kernel ahead hides the host's work."""
    samples = []
    for _ in range(rounds):
        start, end = timing_events()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        samples.append(float(start.elapsed_time(end)) * 1e3)
    return statistics.median(samples)


def eager_us(work: Work, rounds: int = 15) -> float:
    """Return the median time of an eager call between two events."""
    return statistics.median(elapsed_us(work) for _ in range(rounds))


def host_us(work: Work, rounds: int = 15) -> float:
    """Return the median time until the call returns."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def mapping() -> torch.Tensor:
    """Return [MOVED, 2] int64: distinct sources and distinct targets, none of them both."""
    order = torch.randperm(PAGES)
    return torch.stack((order[:MOVED], order[-MOVED:]), 1)


def works() -> dict[str, tuple[Work, int, str]]:
    """Return name -> (work, bytes moved, name of the plain copy to hold it against)."""
    caches = [
        torch.randn(PAGES, *PAGE_SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    others = [torch.empty_like(cache) for cache in caches]
    pairs = mapping()
    plain = torch.randn(2, LAYERS * MOVED * PAGE_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    layer = torch.randn(2, MOVED * PAGE_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    # Pinned memory is scarce on small machines: a host pool of the moved pages and a few more.
    host = torch.empty(MOVED + 24, *PAGE_SHAPE, dtype=torch.bfloat16, pin_memory=True)
    flat = host[:MOVED].view(-1)
    device_flat = torch.empty_like(flat, device="cuda")
    out_pairs = torch.stack((torch.randperm(PAGES)[:MOVED], torch.randperm(MOVED + 24)[:MOVED]), 1)
    in_pairs = out_pairs.flip(1).contiguous()
    both, one = LAYERS * MOVED * PAGE_BYTES * 2, MOVED * PAGE_BYTES
    return {
        "device copy, 32 layers": (lambda: plain[1].copy_(plain[0]), both, ""),
        "copy_blocks, 32 layers": (
            lambda: tritonattn.copy_blocks(caches, pairs), both, "device copy, 32 layers",
        ),
        "swap_blocks, 32 layers": (
            lambda: tritonattn.swap_blocks(caches, others, pairs), both, "device copy, 32 layers",
        ),
        "device copy, 1 layer": (lambda: layer[1].copy_(layer[0]), one * 2, ""),
        "swap_blocks, 1 layer": (
            lambda: tritonattn.swap_blocks(caches[0], caches[1], pairs), one * 2,
            "device copy, 1 layer",
        ),
        "pinned copy to host": (lambda: flat.copy_(device_flat, non_blocking=True), one, ""),
        "swap_blocks to host": (
            lambda: tritonattn.swap_blocks(caches[0], host, out_pairs), one, "pinned copy to host",
        ),
        "pinned copy from host": (lambda: device_flat.copy_(flat, non_blocking=True), one, ""),
        "swap_blocks from host": (
            lambda: tritonattn.swap_blocks(host, caches[0], in_pairs), one, "pinned copy from host",
        ),
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    for name, (work, size, peer) in works().items():
        work()
        torch.cuda.synchronize()
        on_device = device_us(work)
        rates[name] = size / on_device / 1e3
        rows.append(
            {
                "case": name,
                "device_us_p50": on_device,
                "eager_us_p50": eager_us(work),
                "host_us_p50": host_us(work),
                "gb_per_s": rates[name],
                "rate_over_plain_copy": rates[name] / rates[peer] if peer else 1.0,
            }
        )
    frame = pd.DataFrame(rows).assign(**environment())
    print(frame.iloc[:, :6].round(3).to_string(index=False))
    if arguments.out:
        frame.to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
