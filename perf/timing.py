"""Time calls: all sides interleaved in one process, warmed up by time, medians with their spread.

On a GPU a sample is the time between two events around some calls, or around a replay of a CUDA
graph of them; on a CPU it is wall time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]

# A sample shorter than this would measure the events' resolution, about a microsecond.
MIN_SAMPLE_MS = 0.5
MAX_CALLS = 256
_QUEUE_CYCLES = 200_000  # about 0.1 ms


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    name: str
    warmup_ms: float  # of each group of sides
    sample_ms: float  # of each side, all its samples together
    min_samples: int
    max_samples: int
    host_rounds: int  # calls whose host time is taken


FULL = Effort("full", warmup_ms=60, sample_ms=40, min_samples=11, max_samples=41, host_rounds=15)
QUICK = Effort("quick", warmup_ms=20, sample_ms=10, min_samples=5, max_samples=15, host_rounds=7)
# Triton's interpreter: the way is tried, not the time.
INTERPRETED = Effort(
    "interpreted", warmup_ms=0, sample_ms=0, min_samples=3, max_samples=3, host_rounds=1
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What one sample times."""

    run: Work
    calls: int
    queued: bool = False  # the host's launch does not count: a CUDA graph


@dataclass(frozen=True, slots=True)
class Times:
    """Percentiles of a side, in milliseconds a call."""

    p20: float
    p50: float
    p80: float
    n: int
    calls: int


def call_ms(work: Work, device: torch.device) -> float:
    """Return the time of one call, in milliseconds, launch included."""
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def queued_ms(work: Work, device: torch.device) -> float:
    """Return the time of work that stands ready when the device comes to it, in milliseconds.

    A kernel that spins keeps the device from the first event until all is launched: between two
    events on an idle device stands the host's launch as well, some ten microseconds for a graph.
    """
    if device.type == "cuda":
        torch.cuda._sleep(_QUEUE_CYCLES)  # type: ignore[no-untyped-call]
    return call_ms(work, device)


def make_unit(calls: Sequence[Work], device: torch.device, graph: bool) -> Unit:
    """Make the unit that goes round `calls`, often enough for a sample to have a length.

    Parameters
    ----------
    calls : sequence of callables
        One a layer: one of them for a warm L2 cache, all for a cold one.
    device : torch.device
    graph : bool
        Capture them in a CUDA graph; whatever the capture raises is raised.
    """

    def once() -> None:
        for call in calls:
            call()

    once()
    # A graph is judged by its own replay: eager calls may take many times as long, and too few
    # calls in a sample would measure what stands around them.
    measure, trial = (queued_ms, capture(once).replay) if graph else (call_ms, once)
    # The shorter of two, so that the load of a kernel at its first call does not count.
    estimate = min(measure(trial, device) for _ in range(2))
    rounds = max(1, math.ceil(MIN_SAMPLE_MS / estimate)) if device.type == "cuda" else 1
    rounds = max(1, min(rounds, MAX_CALLS // len(calls)))

    def loop() -> None:
        for _ in range(rounds):
            once()

    if not graph:
        return Unit(loop, rounds * len(calls))
    run = trial if rounds == 1 else capture(loop).replay
    return Unit(run, rounds * len(calls), queued=True)


def capture(work: Work) -> torch.cuda.CUDAGraph:
    """Warm `work` up on a side stream and capture it."""
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        work()
    current.wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            work()
    except Exception:
        # torch stays on its stream of captures, and before 2.12 its allocator waits for an end
        # that does not come (pytorch#180395): every later capture would fail as well.
        torch.cuda.set_stream(current)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(current.device_index, pool)
        raise
    return graph


class SideError(RuntimeError):
    """A side raised while all were timed."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"{name}: {cause}")
        self.name = name
        self.cause = cause


def interleave(units: dict[str, Unit], device: torch.device, effort: Effort) -> dict[str, Times]:
    """Time all units in turns, so that clocks and heat are shared.

    Parameters
    ----------
    units : dict
        Name -> unit.
    device : torch.device
    effort : Effort
        The number of samples is the same for all: as many as the slowest has time for.

    Raises
    ------
    SideError
        With the side that raised.
    """

    def sample(name: str) -> float:
        try:
            unit = units[name]
            return (queued_ms if unit.queued else call_ms)(unit.run, device)
        except Exception as error:
            raise SideError(name, error) from error

    begin = time.perf_counter()
    while True:
        slowest = max(sample(name) for name in units)
        if (time.perf_counter() - begin) * 1e3 >= effort.warmup_ms:
            break
    n = round(effort.sample_ms / max(slowest, 1e-6))
    n = max(effort.min_samples, min(n, effort.max_samples))
    samples: dict[str, list[float]] = {name: [] for name in units}
    for _ in range(n):
        for name, unit in units.items():
            samples[name].append(sample(name) / unit.calls)
    return {name: _times(values, units[name].calls) for name, values in samples.items()}


def _times(samples: list[float], calls: int) -> Times:
    ordered = sorted(samples)

    def quantile(fraction: float) -> float:
        return ordered[round(fraction * (len(ordered) - 1))]

    return Times(quantile(0.2), statistics.median(ordered), quantile(0.8), len(ordered), calls)


def host_us(work: Work, device: torch.device, *, wait: bool, rounds: int) -> float:
    """Return the median host time of a call, in microseconds.

    Parameters
    ----------
    work : callable
    device : torch.device
    wait : bool
        Until its results are on the device; otherwise until it returns.
    rounds : int
    """
    samples = []
    for _ in range(rounds):
        synchronize(device)
        begin = time.perf_counter()
        work()
        if wait:
            synchronize(device)
        samples.append((time.perf_counter() - begin) * 1e6)
    synchronize(device)
    return statistics.median(samples)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; raise what went wrong there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
