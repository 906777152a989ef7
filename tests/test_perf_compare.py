"""What changed between sweeps beyond the noise, and sweeps of a commit beside the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tritonattn import cli
from tritonattn.perf import commits, compare, load, schema


def row(case: str, ms: float | None, **more: Any) -> dict[str, Any]:
    """Return a row of ours whose p20 and p80 are 0.5 % off its median."""
    found: dict[str, Any] = {
        "run_id": "a", "op": "decode", "case": case, "provider": "triton", "mode": "graph",
        "l2": "cold", "role": "ours", "device": "cuda",
    }  # fmt: skip
    if ms is None:
        return {**found, "status": "unsupported", "reason": "no", **more}
    times = {"ms_p20": ms * 0.995, "ms_p50": ms, "ms_p80": ms * 1.005}
    return {**found, "status": "ok", **times, **more}


def frames(*runs: list[dict[str, Any]]) -> list[pd.DataFrame]:
    return [
        schema.to_frame([{**found, "run_id": f"run {number}"} for found in rows])
        for number, rows in enumerate(runs)
    ]


def verdicts(base: list[pd.DataFrame], new: list[pd.DataFrame]) -> dict[str, str]:
    table = compare.compare(base, new)
    return dict(zip(table["case"], table["verdict"], strict=True))


def test_changes_beyond_the_floor():
    base = frames(*[[row(name, 1.0) for name in "abcde"]] * 3)
    times = (1.03, 0.97, 1.015, 0.99, 1.0)
    new = frames(*[[row(n, ms) for n, ms in zip("abcde", times, strict=True)]] * 3)
    assert verdicts(base, new) == {"a": "slower", "b": "faster", "c": "same", "d": "same",
                                   "e": "same"}  # fmt: skip
    table = compare.compare(base, new).set_index("case")
    assert table.loc["a", "ratio"] == pytest.approx(1.03)
    assert table.loc["a", "noise"] == pytest.approx(0.02)


def test_a_wide_run_hides_a_small_change():
    wide = row("a", 1.0, ms_p20=0.9, ms_p80=1.1)
    assert verdicts(frames([wide]), frames([row("a", 1.18)])) == {"a": "same"}
    assert verdicts(frames([row("a", 1.18)]), frames([wide])) == {"a": "same"}
    assert verdicts(frames([wide]), frames([row("a", 1.22)])) == {"a": "slower"}
    assert compare.compare(frames([wide]), frames([row("a", 1.0)]))["noise"].iat[0] == (
        pytest.approx(0.2)
    )


def test_noise_that_few_runs_do_not_show():
    one, three = frames([row("a", 1.0)]), frames(*[[row("a", 1.0)]] * 3)
    for base in (one, three):
        assert verdicts(base, frames([row("a", 1.14)])) == {"a": "same"}
        assert verdicts(base, frames([row("a", 1.16)])) == {"a": "slower"}
    eager = frames([row("a", 1.0, mode="eager")])
    assert verdicts(eager, frames([row("a", 1.45, mode="eager")])) == {"a": "same"}
    assert verdicts(eager, frames([row("a", 1.55, mode="eager")])) == {"a": "slower"}
    assert verdicts(three, frames(*[[row("a", 1.05)]] * 3)) == {"a": "slower"}


def test_the_range_between_runs_is_noise():
    base = frames([row("a", 1.0)], [row("a", 1.1)], [row("a", 1.05)])
    new = [row("a", 1.12)]
    table = compare.compare(base, frames(new, new, new))
    assert table["ratio"].iat[0] == pytest.approx(1.12 / 1.05)
    assert table["noise"].iat[0] == pytest.approx(0.1 / 1.05)
    assert list(table["verdict"]) == ["same"]
    assert list(table["runs_base"]) == [3]
    assert list(compare.compare(base, frames([row("a", 1.3)]))["verdict"]) == ["slower"]


def test_rows_that_stop_begin_or_are_on_one_side():
    base = frames([row("stops", 1.0), row("begins", None), row("gone", 1.0), row("never", None),
                   row("out of time", 1.0)])  # fmt: skip
    new = frames([row("stops", None), row("begins", 1.0), row("fresh", 1.0), row("never", None),
                  row("out of time", None, status="not run")])  # fmt: skip
    assert verdicts(base, new) == {
        "stops": "stopped being ok", "begins": "began to be ok", "gone": "only in base",
        "fresh": "only in new", "never": "ok in neither", "out of time": "only in base",
    }  # fmt: skip
    table = compare.compare(base, new).set_index("case")
    assert table.loc["stops", "reason_new"] == "no"
    assert pd.isna(table.loc["stops", "ratio"])


def test_failing_in_one_of_several_runs_is_failing():
    good, bad = [row("a", 1.0)], [row("a", None, status="failed")]
    assert verdicts(frames(good, good), frames(good, bad)) == {"a": "stopped being ok"}
    assert verdicts(frames(good, bad), frames(good, good)) == {"a": "began to be ok"}


def test_rows_match_on_the_whole_key():
    rows = [row("a", 1.0), row("a", 2.0, l2="warm"), row("a", 3.0, mode="eager"),
            row("a", 4.0, provider="fa3", role="peer")]  # fmt: skip
    table = compare.compare(frames(rows), frames(list(reversed(rows))))
    assert list(table["verdict"]) == ["same"] * 4
    assert sorted(table["ms_base"]) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("side", ["base", "new", "both"])
def test_empty_sides(side: str):
    some, none = frames([row("a", 1.0)]), [schema.empty_frame()]
    table = compare.compare(none if side != "new" else some, none if side != "base" else some)
    assert list(table["verdict"]) == {
        "base": ["only in new"], "new": ["only in base"], "both": [],
    }[side]  # fmt: skip


def save(folder: Path, *runs: list[dict[str, Any]]) -> str:
    for number, frame in enumerate(frames(*runs)):
        (folder / str(number)).mkdir(parents=True)
        schema.write_results(folder / str(number), frame)
    return str(folder)


def test_the_command_fails_where_something_got_worse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    old = save(tmp_path / "old", [row("a", 1.0, torch="2.11", roof_copy_gbps=4000.0)])
    fast = save(tmp_path / "fast", [row("a", 0.5, torch="2.12", roof_copy_gbps=4200.0)])
    slow = save(tmp_path / "slow", [row("a|b", 1.0), row("a", 1.5)])
    stopped = save(tmp_path / "stopped", [row("a", None)])
    assert cli.main(["compare", old, old]) == cli.OK
    capsys.readouterr()
    assert cli.main(["compare", old, fast]) == cli.OK
    shown = capsys.readouterr().out
    assert "environments differ in torch: 2.11 against 2.12" in shown
    assert "roof_copy_gbps 1.050" in shown
    assert "below 1, new is faster" in shown
    assert "|a|triton|graph|cold|0.500|15.0%|1000|500.0|" in shown.replace(" ", "")
    assert cli.main(["compare", old, slow]) == cli.FAILED
    shown = capsys.readouterr().out
    assert "## slower" in shown
    assert "## only in new" in shown
    assert "a\\|b" in shown
    assert cli.main(["compare", old, stopped]) == cli.FAILED
    assert "unsupported: no" in capsys.readouterr().out


def test_a_slower_peer_counts_too(tmp_path: Path):
    old = save(tmp_path / "old", [row("a", 1.0, provider="fa3", role="peer")])
    new = save(tmp_path / "new", [row("a", 2.0, provider="fa3", role="peer")])
    assert cli.main(["compare", old, new]) == cli.FAILED


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give BASE and NEW, or --commit"),
        (["a"], "give BASE and NEW, or --commit"),
        (["a", "b", "--quick"], "--quick can only be used with --commit"),
        (["a", "b", "--suite", "x", "--out", "y"], "--suite, --out can only be used"),
        (["a", "b", "--commit", "HEAD", "--suite", "x", "--out", "y"], "either BASE and NEW or"),
        (["--commit", "HEAD", "--suite", "x"], "--commit needs --suite NAME and --out DIR"),
        (["--commit", "HEAD", "--out", "x"], "--commit needs --suite NAME and --out DIR"),
        (["--commit", "HEAD", "--suite", "x", "--out", "y", "--repeats", "0"], "at least 1, got 0"),
        (["absent", "absent"], "no results at"),
    ],
)
def test_mixtures_are_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["compare", *argv]) == cli.USAGE
    assert said in capsys.readouterr().err


# Stands for the package at a commit: writes down where and how it was called, and a result.
PACKAGE = """
import os, pathlib, sys
HEAD, ROW, HAS_SWEEP, RESULT = {head!r}, {row!r}, {has_sweep}, {result}
arguments = sys.argv[1:]
if not HAS_SWEEP or arguments[0] != "sweep":
    sys.exit(2)
if arguments[1] == "--help":
    sys.exit(0)
path = os.environ["PYTHONPATH"].split(os.pathsep)[0]
mine = str(pathlib.Path(__file__).parent.parent)
with open({log!r}, "a") as file:
    file.write(f"{{os.getcwd() == path}} {{mine == path}} {{path}} {{arguments[1:-1]}}\\n")
if RESULT:
    out = pathlib.Path(arguments[-1])
    out.mkdir(parents=True)
    (out / "results.csv").write_text(HEAD + ROW)
"""


class Checkout:
    """A git repository with a package that pretends to sweep."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root / "repository", root / "log"
        (self.root / "tritonattn").mkdir(parents=True)
        # A package, so that it wins over the real one further down the path.
        (self.root / "tritonattn" / "__init__.py").touch()
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        command = ["git", "-C", str(self.root), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def write(self, ms: float, has_sweep: bool = True, result: bool = True) -> None:
        csv = schema.to_frame([row("a", ms)]).to_csv(index=False).splitlines(keepends=True)
        text = PACKAGE.format(head=csv[0], row=csv[1], has_sweep=has_sweep, result=result,
                              log=str(self.log))  # fmt: skip
        (self.root / "tritonattn" / "__main__.py").write_text(text)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "c")

    def worktrees(self) -> list[str]:
        listed = self.git("worktree", "list", "--porcelain").splitlines()
        return [line for line in listed if line.startswith("worktree")]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    made = Checkout(tmp_path)
    monkeypatch.setattr(commits, "CHECKOUT", made.root)
    return made


def test_a_commit_and_the_checkout_are_swept_in_turns(
    checkout: Checkout, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    checkout.write(1.0)
    checkout.commit()
    checkout.write(3.0)  # not committed: the checkout as it stands
    argv = ["--suite", "decode", "--quick", "--repeats", "2", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", "--commit", "HEAD", *argv]) == cli.FAILED
    assert "## slower" in capfd.readouterr().out
    calls = [line.split(" ", 3) for line in checkout.log.read_text().splitlines()]
    assert [call[:2] for call in calls] == [["True", "True"]] * 4
    assert [call[2] == str(checkout.root) for call in calls] == [False, True, False, True]
    assert {call[3] for call in calls} == {"['--suite', 'decode', '--quick', '--out']"}
    assert len(load.read_sweeps([tmp_path / "out" / "base"])) == 2
    assert len(checkout.worktrees()) == 1
    assert not Path(calls[0][2]).exists()


@pytest.mark.parametrize(
    ("broken", "said"),
    [({"has_sweep": False}, "HEAD has no command `tritonattn sweep`"),
     ({"result": False}, "the sweep of HEAD left no results")],
    ids=["no sweep", "no results"],
)  # fmt: skip
def test_a_commit_that_cannot_be_swept(
    broken: dict[str, bool], said: str, checkout: Checkout, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    checkout.write(1.0, **broken)
    checkout.commit()
    argv = ["--commit", "HEAD", "--suite", "decode", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", *argv]) == cli.USAGE
    assert said in capsys.readouterr().err
    assert len(checkout.worktrees()) == 1


def test_the_worktree_is_gone_after_an_interrupt(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkout.write(1.0)
    checkout.commit()
    trees = []

    def interrupted(tree: Path, *arguments: Any, **more: Any) -> None:
        assert (tree / "tritonattn" / "__main__.py").is_file()
        trees.append(tree)
        raise KeyboardInterrupt

    monkeypatch.setattr(commits, "_run_in", interrupted)
    argv = ["--commit", "HEAD", "--suite", "decode", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", *argv]) == 130
    assert [tree.exists() for tree in trees] == [False]
    assert len(checkout.worktrees()) == 1


def test_an_unknown_commit_and_no_checkout(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    checkout.write(1.0)
    checkout.commit()
    argv = ["--suite", "decode", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", "--commit", "nothing", *argv]) == cli.USAGE
    assert "'nothing' is no commit of" in capsys.readouterr().err
    monkeypatch.setattr(commits, "CHECKOUT", tmp_path)
    assert cli.main(["compare", "--commit", "HEAD", *argv]) == cli.USAGE
    assert "is no git checkout" in capsys.readouterr().err


def test_commands_are_listed_without_pandas():
    code = (
        "import sys; sys.modules.update(pandas=None, matplotlib=None, pyarrow=None)\n"
        "from tritonattn.cli import main; main(['compare', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--commit REV" in done.stdout
