"""The tables in the documents are those of the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tritonattn.perf import load, report, schema

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    "peers-h200": "performance.md",
    "blockops-h200": "performance_blockops.md",
    "host-h200": "performance_host.md",
    "policy-h200": "performance_policy.md",
}


def test_every_result_is_in_a_document() -> None:
    assert sorted(path.name for path in (ROOT / "perf/results").iterdir()) == sorted(DOCUMENTS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_what_the_report_prints(name: str) -> None:
    frames = load.read_sweeps([ROOT / "perf/results" / name])
    assert report.markdown(frames) == (ROOT / "docs" / DOCUMENTS[name]).read_text()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_results_say_where_they_were_measured_and_are_right(name: str) -> None:
    for frame in load.read_sweeps([ROOT / "perf/results" / name]):
        for column in ("gpu", "driver", "torch", "triton", "python", "git_commit"):
            assert frame[column].nunique(dropna=False) == 1
            assert frame[column].notna().all()
        assert set(frame["status"]) <= {schema.OK, schema.UNSUPPORTED}
        assert frame.loc[frame["status"] == schema.OK, "ms_p50"].notna().all()


def test_claims_about_peers_rest_on_three_sweeps() -> None:
    frames = load.read_sweeps([ROOT / "perf/results/peers-h200"])
    assert len({frame["run_id"].iloc[0] for frame in frames}) == 3
