"""`tritonattn diff` on the CPU: what it prints, writes, dumps, replays, and that it can fail."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from tritonattn import cli
from tritonattn.cases import AttentionCase, make_inputs
from tritonattn.diff import FRAME_SCHEMA, dump_case
from tritonattn.diff import grid as diff_grid


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    diff_grid.add_arguments(parser)
    return diff_grid.run(parser.parse_args(["--device", "cpu", *options]))


def test_grids_cover_the_page_sizes_and_both_forms() -> None:
    for name in diff_grid.GRIDS:
        cases = diff_grid.grid(name)
        assert {case.page_size for case in cases} == {1, 8, 16, 64}
        assert {case.kv_layout for case in cases} == {"NHD", "HND"}
        assert {case.table for case in cases} == {"dense", "csr"}
        assert len({str(case) for case in cases}) == len(cases)
    with pytest.raises(ValueError, match="grid must be one of"):
        diff_grid.grid("nothing")


def test_a_right_backend_passes_and_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"--csv": tmp_path / "diff.csv", "--json": tmp_path / "diff.json"}
    options = [str(part) for pair in files.items() for part in pair]
    assert run("--grid", "decode", "prefill", "--page-size", "5", *options) == 0
    printed = capsys.readouterr().out
    assert "12 comparisons, 0 failed" in printed
    frame = pd.read_csv(files["--csv"])
    assert list(frame.columns) == list(FRAME_SCHEMA)
    assert frame["passed"].all()
    assert [row["name"] for row in json.loads(files["--json"].read_text())] == list(frame["name"])


def test_a_wrong_backend_fails_names_the_side_and_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = diff_grid.paged_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out, lse = right(*args, **kwargs)
        out[3, 1, 2] += 0.5
        return out, lse

    monkeypatch.setattr(diff_grid, "paged_attention", wrong)
    options = ["--grid", "prefill", "--page-size", "8", "--dtype", "fp16"]
    assert run(*options, "--dump", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    assert "6 comparisons, 3 failed" in printed
    assert "actual is wrong" in printed
    dumped = sorted(tmp_path.iterdir())
    assert len(dumped) == 3
    assert run("--replay", str(dumped[0])) == 1
    monkeypatch.setattr(diff_grid, "paged_attention", right)
    assert run("--replay", str(dumped[0])) == 0


def test_replayed_inputs_are_the_same(tmp_path: Path) -> None:
    case = AttentionCase((1, 5), (9, 20), storage="interleaved", table="csr")
    inputs = make_inputs(case)
    diff_grid._dump(tmp_path, "one case", inputs)
    arguments = argparse.Namespace(replay=next(tmp_path.iterdir()))
    [(name, loaded)] = list(diff_grid._calls(arguments, "cpu"))
    assert name == "one case"
    for field in dataclasses.fields(inputs):
        before, after = getattr(inputs, field.name), getattr(loaded, field.name)
        if isinstance(before, torch.Tensor):
            assert before.stride() == after.stride()
            torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)
    assert loaded.table.keys() == inputs.table.keys()


@pytest.fixture
def no_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a case runs: what is wrong with the arguments is to be found before."""
    monkeypatch.setattr(diff_grid, "diff_inputs", lambda *args: pytest.fail("a case ran"))


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Run the whole command line; return the line that it ends in."""
    assert cli.main(["diff", "--device", "cpu", "--quick", *options]) == cli.USAGE
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err.removesuffix("\n")


@pytest.mark.parametrize("size", ["0", "-8", "1.5", "x"])
def test_a_wrong_page_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["diff", f"--page-size={size}"])
    assert stop.value.code == cli.USAGE
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tritonattn diff: error: argument --page-size: must be a number of tokens, at least 1, "
        f"got '{size}'"
    )


@pytest.mark.usefixtures("no_case_runs")
def test_a_file_that_is_no_case_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.pt"
    expected = f"tritonattn diff: --replay: cannot read {missing}: No such file or directory"
    assert refusal(capsys, "--replay", str(missing)) == expected
    assert "Is a directory" in refusal(capsys, "--replay", str(tmp_path))
    case = tmp_path / "case.pt"
    dump_case(case, name="other", q=torch.zeros(2))
    junk = {
        "empty": b"",
        "text": b"not a case\n",
        "bytes": bytes(range(256)) * 4,
        "cut": case.read_bytes()[:400],
    }
    for name, content in junk.items():
        file = tmp_path / name
        file.write_bytes(content)
        assert "--replay must name a file that --dump" in refusal(capsys, "--replay", str(file))
    assert "has ['name', 'q']" in refusal(capsys, "--replay", str(case))
    torch.save({"weights": torch.zeros(2)}, case)
    assert f"--replay: {case} is not a case file" in refusal(capsys, "--replay", str(case))


@pytest.mark.usefixtures("no_case_runs")
@pytest.mark.parametrize("option", ["--csv", "--json"])
def test_a_file_that_cannot_be_written_is_refused_first(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "none"
    assert refusal(capsys, option, str(folder / "x")).endswith(f"there is no folder {folder}")
    assert f"must name a file, got the folder {tmp_path}" in refusal(capsys, option, str(tmp_path))
    folder.write_text("a file")
    assert f"--dump must name a folder, got the file {folder}" in refusal(
        capsys, "--dump", str(folder)
    )


@pytest.mark.usefixtures("no_case_runs")
@pytest.mark.parametrize("option", ["--backend", "--against"])
def test_a_backend_that_refuses_is_named_first(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, option, "flashinfer") == (
        f"tritonattn diff: {option} flashinfer: the flashinfer backend needs CUDA tensors, got "
        "device cpu"
    )
