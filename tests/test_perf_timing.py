"""How times are taken, with a clock that the tests set."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tritonattn.perf import timing
from tritonattn.perf.timing import Effort, SideError, Unit, host_us, interleave, make_unit

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def effort(least: int = 5, most: int = 5, sample_ms: float = 0.0, warmup_ms: float = 0) -> Effort:
    return Effort("test", warmup_ms, sample_ms, least, most, host_rounds=3)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let units say their names when they run, and a call last as long as it says."""
    said: list[str] = []

    def call_ms(work: Callable[[], float], device: torch.device) -> float:
        return work()

    monkeypatch.setattr(timing, "call_ms", call_ms)
    return said


def unit(order: list[str], name: str, ms: Iterator[float], calls: int = 1) -> Unit:
    def run() -> float:
        order.append(name)
        return next(ms)

    return Unit(run, calls)


def test_sides_take_turns(order: list[str]) -> None:
    units = {name: unit(order, name, itertools.repeat(1.0)) for name in "abc"}
    times = interleave(units, CPU, effort(7, 7))
    # The first turn is warm-up.
    assert order == list("abc") * 8
    assert list(times) == list("abc")
    assert {side.n for side in times.values()} == {7}


@pytest.mark.parametrize(
    ("sample_ms", "slowest", "n"),
    [(40.0, 4.0, 10), (40.0, 1000.0, 3), (40.0, 0.001, 41), (0.0, 1.0, 3), (40.0, 0.0, 41)],
)
def test_the_slowest_side_sets_the_number_of_samples(
    order: list[str], sample_ms: float, slowest: float, n: int
) -> None:
    units = {
        "fast": unit(order, "fast", itertools.repeat(slowest / 10)),
        "slow": unit(order, "slow", itertools.repeat(slowest)),
    }
    times = interleave(units, CPU, effort(3, 41, sample_ms))
    assert {name: side.n for name, side in times.items()} == {"fast": n, "slow": n}
    assert order.count("fast") == order.count("slow") == n + 1


def test_percentiles_are_of_one_call(order: list[str]) -> None:
    # Eleven samples of 20, 22, ... 40 ms, each of two calls, in no order; 999 is warm-up.
    values = [20.0 + 2 * i for i in (7, 0, 10, 3, 9, 1, 5, 2, 8, 4, 6)]
    units = {
        "two": unit(order, "two", iter([999.0, *values]), calls=2),
        "one": unit(order, "one", iter([999.0, *values]), calls=1),
    }
    times = interleave(units, CPU, effort(11, 11))
    two, one = times["two"], times["one"]
    assert (two.p20, two.p50, two.p80, two.n, two.calls) == (12.0, 15.0, 18.0, 11, 2)
    assert (one.p20, one.p50, one.p80, one.n, one.calls) == (24.0, 30.0, 36.0, 11, 1)


def test_percentiles_of_few_samples(order: list[str]) -> None:
    times = interleave({"a": unit(order, "a", iter([9.0, 4.0, 1.0, 3.0, 2.0]))}, CPU, effort(4, 4))
    assert times["a"].p50 == 2.5
    assert times["a"].p20 <= times["a"].p50 <= times["a"].p80
    times = interleave({"a": unit(order, "a", iter([9.0, 4.0]))}, CPU, effort(1, 1))
    assert (times["a"].p20, times["a"].p50, times["a"].p80) == (4.0, 4.0, 4.0)


def test_warm_up_goes_by_time(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.010)  # 10 ms a look
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    units = {name: unit(order, name, itertools.repeat(1.0)) for name in "ab"}
    interleave(units, CPU, effort(2, 2, warmup_ms=35))
    assert order == list("ab") * (4 + 2)  # looks at 10, 20, 30 and 40 ms


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_side_that_raises_is_named(order: list[str], at: int) -> None:
    def raising() -> Iterator[float]:
        yield from [1.0] * at
        raise ArithmeticError("too hot")

    units = {
        "good": unit(order, "good", itertools.repeat(1.0)),
        "bad": unit(order, "bad", raising()),
    }
    with pytest.raises(SideError) as error:
        interleave(units, CPU, effort())
    assert error.value.name == "bad"
    assert isinstance(error.value.cause, ArithmeticError)


def test_a_unit_on_a_cpu_goes_round_once() -> None:
    called: list[str] = []
    calls = [lambda name=name: called.append(name) for name in "abc"]
    whole = make_unit(calls, CPU, graph=False)
    assert whole.calls == 3
    called.clear()
    whole.run()
    assert called == list("abc")
    called.clear()
    warm = make_unit(calls[:1], CPU, graph=False)
    assert warm.calls == 1
    called.clear()
    warm.run()
    assert called == ["a"]


@pytest.mark.parametrize(
    ("layers", "round_ms", "rounds"),
    [
        (1, 0.1, 5),
        (1, 0.3, 2),
        (1, 0.5, 1),
        (1, 80.0, 1),
        (1, 0.001, 256),  # as many calls as there may be in a sample
        (3, 0.1, 5),
        (100, 0.001, 2),
        (300, 0.001, 1),
    ],
)
def test_a_sample_on_a_gpu_has_a_length(
    monkeypatch: pytest.MonkeyPatch, layers: int, round_ms: float, rounds: int
) -> None:
    def call_ms(work: Callable[[], None], device: torch.device) -> float:
        work()
        return round_ms

    monkeypatch.setattr(timing, "call_ms", call_ms)
    called: list[int] = []
    calls = [lambda i=i: called.append(i) for i in range(layers)]
    made = make_unit(calls, GPU, graph=False)
    assert made.calls == rounds * layers
    called.clear()
    made.run()
    # Cold: each layer once before any comes again.
    assert called == list(range(layers)) * rounds


def test_the_load_of_a_kernel_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([50.0, 0.1])
    monkeypatch.setattr(timing, "call_ms", lambda work, device: next(times))
    assert make_unit([lambda: None], GPU, graph=False).calls == 5


def test_a_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        def __init__(self, work: Callable[[], None]) -> None:
            self.replay = lambda: replayed.append(work)

    replayed: list[Callable[[], None]] = []
    called: list[str] = []
    monkeypatch.setattr(timing, "capture", Graph)
    made = make_unit([lambda: called.append("a"), lambda: called.append("b")], CPU, graph=True)
    called.clear()
    made.run()
    assert called == []
    replayed[0]()
    assert called == ["a", "b"]
    assert made.calls == 2


def test_call_ms_is_wall_time_on_a_cpu() -> None:
    assert 20 <= timing.call_ms(lambda: time.sleep(0.02), CPU) < 500


@pytest.mark.parametrize(("wait", "synchronized"), [(True, 2), (False, 1)])
def test_host_time(monkeypatch: pytest.MonkeyPatch, wait: bool, synchronized: int) -> None:
    done: list[str] = []
    clock = iter([0.0, 10e-6, 1.0, 1.0 + 500e-6, 2.0, 2.0 + 30e-6])
    monkeypatch.setattr(time, "perf_counter", lambda: done.append("look") or next(clock))
    monkeypatch.setattr(timing, "synchronize", lambda device: done.append("wait"))
    found = host_us(lambda: done.append("work"), GPU, wait=wait, rounds=3)
    assert found == pytest.approx(30)  # the median: neither the first nor the outlier
    one = ["wait", "look", "work", *["wait"] * (synchronized - 1), "look"]
    assert done == one * 3 + ["wait"]


def test_efforts() -> None:
    for chosen in (timing.FULL, timing.QUICK, timing.INTERPRETED):
        assert 0 < chosen.min_samples <= chosen.max_samples
        assert chosen.host_rounds > 0
    assert timing.QUICK.sample_ms < timing.FULL.sample_ms
    assert timing.QUICK.max_samples < timing.FULL.max_samples


def test_times_of_real_work_are_in_order() -> None:
    short, long = torch.randn(16, 16), torch.randn(400, 400)
    units = {
        "short": make_unit([lambda: short @ short], CPU, graph=False),
        "long": make_unit([lambda: long @ long], CPU, graph=False),
    }
    times = interleave(units, CPU, effort(9, 9, warmup_ms=5))
    assert times["short"].p80 < times["long"].p20
    assert statistics.median([times["long"].p20, times["long"].p50, times["long"].p80]) == (
        times["long"].p50
    )
