"""The sweep as a user runs it: rows that stay, runs that go on, words for what cannot be."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tritonattn import cli
from tritonattn.cases import reference_results
from tritonattn.perf import environment, roofs, schema
from tritonattn.perf.cases import Case, StepCase
from tritonattn.perf.providers import Prepared, Provider
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import Step
from tritonattn.perf.sweep import Settings, sweep
from tritonattn.perf.timing import INTERPRETED

ROOT = Path(__file__).resolve().parent.parent
CASES: list[Case] = [StepCase("decode", "tiny", f"{batch}x1x9", 8) for batch in (1, 2, 3)]
VARIANTS = [("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm")]


@pytest.fixture(autouse=True)
def one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither a commit nor the speed of this machine change between two runs of a test."""
    monkeypatch.setenv("TRITONATTN_COMMIT", "0123456789ab")
    monkeypatch.setattr(gc, "collect", lambda: 0)  # most of the time of a case that costs nothing
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: Roofs(20.0, 10.0, 0.5))


class Log:
    """What fake providers were asked to measure."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, str]] = []  # case, provider

    def provider(self, name: str, before: Callable[[Step], None] | None = None) -> Provider:
        """Return a provider that is right; `before` may do anything first."""

        def prepare(step: Step) -> Prepared:
            self.measured.append((step.case.name, name))
            if before is not None:
                before(step)
            rows = reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]
            return Prepared(lambda layer: lambda: layer.out.copy_(rows))

        return Provider(name, "peer", frozenset({"decode"}), prepare)


def settings(*chosen: Provider, budget_s: float | None = None, **fields: Any) -> Settings:
    return Settings(**{
        "suite": "mine", "cases": CASES, "providers": list(chosen), "variants": VARIANTS,
        "device": torch.device("cpu"), "effort": INTERPRETED, "budget_s": budget_s,
    } | fields)  # fmt: skip


def keys(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    return list(frame[list(schema.KEY)].itertuples(index=False, name=None))


def expected_keys(*names: str, cases: list[Case] = CASES) -> set[tuple[str, ...]]:
    return {(case.name, name, "eager", "warm") for case in cases for name in names}


def test_a_sweep_of_fakes(tmp_path: Path) -> None:
    log = Log()
    frame = sweep(settings(log.provider("a"), log.provider("b")), tmp_path / "new" / "folder")
    assert set(keys(frame)) == expected_keys("a", "b")
    assert len(frame) == 6
    assert set(frame["status"]) == {"ok"}
    assert set(frame["suite"]) == {"mine"}
    assert frame["run_id"].nunique() == 1
    assert set(frame["device"]) == {"interpreter"}
    assert set(frame["git_commit"]) == {"0123456789ab"}
    assert set(frame["roof_copy_gbps"]) == {20.0}
    assert set(frame["roof_read_gbps"]) == {10.0}
    assert set(frame["roof_matmul_tflops"]) == {0.5}
    assert frame["timestamp"].str.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00").all()
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["results.csv", "results.parquet"]
    for name in ("results.csv", "results.parquet"):
        pd.testing.assert_frame_equal(schema.read_results(folder / name), frame)


def test_rows_are_on_disk_while_it_goes(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(step: Step) -> None:
        # As another process would: what is in the file, not what is in a buffer of this one.
        file = tmp_path / schema.RESULTS_CSV
        seen.append(len(schema.read_results(file)) if file.exists() else 0)

    log = Log()

    def refuse(step: Step) -> str:
        return "it does not"

    first = Provider("first", "peer", frozenset({"decode"}), lambda step: Prepared(print), refuse)
    sweep(settings(first, log.provider("looks", look)), tmp_path)
    # A refusal is a row at once; the measured one follows.
    assert seen == [1, 3, 5]


class PowerCutError(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_stopped_sweep_goes_on(tmp_path: Path, at: int) -> None:
    log = Log()

    def cut(step: Step) -> None:
        if len([name for _, name in log.measured if name == "b"]) == at:
            raise PowerCutError

    chosen = [log.provider("a"), log.provider("b", cut)]
    if at <= len(CASES):
        with pytest.raises(PowerCutError):
            sweep(settings(*chosen), tmp_path)
        kept = schema.read_results(tmp_path) if at > 1 else schema.empty_frame()
        assert len(kept) == 2 * (at - 1)
    else:
        kept = sweep(settings(*chosen), tmp_path)
    before = list(log.measured)
    log.measured.clear()
    frame = sweep(settings(log.provider("a"), log.provider("b")), tmp_path)
    assert set(keys(frame)) == expected_keys("a", "b")
    assert len(frame) == 6, "nothing twice"
    # The cases that were done are not measured again.
    done = set(kept["case"])
    assert not done & {case for case, _ in log.measured}
    assert {pair for pair in before if pair[0] in done} | set(log.measured) == {
        (case.name, name) for case in CASES for name in "ab"
    }
    pd.testing.assert_frame_equal(frame.head(len(kept)), kept)
    if len(kept):
        assert set(frame["run_id"]) == set(kept["run_id"])


def test_a_torn_row_is_measured_again(tmp_path: Path) -> None:
    log = Log()
    whole = sweep(settings(log.provider("a")), tmp_path)
    file = tmp_path / schema.RESULTS_CSV
    file.write_bytes(file.read_bytes()[:-7])
    log.measured.clear()
    frame = sweep(settings(log.provider("a")), tmp_path)
    assert log.measured == [(CASES[-1].name, "a")]
    assert keys(frame) == keys(whole)
    assert frame["run_id"].nunique() == 1
    pd.testing.assert_frame_equal(frame.head(2), whole.head(2))
    # What tore in the header has nothing to keep.
    file.write_bytes(file.read_bytes()[:9])
    assert keys(sweep(settings(log.provider("a")), tmp_path)) == keys(whole)


def test_a_finished_sweep_has_nothing_to_do(tmp_path: Path) -> None:
    log = Log()
    first = sweep(settings(log.provider("a")), tmp_path)
    (tmp_path / schema.RESULTS_PARQUET).unlink()
    log.measured.clear()
    again = sweep(settings(log.provider("a")), tmp_path)
    assert log.measured == []
    pd.testing.assert_frame_equal(again, first)
    pd.testing.assert_frame_equal(schema.read_results(tmp_path / "results.parquet"), first)


def test_another_provider_is_added(tmp_path: Path) -> None:
    log = Log()
    sweep(settings(log.provider("a")), tmp_path)
    log.measured.clear()
    frame = sweep(settings(log.provider("a"), log.provider("b")), tmp_path)
    assert log.measured == [(case.name, "b") for case in CASES]
    assert set(keys(frame)) == expected_keys("a", "b")
    assert len(frame) == 6
    assert frame["run_id"].nunique() == 1


def test_failures_are_answers_too(tmp_path: Path) -> None:
    log = Log()

    def fail(step: Step) -> None:
        raise RuntimeError("line one,\nline two")

    frame = sweep(settings(log.provider("a"), log.provider("bad", fail)), tmp_path)
    bad = frame[frame["provider"] == "bad"]
    assert bad["reason"].tolist() == ["RuntimeError: line one, line two"] * 3
    log.measured.clear()
    again = sweep(settings(log.provider("a"), log.provider("bad")), tmp_path)
    assert log.measured == []
    pd.testing.assert_frame_equal(again, frame)


def test_fresh_begins_anew(tmp_path: Path) -> None:
    log = Log()
    first = sweep(settings(log.provider("a")), tmp_path)
    log.measured.clear()

    def no_table_of_before(step: Step) -> None:
        assert not (tmp_path / schema.RESULTS_PARQUET).exists()

    again = sweep(settings(log.provider("a", no_table_of_before)), tmp_path, fresh=True)
    assert len(log.measured) == 3
    assert set(again["status"]) == {"ok"}
    assert set(again["run_id"]).isdisjoint(first["run_id"])
    assert len(again) == 3
    # There need not be anything to drop.
    assert len(sweep(settings(log.provider("a")), tmp_path / "other", fresh=True)) == 3


@pytest.mark.parametrize("name", ["torch", "gpu", "git_commit", "device"])
def test_another_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    log = Log()
    sweep(settings(log.provider("a")), tmp_path)
    before = (tmp_path / schema.RESULTS_CSV).read_bytes()
    log.measured.clear()
    real = environment.environment
    monkeypatch.setattr(environment, "environment", lambda device: real(device) | {name: "another"})
    with pytest.raises(cli.UsageError, match=f"measured with {name} .*, here it is another"):
        sweep(settings(log.provider("a"), log.provider("b")), tmp_path)
    assert (tmp_path / schema.RESULTS_CSV).read_bytes() == before
    assert log.measured == []
    assert len(sweep(settings(log.provider("a")), tmp_path, fresh=True)) == 3


def test_a_dirty_checkout_is_the_same_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Results that are committed make it so.
    log = Log()
    real = environment.environment
    for dirty in (False, True, None):
        monkeypatch.setattr(
            environment, "environment", lambda device, now=dirty: real(device) | {"git_dirty": now}
        )
        frame = sweep(settings(log.provider("a")), tmp_path)
    assert len(log.measured) == 3
    assert frame["git_dirty"].tolist() == [False] * 3


def test_a_budget_of_nothing(tmp_path: Path) -> None:
    log = Log()
    frame = sweep(settings(log.provider("a"), log.provider("b"), budget_s=0.0), tmp_path)
    assert log.measured == []
    assert set(keys(frame)) == expected_keys("a", "b")
    assert set(frame["status"]) == {"not run"}
    assert set(frame["reason"]) == {"the time budget was spent"}
    assert frame["ms_p50"].isna().all()
    again = sweep(settings(log.provider("a"), log.provider("b")), tmp_path)
    assert set(again["status"]) == {"ok"}
    assert set(keys(again)) == expected_keys("a", "b")
    assert len(again) == 6


def test_a_budget_that_ends_in_the_middle(tmp_path: Path) -> None:
    log = Log()

    def slow(step: Step) -> None:
        time.sleep(0.3 if step.case is CASES[1] else 0)

    frame = sweep(settings(log.provider("a", slow), budget_s=0.25), tmp_path)
    assert frame["status"].tolist() == ["ok", "ok", "not run"]
    assert [case for case, _ in log.measured] == [case.name for case in CASES[:2]]
    again = sweep(settings(log.provider("a")), tmp_path)
    assert again["status"].tolist() == ["ok", "ok", "ok"]
    pd.testing.assert_frame_equal(again.head(2), frame.head(2))
    assert [case for case, _ in log.measured] == [case.name for case in CASES]
    assert again["run_id"].nunique() == 1
