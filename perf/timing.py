"""Time GPU work: medians of CUDA-graph replays, all sides interleaved in one process."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
import triton

Work = Callable[[], Any]


def capture(work: Work, calls: int = 1) -> torch.cuda.CUDAGraph:
    """Warm `work` up on a side stream and capture `calls` calls of it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    return graph


def elapsed_us(work: Work) -> float:
    """Return the time of one call between two events, in microseconds."""
    start, end = timing_events()
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return a start and an end event."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    return start, end


def interleaved_us(
    works: dict[str, Work], *, rounds: int = 15, calls: int = 10, graph: bool = True
) -> dict[str, float]:
    """Return the median time of a call of each side, in microseconds.

    Parameters
    ----------
    works : dict
        Name -> work to time. Each takes its turn in every round, so that clocks and heat are
        shared.
    rounds : int
    calls : int
        Calls in one measured unit: of a graph replay, or of an eager loop.
    graph : bool
        Replay CUDA graphs; otherwise time eager launches, host cost included.
    """

    def loop(work: Work) -> Work:
        def run() -> None:
            for _ in range(calls):
                work()

        return run

    units = {
        name: capture(work, calls).replay if graph else loop(work) for name, work in works.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in units}
    for unit in units.values():
        for _ in range(3):
            unit()
    for _ in range(rounds):
        for name, unit in units.items():
            samples[name].append(elapsed_us(unit) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def environment() -> dict[str, str]:
    """Return what a figure depends on beside the code, as columns."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[
            0
        ],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
