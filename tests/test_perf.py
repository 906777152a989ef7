"""Measurements that the documents show are those that are committed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tritonattn.perf import report

FILES = sorted(report.RESULTS.glob("*.csv"))
DOCUMENT = Path(__file__).parents[1] / "docs/performance.md"


def test_there_are_measurements() -> None:
    assert {file.stem for file in FILES} >= {"attention_h200", "block_ops_h200"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_document_shows_the_table_of_a_file(file: Path) -> None:
    assert report.table(file).strip() in DOCUMENT.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_row_says_where_it_was_measured(file: Path) -> None:
    frame = pd.read_csv(file)
    for column in ("gpu", "driver", "torch", "triton", "python"):
        assert frame[column].notna().all()
        assert frame[column].nunique() == 1
