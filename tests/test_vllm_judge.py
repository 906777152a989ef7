"""The judge of vLLM's engines, by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.integration.vllm_backends import RUNS
from tests.integration.vllm_judge import judge

LOG = "tritonattn serves 30 layers"


def row(*ids: int, gap: float = 3.0, cached: int = 0) -> dict[str, Any]:
    return {"ids": list(ids), "tops": [[i, i + 1, gap] for i in ids], "cached": cached}


def results(**changes: Any) -> dict[str, Any]:
    rows = [row(10 * i, 10 * i + 5, gap=0.1 if i == 3 else 3.0) for i in range(13)]
    facts = [row(7, 8) for _ in range(6)]
    found = {
        "done": True, "rows": rows, "many": copy.deepcopy(rows[1:9] * 32), "facts": facts,
        "facts again": [row(7, 8, cached=1450) for _ in range(6)],
        "twice": [row(1), row(1, cached=3000)],
        "calls": {"build": 5, "forward": 90, "do_kv_cache_update": 90,
                  "long queries in a graph": 3},
        "profile": {"calls": 9, "waits in all": 4, "waits inside": []},
        "transfers": {"to the CPU": 8, "to the GPU": 6},
    }  # fmt: skip
    return copy.deepcopy(found) | changes


def wrong(name: str, found: dict[str, Any], log: str = LOG) -> list[str]:
    return judge(RUNS[name], found, log, results(), results())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_right(name: str) -> None:
    assert wrong(name, results()) == []


def change(index: int, *ids: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results()["rows"]
    rows[index]["ids"] = list(ids)
    return rows


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("custom, FULL", {"done": False}, "did not end"),
        ("custom, FULL", {"rows": change(5, 50, 56)}, "rows 5: at 1 the two best are 3.0 apart"),
        ("custom, FULL", {"rows": change(3, 77, 35)}, "rows 3: token 77 at 0 is none of the two"),
        ("custom, FULL", {"rows": change(5, 50)}, "rows 5: another number of tokens"),
        ("custom, FULL", {"many": []}, "many: 0 answers, expected 256"),
        ("custom, FULL", {"calls": {}}, "forward was not called"),
        ("custom, FULL, chunks", {"calls": {"build": 1, "forward": 1, "do_kv_cache_update": 1}},
         "no graph held a step of several tokens"),
        ("custom, eager", {"profile": {"calls": 9, "waits in all": 0}}, "the profile saw nothing"),
        ("custom, eager", {"profile": {"calls": 9, "waits in all": 1, "waits inside": ["Memcpy"]}},
         "Memcpy inside the backend"),
        ("custom, KV offloading", {"transfers": {"to the GPU": 1}}, "1 transfers from the CPU"),
        ("custom, KV offloading", {"facts again": [row(7, 8) for _ in range(6)]}, "were cached"),
        ("custom, chunks and prefix cache", {"twice": [row(1), row(1)]}, "cache was not used"),
    ],
)  # fmt: skip
def test_runs_that_are_wrong(name: str, changes: dict[str, Any], said: str) -> None:
    (problem,) = [one for one in wrong(name, results(**changes)) if said in one] or [""]
    assert problem


def test_a_near_tie_is_right_and_many_are_not() -> None:
    assert wrong("custom, FULL", results(rows=change(3, 31, 99))) == []
    many = results()["many"]
    for tie in many[2::8]:
        tie["ids"] = [31, 99]
    (problem,) = wrong("custom, FULL", results(many=many))
    assert problem == "32 answers end in near ties, of the control 0"


def test_a_part_that_is_missing_and_a_log_without_our_line() -> None:
    found = results()
    del found["many"]
    assert "no many" in wrong("custom, FULL", found)
    assert "tritonattn's line is not in the log" in wrong("custom, FULL", results(), "vLLM")
