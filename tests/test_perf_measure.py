"""What becomes of a case: rows with times for those that are right, reasons for the others."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.cases import reference_results
from tritonattn.perf import measure, schema
from tritonattn.perf.cases import BlockCase, StepCase
from tritonattn.perf.measure import DeviceLostError, measure_case, variants_of
from tritonattn.perf.providers import Call, Layer, Pages, Prepared, Provider
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import AnyStep, BlockStep, Step
from tritonattn.perf.timing import Effort, Times

CPU = torch.device("cpu")
CASE = StepCase("decode", "tiny", "2x1x24+1x1x9", 8)
BLOCKS = BlockCase("swap_blocks", "tiny", 2, 3, 8, 8)
VARIANT = ("eager", "warm")
EFFORT = Effort("test", 0, 0, min_samples=3, max_samples=3, host_rounds=2)
ROOFS = Roofs(copy_gbps=20.0, read_gbps=10.0, matmul_tflops=0.5)
TIMES = ("ms_p20", "ms_p50", "ms_p80", "n", "calls", "plan_us", "launch_us", "gbps", "tflops",
         "pct_roof")  # fmt: skip
KINDS = frozenset({"decode", "block_copy"})


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes most of the time of a case that costs nothing."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def right_rows(step: Step) -> Tensor:
    return reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]


def prepare(step: AnyStep) -> Prepared:
    """Set up a provider that is right and quick."""
    if isinstance(step, BlockStep):
        source, target = step.src_to_dst.unbind(1)

        def bind_pages(pages: Pages) -> Call:
            def call() -> None:
                for a, b in zip(pages.sources, pages.targets, strict=True):
                    b[target] = a[source]

            return call

        return Prepared(bind_pages)
    rows = right_rows(step)
    return Prepared(lambda layer: lambda: layer.out.copy_(rows))


def provider(name: str, **fields: Any) -> Provider:
    return Provider(**{"name": name, "role": "peer", "kinds": KINDS, "prepare": prepare} | fields)


def with_call(name: str, make: Callable[[Layer, Tensor], Call], **fields: Any) -> Provider:
    def prepare(step: Step) -> Prepared:
        rows = right_rows(step)
        return Prepared(lambda layer: make(layer, rows), **fields)

    return provider(name, prepare=prepare)


def rows_of(
    *providers: Provider, case: Any = CASE, effort: Effort = EFFORT
) -> dict[str, dict[str, Any]]:
    rows = list(measure_case(case, {VARIANT: list(providers)}, CPU, effort, ROOFS))
    schema.to_frame(rows)  # no column that the schema lacks
    found = {row["provider"]: row for row in rows}
    assert len(found) == len(rows) == len(providers)
    return found


def raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """Return a function that raises at a call, the first by default."""
    left = iter(range(after))

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise error

    return function


def test_a_right_result_has_a_time() -> None:
    row = rows_of(provider("good"))["good"]
    assert (row["op"], row["case"], row["model"]) == ("decode", CASE.name, "tiny")
    assert (row["status"], row["mode"], row["l2"]) == ("ok", "eager", "warm")
    assert row["role"] == "peer"
    assert (row["num_qo_heads"], row["num_kv_heads"], row["head_dim"]) == (4, 2, 16)
    assert (row["batch_size"], row["total_q"], row["total_kv"]) == (3, 3, 57)
    assert (row["page_size"], row["kv_layout"], row["dtype"]) == (8, "NHD", "bf16")
    assert (row["causal"], row["features"], row["lengths"]) == (True, None, "2x1x24+1x1x9")
    assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
    assert (row["n"], row["calls"]) == (3, 1)
    assert row["launch_us"] > 0
    assert row["plan_us"] is None
    assert 0 < row["worst_row"] < 0.01
    assert "reason" not in row


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Times(p20=0.5, p50=2.0, p80=3.0, n=7, calls=4)
    monkeypatch.setattr(measure, "interleave", lambda units, *rest: dict.fromkeys(units, fixed))
    row = rows_of(provider("good"))["good"]
    assert (row["ms_p20"], row["ms_p50"], row["ms_p80"]) == (0.5, 2.0, 3.0)
    assert (row["n"], row["calls"]) == (7, 4)
    # K and V of 57 tokens, 2 heads; q and out of 3 tokens, 4 heads: 16 elements of 2 bytes each.
    size = (2 * 57 * 2 + 2 * 3 * 4) * 16 * 2
    assert row["gbps"] == pytest.approx(size / 2e-3 / 1e9)
    # 57 pairs of query and key, 4 heads, 16 elements, 4 operations each.
    assert row["tflops"] == pytest.approx(57 * 4 * 16 * 4 / 2e-3 / 1e12)
    # Reading is the nearer roof: 8064 bytes at 10 GB/s.
    assert row["pct_roof"] == pytest.approx(100 * size / 10e9 / 2e-3)

    row = rows_of(provider("good"), case=BLOCKS)["good"]
    moved = 2 * 3 * (2 * 8 * 2 * 16 * 2) * 2  # layers, pages, their bytes, read and written
    assert row["gbps"] == pytest.approx(moved / 2e-3 / 1e9)
    assert row["tflops"] is None
    assert row["pct_roof"] == pytest.approx(100 * moved / 20e9 / 2e-3)


def test_the_matmul_roof_may_be_the_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Times(p20=1.0, p50=1.0, p80=1.0, n=3, calls=1)
    monkeypatch.setattr(measure, "interleave", lambda units, *rest: dict.fromkeys(units, fixed))
    roofs = Roofs(copy_gbps=1e6, read_gbps=1e6, matmul_tflops=1e-3)
    (row,) = measure_case(CASE, {VARIANT: [provider("good")]}, CPU, EFFORT, roofs)
    assert row["pct_roof"] == pytest.approx(100 * 57 * 4 * 16 * 4 / 1e9 / 1e-3)


def test_a_plan_has_a_time_of_its_own() -> None:
    planned: list[str] = []

    def plan() -> None:
        planned.append("plan")
        time.sleep(0.02)

    def make(layer: Layer, rows: Tensor) -> Call:
        assert planned, "calls are bound to what a plan made"
        return lambda: layer.out.copy_(rows)

    row = rows_of(with_call("planner", make, plan=plan))["planner"]
    assert row["status"] == "ok"
    assert 20_000 <= row["plan_us"] < 500_000
    assert row["ms_p50"] < 15, "the plan is not in the time of a call"
    assert row["launch_us"] < 15_000


def test_a_wrong_result_has_no_time() -> None:
    def off(layer: Layer, rows: Tensor) -> Call:
        spoilt = rows.clone()
        spoilt[2, 3] *= -1
        return lambda: layer.out.copy_(spoilt)

    rows = rows_of(provider("a"), with_call("off", off), provider("z"))
    assert rows["off"]["status"] == "wrong"
    assert rows["off"]["reason"].startswith("the worst row is off by ")
    assert rows["off"]["worst_row"] > 0.5
    assert rows["off"]["rms_rel"] > 0
    assert not set(TIMES) & set(rows["off"])
    assert [rows[name]["status"] for name in "az"] == ["ok", "ok"]


def test_what_was_not_written_is_wrong() -> None:
    lazy = with_call("lazy", lambda layer, rows: lambda: layer.out)
    half = with_call(
        "half", lambda layer, rows: lambda: (layer.out[:2].copy_(rows[:2]), layer.out)[1]
    )
    rows = rows_of(provider("first"), lazy, half)
    # What another provider has written there does not help.
    assert [rows[name]["status"] for name in ("first", "lazy", "half")] == ["ok", "wrong", "wrong"]


def test_a_page_that_is_not_moved_is_wrong() -> None:
    def lazy(step: BlockStep) -> Prepared:
        return Prepared(lambda pages: lambda: None)

    rows = rows_of(provider("good"), provider("lazy", prepare=lazy), case=BLOCKS)
    assert rows["good"]["status"] == "ok"
    assert rows["lazy"]["status"] == "wrong"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("it broke"), "failed", "RuntimeError: it broke"),
        (AssertionError(), "failed", "AssertionError:"),
        (KeyError("key"), "failed", "KeyError: 'key'"),
        (torch.OutOfMemoryError("tried 9 GiB"), "out of memory", "OutOfMemoryError: tried 9 GiB"),
        (UnsupportedError("no fp8"), "unsupported", "no fp8"),
        (NotImplementedError("later"), "unsupported", "later"),
        (NotImplementedError(), "unsupported", "NotImplementedError"),
        (
            RuntimeError("Error in function 'Plan' at /a/b/c.cuh:85: too many splits"),
            "failed",
            "RuntimeError: too many splits",
        ),
        (ValueError("long " * 1000), "failed", "ValueError: " + ("long " * 1000)[:388]),
    ],
)
@pytest.mark.parametrize("where", ["refusal", "prepare", "plan", "bind", "call"])
def test_whatever_is_raised_is_a_reason(
    where: str, error: Exception, status: str, reason: str
) -> None:
    fails = raising(error)
    bad = {
        "refusal": provider("bad", refusal=fails),
        "prepare": provider("bad", prepare=fails),
        "plan": with_call("bad", lambda layer, rows: lambda: layer.out.copy_(rows), plan=fails),
        "bind": with_call("bad", fails),
        "call": with_call("bad", lambda layer, rows: fails),
    }[where]
    rows = rows_of(provider("before"), bad, provider("after"))
    assert rows["bad"]["status"] == status
    assert rows["bad"]["reason"].strip() == reason.strip()
    assert not set(TIMES) & set(rows["bad"])
    for name in ("before", "after"):
        assert rows[name]["status"] == "ok"
        assert rows[name]["ms_p50"] > 0


def test_a_call_that_fails_late_takes_nobody_along() -> None:
    # Its first call is checked, then come launches, the estimate, the warm-up, the samples.
    seen = set()
    for after in range(1, 12):
        fails = raising(RuntimeError("too hot"), after)

        def make(layer: Layer, rows: Tensor, fails: Callable[[], None] = fails) -> Call:
            return lambda: (fails(), layer.out.copy_(rows))[1]

        rows = rows_of(provider("before"), with_call("bad", make), provider("after"))
        seen.add(rows["bad"]["status"])
        if rows["bad"]["status"] == "failed":
            assert rows["bad"]["reason"] == "RuntimeError: too hot", after
            assert not set(TIMES) & set(rows["bad"]), after
        for name in ("before", "after"):
            assert rows[name]["status"] == "ok", after
            assert rows[name]["n"] == 3
    assert seen == {"failed", "ok"}, "calls past the last one do not fail"


def test_a_refusal_is_a_reason() -> None:
    asked: list[str] = []

    def refusal(step: Step) -> str | None:
        asked.append(step.case.name)
        return "it takes no pages of 8"

    unused = raising(AssertionError("a refused step is not prepared"))
    rows = rows_of(
        provider("picky", refusal=refusal, prepare=unused),
        provider("other", kinds=frozenset({"prefill"}), refusal=unused, prepare=unused),
        provider("good", refusal=lambda step: None),
    )
    assert rows["picky"]["status"] == rows["other"]["status"] == "unsupported"
    assert rows["picky"]["reason"] == "it takes no pages of 8"
    assert rows["other"]["reason"].startswith("other takes prefill")
    assert rows["good"]["status"] == "ok"
    assert asked == [CASE.name]


def test_no_side_is_left() -> None:
    rows = rows_of(provider("bad", prepare=raising(RuntimeError("no"))))
    assert rows["bad"]["status"] == "failed"


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("too large"), "out of memory"), (ValueError("odd"), "failed")],
)
def test_a_step_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    monkeypatch.setattr(measure, "make_step", raising(error))
    a, b = provider("a"), provider("b")
    wanted = {("graph", "cold"): [a, b], ("eager", "warm"): [b]}
    rows = list(measure_case(CASE, wanted, CPU, EFFORT, ROOFS))
    assert [(row["mode"], row["l2"], row["provider"]) for row in rows] == [
        ("graph", "cold", "a"), ("graph", "cold", "b"), ("eager", "warm", "b"),
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {status}
    assert {row["case"] for row in rows} == {CASE.name}
    assert all(str(error) in row["reason"] for row in rows)


def test_features_without_an_oracle_are_unsupported() -> None:
    case = dataclasses.replace(CASE, window_left=7)
    rows = rows_of(provider("a"), provider("b"), case=case)
    assert [row["status"] for row in rows.values()] == ["unsupported"] * 2
    assert [row["reason"] for row in rows.values()] == ["the oracle has no w7 yet"] * 2
    assert [row["features"] for row in rows.values()] == ["w7"] * 2


def test_each_variant_of_each_provider_has_a_row() -> None:
    a, b = provider("a"), provider("b", prepare=raising(RuntimeError("no")))
    wanted = {("eager", "cold"): [a, b], ("eager", "warm"): [b], ("eager", "hot"): [a]}
    rows = list(measure_case(CASE, wanted, CPU, EFFORT, ROOFS))
    found = {(row["mode"], row["l2"], row["provider"]): row["status"] for row in rows}
    assert len(found) == len(rows)
    assert found == {
        ("eager", "cold", "a"): "ok", ("eager", "cold", "b"): "failed",
        ("eager", "warm", "b"): "failed", ("eager", "hot", "a"): "ok",
    }  # fmt: skip
    calls = {row["l2"]: row["calls"] for row in rows if row["provider"] == "a"}
    assert calls["cold"] > 1, "a cold sample goes round the layers"
    assert calls["hot"] == 1


def test_cold_goes_round_all_layers_and_warm_stays() -> None:
    used: list[int] = []

    def make(layer: Layer, rows: Tensor) -> Call:
        def call() -> Tensor:
            used.append(layer.out.data_ptr())
            return layer.out.copy_(rows)

        return call

    shown = with_call("shown", make)
    for l2, layers in (("cold", 2), ("warm", 1)):
        list(measure_case(CASE, {("eager", l2): [shown]}, CPU, EFFORT, ROOFS))
        # The last six calls are samples.
        assert len(set(used[-6:])) == layers
        assert all(a != b for a, b in zip(used[-6:], used[-5:], strict=False)) == (l2 == "cold")


def test_rows_come_as_soon_as_they_are_known() -> None:
    done: list[str] = []

    def slow(step: Step) -> Prepared:
        done.append("slow")
        return prepare(step)

    bad = provider("bad", prepare=raising(RuntimeError("no")))
    rows = measure_case(CASE, {VARIANT: [bad, provider("slow", prepare=slow)]}, CPU, EFFORT, ROOFS)
    assert next(rows)["provider"] == "bad"
    assert done == []
    assert next(rows)["provider"] == "slow"


def test_a_lost_gpu_ends_the_case_after_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[bool] = []

    def synchronize(device: torch.device) -> None:
        if lost:
            raise RuntimeError("an illegal memory access was encountered")

    def breaking(step: Step) -> Prepared:
        lost.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(measure, "synchronize", synchronize)
    wanted = {VARIANT: [provider("bad", prepare=breaking), provider("next")]}
    rows: Iterator[dict[str, Any]] = measure_case(CASE, wanted, CPU, EFFORT, ROOFS)
    assert next(rows)["status"] == "failed"
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        next(rows)


def test_variants() -> None:
    gpu = torch.device("cuda")
    both = [("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm")]
    assert variants_of(CASE, gpu) == both
    assert variants_of(BLOCKS, gpu) == [("graph", "warm"), ("eager", "warm")]
    assert variants_of(StepCase("host", "tiny", "1x1x8"), gpu) == variants_of(BLOCKS, gpu)
    assert variants_of(CASE, CPU) == variants_of(BLOCKS, CPU) == [("eager", "warm")]


def test_no_number_is_nan() -> None:
    case = BlockCase("swap_blocks to host", "tiny", 1, 2, 4, 8)  # the bus has no roof
    row = rows_of(provider("good"), case=case)["good"]
    assert row["status"] == "ok"
    assert row["pct_roof"] is None
    numbers = [value for value in row.values() if isinstance(value, float)]
    assert all(math.isfinite(number) for number in numbers)
