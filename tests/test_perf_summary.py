"""What is said about sweeps: ratios, geomeans, the best and the worst, what is missing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tritonattn.perf import load, schema, summary

ROLES = {"triton": "ours", "sdpa-cudnn": "ceiling", "reference": "oracle"}


def row(case: str, provider: str, ms: float | None, **more: Any) -> dict[str, Any]:
    """Return a row; without a time it is unsupported."""
    status = {"status": "ok"} if ms is not None else {"status": "unsupported", "reason": "no"}
    return {
        "run_id": "a", "op": "decode", "case": case, "provider": provider, "mode": "graph",
        "l2": "cold", "role": ROLES.get(provider, "peer"), "ms_p50": ms, **status, **more,
    }  # fmt: skip


def sweeps(*frames: list[dict[str, Any]]) -> pd.DataFrame:
    return summary.combine([schema.to_frame(rows) for rows in frames])


def ratio_of(table: pd.DataFrame, against: str, case: str = "c1") -> tuple[float, float, float]:
    (found,) = table[(table["against"] == against) & (table["case"] == case)].to_dict("records")
    return found["ratio"], found["low"], found["high"]


def one_case(run: str, ours: float, **others: float) -> list[dict[str, Any]]:
    names = {"fi": "flashinfer", "tc": "flashinfer-tc", "cudnn": "sdpa-cudnn", "ref": "reference"}
    rows = [row("c1", names.get(name, name), ms, run_id=run) for name, ms in others.items()]
    return [*rows, row("c1", "triton", ours, run_id=run)]


def test_ratios_are_taken_within_a_sweep_before_the_median():
    # The machine is twice as slow in b: medians of times would pair b's ours with a's peer.
    stacked = sweeps(
        one_case("a", 1.0, fa3=2.0),  # 0.5
        one_case("b", 2.4, fa3=4.0),  # 0.6
        one_case("c", 0.9, fa3=1.0),  # 0.9
    )
    table = summary.ratios(summary.sweep_ratios(stacked))
    assert ratio_of(table, "fa3") == pytest.approx((0.6, 0.5, 0.9))
    assert set(table["sweeps"]) == {3}


def test_best_counts_peers_only_and_each_sweep_has_its_own():
    stacked = sweeps(
        one_case("a", 1.0, fa3=2.0, fi=4.0, tc=5.0, cudnn=0.1, ref=0.01),
        one_case("b", 1.0, fa3=5.0, fi=2.5, tc=2.0, cudnn=0.1, ref=0.01),
        one_case("c", 1.0, fa3=1.0, fi=2.0, tc=4.0, cudnn=0.2, ref=0.01),
    )
    table = summary.ratios(summary.sweep_ratios(stacked))
    # fa3 in a and c, flashinfer-tc in b: 1/2, 1/2, 1/1
    assert ratio_of(table, summary.BEST_PEER) == pytest.approx((0.5, 0.5, 1.0))
    assert ratio_of(table, summary.BEST_FLASHINFER) == pytest.approx((0.5, 0.25, 0.5))
    assert ratio_of(table, "sdpa-cudnn") == pytest.approx((10.0, 5.0, 10.0))
    best = table[table["against"] == summary.BEST_PEER]
    assert list(best["provider"]) == ["fa3"]
    assert set(table["against"]) == {
        "fa3", "flashinfer", "flashinfer-tc", "sdpa-cudnn", "best peer", "best FlashInfer",
    }  # fmt: skip


def test_geomeans_by_mode_and_l2_and_by_op():
    stacked = sweeps([
        row("c1", "triton", 1.0), row("c1", "fa3", 2.0),
        row("c2", "triton", 8.0), row("c2", "fa3", 1.0),
        row("c1", "triton", 3.0, l2="warm"), row("c1", "fa3", 1.0, l2="warm"),
        row("p1", "triton", 1.0, op="prefill"), row("p1", "fa3", 4.0, op="prefill"),
        row("p2", "triton", None, op="prefill"), row("p2", "fa3", 4.0, op="prefill"),
    ])  # fmt: skip
    means = summary.geomeans(stacked)
    fa3 = means[means["against"] == "fa3"].set_index("l2")
    assert fa3.loc["cold", "geomean"] == pytest.approx((0.5 * 8 * 0.25) ** (1 / 3))
    assert fa3.loc["warm", "geomean"] == pytest.approx(3.0)
    assert list(fa3.loc["cold", ["rows", "of", "faster"]]) == [3, 4, 2]
    by_op = summary.geomeans(stacked, ("op", "mode", "l2"))
    by_op = by_op[(by_op["against"] == "fa3") & (by_op["l2"] == "cold")].set_index("op")
    assert dict(by_op["geomean"]) == pytest.approx({"decode": 2.0, "prefill": 0.25})
    assert list(by_op.loc["prefill", ["rows", "of"]]) == [1, 2]


def test_geomean_has_an_interval_only_if_every_sweep_has_every_cell():
    whole = [one_case("a", 1.0, fa3=2.0), one_case("b", 1.0, fa3=1.0)]
    found = summary.geomeans(sweeps(*whole)).set_index("against").loc["fa3"]
    assert (found["low"], found["high"]) == pytest.approx((0.5, 1.0))
    whole[1].append(row("c2", "triton", 1.0, run_id="b"))
    whole[1].append(row("c2", "fa3", 1.0, run_id="b"))
    found = summary.geomeans(sweeps(*whole)).set_index("against").loc["fa3"]
    assert found["geomean"] == pytest.approx(math.sqrt(0.75))
    assert math.isnan(found["low"])
    assert math.isnan(found["high"])


def test_the_worst_come_first():
    rows = [row(f"c{n}", "triton", float(n)) for n in (1, 3, 2)]
    rows += [row(f"c{n}", "fa3", 1.0) for n in (1, 3, 2)]
    table = summary.worst(summary.ratios(summary.sweep_ratios(sweeps(rows))), count=2)
    assert list(table["case"]) == ["c3", "c2"]
    assert list(table["ratio"]) == [3.0, 2.0]


def test_best_provider_of_each_cell():
    stacked = sweeps(
        one_case("a", 1.0, fa3=1.1, tc=9.0, cudnn=0.5),
        one_case("b", 2.4, fa3=2.0, tc=9.0, cudnn=0.5),
        one_case("c", 1.0, fa3=1.3, tc=9.0, cudnn=0.5),
    )
    (best,) = summary.best_providers(stacked).to_dict("records")
    assert (best["best"], best["second"]) == ("triton", "fa3")
    # relative to the fastest of the sweep: triton 1, 1.2, 1; fa3 1.1, 1, 1.3
    assert best["margin"] == pytest.approx(1.1)


def test_best_provider_without_a_second():
    (best,) = summary.best_providers(sweeps([row("c1", "triton", 1.0)])).to_dict("records")
    assert best["best"] == "triton"
    assert pd.isna(best["second"])


def test_one_reason_is_one_line():
    rows = [row(f"c{n}", "fa3", None, reason="not installed") for n in range(5)]
    rows += [row(f"c{n}", "fa3", None, reason="not installed", l2="warm") for n in range(5)]
    rows += [row(f"p{n}", "fa3", None, reason="not installed", op="prefill") for n in range(2)]
    rows += [row("p2", "fa3", 1.0, op="prefill")]
    rows += [row("c1", "triton", 1.0), row("c1", "triton", None, mode="eager", status="failed")]
    rows += [row("c2", "triton", 1.0, mode="eager")]
    found = summary.missing(sweeps(rows, [row("c1", "triton", 1.0, run_id="b")]))
    fa3, triton = found.to_dict("records")
    assert (fa3["provider"], fa3["reason"], fa3["where"]) == ("fa3", "not installed", "")
    assert (fa3["ops"], fa3["cases"]) == (("decode",), ("p0", "p1"))
    assert fa3["rows"] == 12
    assert (triton["status"], triton["where"]) == ("failed", "eager cold")
    assert (triton["ops"], triton["cases"]) == ((), ("c1",))
    assert triton["sweeps"] == 1


def test_a_wrong_row_never_counts_even_with_a_time():
    stacked = sweeps([
        row("c1", "triton", 1.0),
        row("c1", "fa3", 0.1, status="wrong", reason="error 0.3"),
        row("c1", "vllm-triton", 2.0),
    ])  # fmt: skip
    table = summary.ratios(summary.sweep_ratios(stacked))
    assert ratio_of(table, summary.BEST_PEER)[0] == pytest.approx(0.5)
    assert "fa3" not in set(table["against"])


def test_cells_are_medians_of_what_is_ok():
    stacked = sweeps(
        [row("c1", "triton", 1.0, gbps=10.0, page_size=16)],
        [row("c1", "triton", None, run_id="b", status="failed", page_size=16)],
        [row("c1", "triton", 2.0, gbps=30.0, run_id="c", page_size=16)],
        [row("c0", "triton", None, run_id="c")],
    )
    first, second = summary.cells(stacked).to_dict("records")
    assert (first["ms_p50"], first["gbps"], first["sweeps"]) == (1.5, 20.0, 2)
    assert (first["status"], first["page_size"]) == ("ok", 16)
    assert (second["status"], second["sweeps"]) == ("unsupported", 0)
    assert pd.isna(second["ms_p50"])


def test_a_row_measured_again_replaces_the_first_and_a_result_given_twice_counts_once():
    frame = [row("c1", "triton", None, status="not run"), row("c1", "triton", 1.0)]
    stacked = sweeps(frame, frame)
    assert list(stacked["status"]) == ["ok"]


def test_results_without_a_run_id_are_sweeps_of_their_own():
    stacked = sweeps(
        [row("c1", "triton", 1.0, run_id=None)], [row("c1", "triton", 2.0, run_id=None)]
    )
    assert stacked["sweep"].nunique() == 2


def test_our_provider():
    assert summary.our_provider(sweeps([row("c1", "fa3", 1.0)])) is None
    rows = [row("c1", name, 1.0, role="ours") for name in ("experiment", "triton")]
    assert summary.our_provider(sweeps(rows[:1])) == "experiment"
    assert summary.our_provider(sweeps(rows)) == "triton"
    # A variant of ours is no peer.
    assert len(summary.sweep_ratios(sweeps(rows))) == 0


def test_graph_is_the_headline_where_it_was_timed():
    graph, eager = row("c1", "triton", None), row("c1", "triton", 1.0, mode="eager")
    assert summary.headline_mode(sweeps([graph, eager])) == "eager"
    assert (
        summary.headline_mode(sweeps([{**graph, "status": "ok", "ms_p50": 1.0}, eager])) == "graph"
    )
    assert summary.l2_states(sweeps([graph, {**graph, "l2": "warm"}])) == ["cold", "warm"]


@pytest.mark.parametrize(
    "rows",
    [[], [row("c1", "fa3", None)], [row("c1", "fa3", 1.0)], [row("c1", "triton", 1.0)],
     [row("c1", "triton", float("nan"), status="ok"), row("c1", "fa3", 1.0)]],
    ids=["empty", "unsupported only", "one peer", "ours only", "ok without a time"],
)  # fmt: skip
def test_tables_without_a_pair_have_no_ratio(rows: list[dict[str, Any]]):
    stacked = sweeps(rows)
    per_sweep = summary.sweep_ratios(stacked)
    assert len(per_sweep) == 0
    assert len(summary.ratios(per_sweep)) == 0
    assert len(summary.geomeans(stacked)) == 0
    assert len(summary.worst(summary.ratios(per_sweep))) == 0
    assert len(summary.cells(stacked)) == len(rows)
    assert len(summary.best_providers(stacked)) == len(summary.timed(stacked))
    assert len(summary.missing(stacked)) == sum(r["status"] != "ok" for r in rows)
    assert len(summary.roofs(stacked)) == 0


def test_host_costs_and_roofs_are_medians():
    rows = [row(f"c{n}", "triton", 1.0, plan_us=float(n), launch_us=2.0 * n) for n in (1, 2, 9)]
    rows = [{**r, "roof_copy_gbps": 4000.0} for r in rows]
    stacked = sweeps(rows, [{**r, "run_id": "b", "roof_copy_gbps": 4100.0} for r in rows])
    (cost,) = summary.host_costs(stacked).to_dict("records")
    assert (cost["plan_us"], cost["launch_us"]) == (2.0, 4.0)
    assert list(summary.roofs(stacked)["roof_copy_gbps"]) == [4000.0, 4100.0]


def test_results_are_found_in_files_folders_and_folders_of_folders(tmp_path: Path):
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        frame = schema.to_frame([row("c1", "triton", 1.0, run_id=run)])
        schema.write_results(tmp_path / "runs" / run, frame)
    runs = tmp_path / "runs"
    found = [
        [frame["run_id"].iat[0] for frame in load.read_sweeps(paths)]
        for paths in ([runs], [runs / "b"], [runs / "b" / "results.csv"],
                      [runs / "a" / "results.parquet", runs / "b"])
    ]  # fmt: skip
    assert found == [["a", "b"], ["b"], ["b"], ["a", "b"]]
    (tmp_path / "nothing").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "absent"):
        with pytest.raises(ValueError, match="results"):
            load.read_sweeps([path])
