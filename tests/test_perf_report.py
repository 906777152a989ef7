"""The report as Markdown and its files: what stands where, rounding, escaping, warnings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tritonattn import cli
from tritonattn.perf import plots, report, schema, summary, tables, text

NASTY = 'a|b <script>alert(1)</script> "q" [x](y) `c` *d*'
FACTS = {
    "suite": "peers", "device": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
    "timestamp": "2026-12-01T10:00:00Z", "git_dirty": False, "op": "decode", "model": "llama3-8b",
    "page_size": 16, "kv_layout": "NHD", "dtype": "bf16", "causal": True, "head_dim": 128,
    "batch_size": 1, "total_q": 1, "max_q_len": 1, "roof_copy_gbps": 4245.0,
    "roof_read_gbps": 4478.0, "roof_matmul_tflops": 712.0, "n": 30,
}  # fmt: skip


def row(length: int, provider: str, us: float | None, **more: Any) -> dict[str, Any]:
    """Return a decode row of a length; without a time it is unsupported."""
    role = {"triton": "ours", "sdpa-cudnn": "ceiling"}.get(provider, "peer")
    found = {
        **FACTS, "run_id": "a", "case": f"decode-llama3-8b-1x1x{length}-p16-NHD-bf16",
        "lengths": f"1x1x{length}", "total_kv": length, "max_kv_len": length,
        "provider": provider, "role": role, "mode": "graph", "l2": "cold",
    }  # fmt: skip
    if us is None:
        found |= {"status": "unsupported", "reason": "not installed"}
    else:
        found |= {"status": "ok", "ms_p20": us / 1e3, "ms_p50": us / 1e3, "ms_p80": us / 1e3}
        found |= {"gbps": 4e3 / us, "tflops": 8.0 / us}
    return {**found, **more}


def sweep(run: str = "a", slower: float = 1.0) -> list[dict[str, Any]]:
    rows = []
    for length in (1024, 4096, 16384):
        us = length / 128 * slower
        for l2, more in (("cold", 1.25), ("warm", 1.0)):
            rows += [
                row(length, "triton", us * more * 0.9, l2=l2, plan_us=9.0, launch_us=21.0),
                row(length, "flashinfer-tc", us * more, l2=l2, plan_us=75.0),
                row(length, "fa3", us * more * 1.2, l2=l2),
                row(length, "sdpa-cudnn", us * more * 0.5, l2=l2),
                row(length, "vllm-triton", None, l2=l2),
            ]
    return [{**found, "run_id": run} for found in rows]


def table_under(markdown: str, title: str) -> list[list[str]]:
    """Return the cells of the first table under a title."""
    lines = markdown.split(f"## {title}", 1)[1].split("\n## ")[0].splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]
    return [cells[0], *cells[2:]]


def as_markdown(*runs: list[dict[str, Any]]) -> str:
    return report.markdown([schema.to_frame(rows) for rows in runs])


def test_the_times_of_a_suite():
    head, first, *_ = table_under(as_markdown(sweep()), "decode: µs per call, graph")
    assert head == ["case", "ratio cold", "ratio warm", "triton", "fa3", "flashinfer-tc",
                    "sdpa-cudnn (ceiling)"]  # fmt: skip
    assert first == [
        "llama3-8b 1x1x1024", "0.90", "0.90", "**9.00 / 7.20**", "12.0 / 9.60", "10.0 / 8.00",
        "5.00 / 4.00",
    ]  # fmt: skip


def test_several_sweeps_have_intervals():
    runs = [sweep("a"), sweep("b", 2.0), sweep("c")]
    for found in runs[2]:
        if found["provider"] == "triton":
            found["ms_p50"] *= 1.1  # 0.99 against flashinfer-tc
    shown = as_markdown(*runs)
    assert "median of 3 sweeps [lowest, highest]" in shown
    assert "below 1, ours is faster" in shown
    _, first, *_ = table_under(shown, "decode: µs per call, graph")
    assert first[1] == "0.90 [0.90, 0.99]"
    against = {line[0]: line[1:] for line in table_under(shown, "Geomean of time ours")[1:]}
    assert against["best peer"] == ["0.900 [0.900, 0.990]", "3 of 3"] * 2
    assert against["sdpa-cudnn (ceiling)"] == ["1.800 [1.800, 1.980]", "0 of 3"] * 2
    assert list(against) == [
        "best peer", "best FlashInfer", "fa3", "flashinfer-tc", "sdpa-cudnn (ceiling)",
    ]  # fmt: skip


def test_what_else_is_there():
    shown = as_markdown(sweep())
    assert shown.startswith("# Sweep peers on NVIDIA H200\n")
    assert "gpu NVIDIA H200, torch 2.11.0, triton 3.6.0" in shown
    assert "**Note:**" not in shown
    assert table_under(shown, "Roofs")[1] == ["a", "4245", "4478", "712"]
    assert table_under(shown, "Cost on the host")[1:] == [
        ["decode", "triton", "9.00", "21.0"], ["decode", "flashinfer-tc", "75.0", "–"],  # noqa: RUF001
    ]  # fmt: skip
    assert table_under(shown, "What is missing")[1:] == [
        ["vllm-triton", "unsupported", "not installed", "all decode", "everywhere", "1 of 1"]
    ]
    assert table_under(shown, "Which provider is best") == [
        ["op", "mode", "L2", "triton"], ["decode", "graph", "cold", "3"],
        ["decode", "graph", "warm", "3"],
    ]  # fmt: skip
    worst = table_under(shown, "Worst cells, graph")
    assert len(worst) == 7
    assert worst[1][-1] == "flashinfer-tc"


def test_times_of_the_interpreter_are_marked():
    shown = as_markdown([{**r, "device": "interpreter", "gpu": None} for r in sweep()])
    assert "> **Note:** These are times of Triton's interpreter on a CPU" in shown
    assert "they say nothing about a GPU" in shown
    assert shown.startswith("# Sweep peers on Triton's interpreter\n")


def test_mixed_environments_are_said():
    other = [{**r, "torch": "2.12.0"} for r in sweep("b")]
    assert "different environments: torch 2.11.0 and 2.12.0." in as_markdown(sweep(), other)


def test_names_and_reasons_are_escaped():
    rows = sweep()
    rows[0] = {**rows[0], "case": NASTY, "model": NASTY}
    rows.append(row(1024, NASTY, None, reason=NASTY))
    missing = table_under(as_markdown(rows), "What is missing")
    (line,) = [line for line in missing if line[0] != "provider" and "alert" in line[0]]
    assert len(line) == len(missing[0])
    assert line[0].replace("\\", "") == NASTY.replace("<", "&lt;")
    assert "<script" not in as_markdown(rows)
    assert "[x](y)" not in as_markdown(rows)


@pytest.mark.parametrize(
    "rows",
    [[], [row(1024, "triton", None)], [row(1024, "triton", 1.0)], [row(1024, "fa3", 1.0)]],
    ids=["empty", "no ok row", "ours only", "one peer"],
)
def test_partial_tables_have_a_report(rows: list[dict[str, Any]], tmp_path: Path):
    stacked = summary.combine([schema.to_frame(rows)])
    report.write(stacked, tmp_path)
    shown = (tmp_path / "report.md").read_text()
    assert ("No row has a time" in shown) == all(r["status"] != "ok" for r in rows)
    assert "Geomean" not in shown
    assert "<h1>" in (tmp_path / "report.html").read_text()


def test_ops_without_flops_and_with_host_times_only():
    rows = [
        row(1, "triton", 5.0, op="block_copy", case="copy", tflops=None, l2="warm", model=None),
        row(1, "torch", 6.0, op="block_copy", case="copy", tflops=None, l2="warm", model=None),
        row(1, "triton", None, op="host", case="host", status="ok", plan_us=9.0, launch_us=20.0),
    ]
    shown = as_markdown(rows)
    assert table_under(shown, "block_copy: µs per call, graph")[1] == [
        "1x1x1", "0.83", "**5.00**", "6.00",
    ]  # fmt: skip
    assert ["host", "triton", "9.00", "20.0"] in table_under(shown, "Cost on the host")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00123, "1.23"), (0.0123, "12.3"), (0.999, "999.0"), (1.5, "1500"), (float("nan"), "–")],  # noqa: RUF001
)
def test_microseconds(value: float, shown: str):
    assert text.microseconds(value) == shown


def test_short_names_say_what_differs_and_are_unique():
    base = row(1024, "triton", 1.0)
    rows = [base, {**base, "case": "x", "page_size": 64}, {**base, "case": "y", "causal": False}]
    found = tables.labels(schema.to_frame(rows))
    assert list(found.values()) == ["llama3-8b 1x1x1024 p16", "llama3-8b 1x1x1024 p64",
                                    "llama3-8b 1x1x1024 p16 full"]  # fmt: skip
    twice = schema.to_frame([base, {**base, "case": "other"}])
    assert tables.labels(twice) == {base["case"]: base["case"], "other": "other"}


def test_the_pictures():
    found = {p.name: p for p in plots.draw(summary.combine([schema.to_frame(sweep())]))}
    assert list(found) == [
        "ratio-decode", "latency-decode-llama3-8b-batch-1", "by-length-decode-llama3-8b-batch-1",
        "roofline",
    ]  # fmt: skip
    for picture in found.values():
        assert picture.png.startswith(b"\x89PNG")
        assert picture.svg.startswith("<svg")
        assert plots.INK not in picture.svg
        assert "currentColor" in picture.svg
        ids = set(re.findall(r' id="([^"]*)"', picture.svg))
        assert all(name.startswith(picture.name) for name in ids)
        used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', picture.svg)
        assert {a or b for a, b in used} <= ids
    lines = found["latency-decode-llama3-8b-batch-1"].svg
    assert plots.OURS_COLOR in lines
    for provider in ("triton", "flashinfer-tc", "fa3", "sdpa-cudnn"):
        assert f">{provider}</text>" in lines
    assert ">0.90 / 0.90</text>" in found["ratio-decode"].svg
    assert ">4478 GB/s</text>" in found["roofline"].svg


def test_uneven_lengths_have_no_place_on_a_line():
    rows = [{**r, "total_kv": r["total_kv"] + 1} if "1x1x4096" in r["case"] else r for r in sweep()]
    names = [p.name for p in plots.draw(summary.combine([schema.to_frame(rows)]))]
    assert names == ["ratio-decode", "roofline"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for run in "ab":
        (tmp_path / "runs" / run).mkdir(parents=True)
        schema.write_results(tmp_path / "runs" / run, schema.to_frame(sweep(run)))
    assert cli.main(["report", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "| best peer" in shown
    assert "What is missing" not in shown
    written = {path.name for path in (tmp_path / "runs").iterdir()} - {"a", "b"}
    assert {"report.md", "report.html", "ratio-decode.png", "roofline.png"} <= written
    document = (tmp_path / "runs" / "report.md").read_text()
    for name in re.findall(r"!\[.*\]\((.*)\)", document):
        assert (tmp_path / "runs" / name).read_bytes().startswith(b"\x89PNG")
    assert cli.main(["report", str(tmp_path / "runs" / "a" / "results.csv")]) == 0
    assert (tmp_path / "runs" / "a" / "report.html").is_file()
    one = [str(tmp_path / "runs" / "a"), "--out", str(tmp_path / "new" / "out")]
    assert cli.main(["report", *one]) == 0
    assert (tmp_path / "new" / "out" / "report.md").is_file()


def test_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", str(tmp_path / "absent")]) == cli.USAGE
    assert "no results at" in capsys.readouterr().err


@pytest.mark.parametrize("package", report.PACKAGES)
def test_a_missing_package_is_named(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["report", str(tmp_path)]) == cli.INCOMPLETE
    assert "pip install 'tritonattn[perf]'" in capsys.readouterr().err
