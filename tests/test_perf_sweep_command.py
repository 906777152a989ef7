"""`tritonattn sweep` as a user runs it: killed, resumed, misspelled, on a lost GPU."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tritonattn import cli, env
from tritonattn.cases import reference_results
from tritonattn.perf import markdown, measure, providers, roofs, schema
from tritonattn.perf import sweep as sweep_module
from tritonattn.perf.cases import Case, StepCase
from tritonattn.perf.providers import Prepared, Provider
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import Step

ROOT = Path(__file__).resolve().parent.parent
CASES: list[Case] = [StepCase("decode", "tiny", f"{batch}x1x9", 8) for batch in (1, 2, 3)]
VARIANTS = [("graph", "cold"), ("graph", "warm"), ("eager", "cold"), ("eager", "warm")]


@pytest.fixture(autouse=True)
def one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither a commit nor the speed of this machine change between two runs of a test."""
    monkeypatch.setenv("TRITONATTN_COMMIT", "0123456789ab")
    monkeypatch.setattr(gc, "collect", lambda: 0)  # most of the time of a case that costs nothing
    monkeypatch.setattr(roofs, "measure_roofs", lambda device: Roofs(20.0, 10.0, 0.5))


def right(step: Step) -> Prepared:
    rows = reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]
    return Prepared(lambda layer: lambda: layer.out.copy_(rows))


def keys(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    return list(frame[list(schema.KEY)].itertuples(index=False, name=None))


def command(*args: str) -> int:
    return cli.main(["sweep", "--device", "cpu", *args])


def words_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was said of an error: one line, no traceback."""
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("tritonattn sweep: ")]
    assert len(lines) == 1, said
    assert "Traceback" not in said
    return lines[0].removeprefix("tritonattn sweep: ")


KILLED = """
import sys
import time
from pathlib import Path

import torch

from tritonattn.cases import reference_results
from tritonattn.perf.providers import Prepared, Provider, register
from tritonattn.perf.steps import Step

HERE = Path(__file__).parent


def prepare(step):
    with (HERE / "measured").open("a") as file:
        file.write(step.case.name + "\\n")
    if step.batch_size == 3 and not (HERE / "killed").exists():
        (HERE / "waiting").touch()
        time.sleep(300)
    rows = reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]
    return Prepared(lambda layer: lambda: layer.out.copy_(rows))


register(Provider("plugged", "peer", frozenset({"decode"}), prepare))
"""
THREE = """
- {op: decode, model: tiny, lengths: [1x1x9, 2x1x9, 3x1x9, 4x1x9], page_size: 8}
"""


def test_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover own cases, a third party's provider and the script, in one process that is killed."""
    (tmp_path / "plugged_in.py").write_text(KILLED)
    (tmp_path / "three.yaml").write_text(THREE)
    out = tmp_path / "out"
    args = [
        "--device", "cpu", "--cases", str(tmp_path / "three.yaml"), "--plugin", "plugged_in",
        "--providers", "plugged", "torch", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "perf" / "sweep.py"), "--quick", *args],
        env={**env.with_interpreter(), "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "waiting").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = schema.read_results(out)
    # A refusal is known before a time is.
    assert kept["provider"].tolist() == ["torch", "plugged"] * 2
    assert kept["status"].tolist() == ["unsupported", "ok"] * 2
    assert not (out / schema.RESULTS_PARQUET).exists()

    (tmp_path / "killed").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(providers, "_providers", dict(providers.all_providers()))
    assert cli.main(["sweep", "--quick", *args]) == cli.OK
    assert f"{out / 'results.csv'}: 8 rows" in capsys.readouterr().out
    frame = schema.read_results(out)
    pd.testing.assert_frame_equal(frame.head(len(kept)), kept)
    assert len(frame) == len(set(keys(frame))) == 8
    assert frame["run_id"].nunique() == 1
    assert all(frame["suite"].str.fullmatch(r"three-[0-9a-f]{8}"))
    mine = frame[frame["provider"] == "plugged"]
    assert mine["batch_size"].tolist() == [1, 2, 3, 4]
    assert mine["status"].tolist() == ["ok"] * 4
    names = mine["case"].tolist()
    # The third was in the works when the process was killed.
    assert (tmp_path / "measured").read_text().split() == [*names[:3], *names[2:]]
    pd.testing.assert_frame_equal(schema.read_results(out / "results.parquet"), frame)


def test_the_decode_suite_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "--suite", "decode", "--quick", "--out", str(tmp_path)]) == cli.OK
    assert "results.csv: 20 rows" in capsys.readouterr().out
    frame = schema.read_results(tmp_path)
    assert len(frame) == 20
    pd.testing.assert_frame_equal(schema.read_results(tmp_path / "results.parquet"), frame)
    ok = frame[frame["status"] == "ok"].set_index("provider")
    # sdpa takes one length for all, which the second case has not.
    assert sorted(ok.index) == ["reference", "reference", "sdpa", "triton", "triton"]
    assert (ok["plan_us"].notna() == (ok.index == "triton")).all()
    for name in ("ms_p20", "ms_p50", "ms_p80", "launch_us", "gbps", "tflops", "pct_roof"):
        assert (ok[name] > 0).all(), name
    assert (ok["worst_row"] < 0.01).all()
    assert set(ok["mode"] + " " + ok["l2"]) == {"eager warm"}
    others = frame[frame["status"] != "ok"]
    assert set(others["status"]) == {"unsupported"}
    assert others["reason"].notna().all()
    assert others[["ms_p20", "ms_p50", "ms_p80", "plan_us", "launch_us"]].isna().all().all()
    # Figures of a table that agree with each other.
    ours = frame[frame["provider"] == "triton"].iloc[0]
    assert ours["gbps"] == pytest.approx((2 * 48 * 2 + 2 * 2 * 4) * 32 / ours["ms_p50"] / 1e6)
    assert ours["pct_roof"] == pytest.approx(100 * ours["gbps"] / ours["roof_read_gbps"])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Provider]:
    """Register nothing for good, and begin with providers that cost nothing."""
    real = providers.all_providers()
    chosen = {
        "good": Provider("good", "peer", frozenset({"decode"}), right),
        "torch": real["torch"],
    }
    monkeypatch.setattr(markdown, "overview", lambda frame: "")
    monkeypatch.setattr(providers, "_providers", chosen)
    return chosen


def test_a_wrong_row_is_an_exit_status(known: dict[str, Provider], tmp_path: Path) -> None:
    def wrong(step: Step) -> Prepared:
        return Prepared(lambda layer: lambda: layer.out.zero_())

    def failing(step: Step) -> Prepared:
        raise RuntimeError("it broke")

    def full(step: Step) -> Prepared:
        raise torch.OutOfMemoryError("too large")

    kinds = frozenset({"decode"})
    for name, prepare in (("wrong", wrong), ("failing", failing), ("full", full)):
        providers.register(Provider(name, "peer", kinds, prepare))
    only = ["--suite", "decode", "--only", "2x1x24"]
    for name, status in (("good", 0), ("wrong", 1), ("failing", 1), ("full", 1), ("torch", 0)):
        out = str(tmp_path / name)
        assert command(*only, "--providers", name, "--out", out) == status, name
        # It is still so when the rows are there already.
        assert command(*only, "--providers", name, "--out", out) == status, name
    out = str(tmp_path / "two")
    assert command(*only, "--providers", "good", "wrong", "--out", out) == cli.FAILED
    assert schema.read_results(Path(out))["status"].tolist() == ["wrong", "ok"]


def test_a_provider_named_twice_is_one(known: dict[str, Provider], tmp_path: Path) -> None:
    args = ["--providers", "torch", "good", "torch", "--out", str(tmp_path), "--only", "2x1x24"]
    assert command(*args) == cli.OK
    assert sorted(schema.read_results(tmp_path)["provider"]) == ["good", "torch"]


def test_a_budget_on_the_command_line(known: dict[str, Provider], tmp_path: Path) -> None:
    args = ["--providers", "good", "--out", str(tmp_path)]
    command(*args, "--budget", "0")
    assert set(schema.read_results(tmp_path)["status"]) == {"not run"}
    assert command(*args, "--budget", "1e6") == cli.OK
    assert schema.read_results(tmp_path)["status"].tolist() == ["ok", "ok"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--providers", "good", "fastest", "best"], "there is no provider best, fastest: known "
         "are good, torch"),
        (["--only", "64x1"], "no case has '64x1' in its name"),
        (["--mode", "graph"], "none of the cases can be measured on cpu .* graph cold, graph warm"),
        (["--l2", "cold"], "none of the cases can be measured on cpu"),
        (["--plugin", "no_such_module"], "a module of providers cannot be used: No module named"),
        (["--plugin", "twice"], "a provider named 'good' is registered already"),
        (["--cases", "none.yaml"], "none.yaml"),
        (["--cases", "bad.json"], "bad.json: op must be one of .* got 'decoding'"),
        (["--cases", "bad.yaml"], "bad.yaml cannot be read"),
        (["--out", "bad.json"], "results cannot go to bad.json"),
        (["--out", "foreign"], "lacks the columns .* --fresh drops it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(
    known: dict[str, Provider],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("twice.py").write_text(
        textwrap.dedent("""
        from tritonattn.perf.providers import Provider, register
        register(Provider("good", "peer", frozenset(), print))
    """)
    )
    Path("bad.json").write_text('[{"op": "decoding", "model": "tiny", "lengths": "1x1x1"}]')
    Path("bad.yaml").write_text("- {op: [")
    Path("foreign").mkdir()
    Path("foreign/results.csv").write_text("a,b\n1,2\n")
    assert command(*args) == cli.USAGE
    words = words_of(capsys)
    assert pd.Series([words]).str.contains(said).all(), words
    assert Path("foreign/results.csv").read_text() == "a,b\n1,2\n"


def test_another_environment_on_the_command_line(
    known: dict[str, Provider],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--providers", "good", "--out", str(tmp_path)]
    assert command(*args) == cli.OK
    monkeypatch.setenv("TRITONATTN_COMMIT", "another")
    assert command(*args) == cli.USAGE
    assert "measured with git_commit 0123456789ab, here it is another" in words_of(capsys)
    assert command(*args, "--fresh") == cli.OK


@pytest.mark.parametrize(
    "args", [["--suite", "nothing"], ["--suite", "host", "--cases", "x"], ["--budget", "much"],
             ["--mode", "fast"], ["--l2", "hot"], ["--providers"]],
)  # fmt: skip
def test_wrong_arguments(args: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(*args)
    assert stop.value.code == cli.USAGE


def test_the_folder_is_named_after_the_suite(
    known: dict[str, Provider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("--suite", "host", "--providers", "good") == cli.OK
    assert len(schema.read_results(Path("sweeps/host"))) == 1


def test_the_chosen_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Events, streams and graphs are of the current device: times of another are no times.
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    parser = argparse.ArgumentParser()
    sweep_module.add_arguments(parser)
    for name, expected in (("cuda:1", [torch.device("cuda:1")]), ("cuda", []), ("cpu", [])):
        chosen.clear()
        made = sweep_module._settings(parser.parse_args(["--device", name]))
        assert chosen == expected
        assert made.device == torch.device(name)


class TestLostGpu:
    """A process whose GPU is lost hands over to a new one."""

    @pytest.fixture(autouse=True)
    def lost(self, known: dict[str, Provider], monkeypatch: pytest.MonkeyPatch) -> None:
        def synchronize(device: torch.device) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        def breaking(step: Step) -> Prepared:
            raise RuntimeError("an illegal memory access was encountered")

        providers.register(Provider("breaking", "peer", frozenset({"decode"}), breaking))
        monkeypatch.setattr(measure, "synchronize", synchronize)

    def test_in_a_program(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["--providers", "breaking", "good", "--out", str(tmp_path)]
        assert command(*args) == cli.FAILED
        assert "the GPU was lost (an illegal memory access" in words_of(capsys)
        frame = schema.read_results(tmp_path)
        assert frame["provider"].tolist() == ["breaking"]
        assert frame["status"].tolist() == ["failed"]

    def test_from_the_shell(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[tuple[str, list[str]]] = []

        def execv(program: str, words: list[str]) -> None:
            started.append((program, words))

        args = ["sweep", "--providers", "breaking", "good", "--out", str(tmp_path)]
        monkeypatch.setattr(os, "execv", execv)
        monkeypatch.setattr(sys, "argv", ["tritonattn", *args, "--fresh", "--device", "cpu"])
        cli.main()
        again = [sys.executable, "-m", "tritonattn", *args, "--device", "cpu"]
        assert started == [(sys.executable, again)]
        # Each process goes further than the one before it, until all is done.
        for _ in range(5):
            started.clear()
            monkeypatch.setattr(sys, "argv", ["tritonattn", *again[3:]])
            status = cli.main()
            if not started:
                break
        assert status == cli.FAILED, "there are failed rows"
        frame = schema.read_results(tmp_path)
        assert len(frame) == len(set(keys(frame))) == 4
        assert sorted(frame["status"]) == ["failed", "failed", "ok", "ok"]
        assert frame["run_id"].nunique() == 1

    def test_a_step_that_loses_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def make_step(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("unspecified launch failure")

        monkeypatch.setattr(measure, "make_step", make_step)
        assert command("--out", str(tmp_path)) == cli.FAILED
        frame = schema.read_results(tmp_path)
        # A row for each provider of the first case, and no case after it.
        assert sorted(frame["provider"]) == ["breaking", "good"]
        assert set(frame["status"]) == {"failed"}
        assert frame["reason"].str.endswith("unspecified launch failure").all()
