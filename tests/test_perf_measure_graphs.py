"""A graph must give what an eager call gave; on a CPU its part is taken by the work itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn.cases import reference_results
from tritonattn.perf.cases import StepCase
from tritonattn.perf.measure import measure_case
from tritonattn.perf.providers import Call, Layer, Prepared, Provider
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import Step
from tritonattn.perf.timing import Effort

CPU = torch.device("cpu")
CASE = StepCase("decode", "tiny", "2x1x24+1x1x9", 8)
EFFORT = Effort("test", 0, 0, min_samples=3, max_samples=3, host_rounds=2)
ROOFS = Roofs(copy_gbps=20.0, read_gbps=10.0, matmul_tflops=0.5)


def provider(name: str, make: Callable[[Layer, Tensor], Call], **fields: Any) -> Provider:
    def prepare(step: Step) -> Prepared:
        rows = reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]
        return Prepared(lambda layer: make(layer, rows))

    return Provider(name, "peer", frozenset({"decode"}), prepare, **fields)


def good(layer: Layer, rows: Tensor) -> Call:
    return lambda: layer.out.copy_(rows)


def raising(error: Exception) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        raise error

    return function


class FakeGraph:
    """Make `make_unit` take a graph's part: what it captures is run at each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def capture(work: Callable[[], None]) -> Any:
            work()
            self.replay = work
            return self

        monkeypatch.setattr("tritonattn.perf.timing.capture", capture)


def graph_row(monkeypatch: pytest.MonkeyPatch, tested: Provider) -> dict[str, Any]:
    FakeGraph(monkeypatch)
    (row,) = measure_case(CASE, {("graph", "warm"): [tested]}, CPU, EFFORT, ROOFS)
    return row


def test_a_graph_has_no_launch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    row = graph_row(monkeypatch, provider("good", good))
    assert row["status"] == "ok"
    assert row["launch_us"] is None
    assert row["ms_p50"] > 0


def test_a_graph_that_gives_another_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    good_calls = iter(range(5))  # the check, two launches, and what warms the capture up

    def make(layer: Layer, rows: Tensor) -> Call:
        return lambda: layer.out.copy_(rows if next(good_calls, None) is not None else -rows)

    row = graph_row(monkeypatch, provider("turns", make))
    assert row["status"] == "wrong"
    assert row["reason"].startswith("in a CUDA graph: the worst row is off by")
    assert not {"ms_p50", "n", "launch_us", "gbps"} & set(row)


def test_a_graph_that_writes_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = iter(range(6))

    def make(layer: Layer, rows: Tensor) -> Call:
        return lambda: layer.out.copy_(rows) if next(eager, None) is not None else layer.out

    assert graph_row(monkeypatch, provider("lazy", make))["status"] == "wrong"


def test_a_graph_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = graph_row(monkeypatch, provider("a", good, graph_refusal=lambda step: "it synchronizes"))
    assert (row["status"], row["reason"]) == ("unsupported", "it synchronizes")
    row = graph_row(monkeypatch, provider("a", good, graph_refusal=raising(ValueError("odd"))))
    assert (row["status"], row["reason"]) == ("failed", "ValueError: odd")


def test_a_capture_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = raising(RuntimeError("cannot capture"))
    monkeypatch.setattr("tritonattn.perf.timing.capture", failing)
    wanted = {("graph", "warm"): [provider("a", good)], ("eager", "warm"): [provider("a", good)]}
    rows = list(measure_case(CASE, wanted, CPU, EFFORT, ROOFS))
    assert [(row["mode"], row["status"]) for row in rows] == [("graph", "failed"), ("eager", "ok")]
    assert rows[0]["reason"] == "RuntimeError: cannot capture"
