"""The table of the sweeps: its columns, and rows on their way to disk and back."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn.perf import schema

# Others read these files: a change here is a decision.
COLUMNS = [
    "run_id", "timestamp", "suite", "op", "case", "model", "num_qo_heads", "num_kv_heads",
    "head_dim", "lengths", "batch_size", "total_q", "total_kv", "max_q_len", "max_kv_len",
    "page_size", "kv_layout", "dtype", "causal", "features", "provider", "role", "mode", "l2",
    "status", "reason", "ms_p20", "ms_p50", "ms_p80", "effort", "n", "calls", "plan_us",
    "launch_us", "gbps", "tflops", "pct_roof", "rms_rel", "worst_row", "roof_copy_gbps",
    "roof_read_gbps",
    "roof_matmul_tflops", "device", "gpu", "sm", "driver", "cuda", "torch", "triton",
    "flashinfer", "vllm", "tritonattn", "python", "git_commit", "git_dirty",
]  # fmt: skip
PROMISED = [
    "op", "case", "page_size", "provider", "mode", "l2", "status", "reason", "ms_p20", "ms_p50",
    "ms_p80", "plan_us", "launch_us", "gbps", "tflops", "pct_roof",
]  # fmt: skip

ROW: dict[str, Any] = {
    "run_id": "0123abcd4567", "case": "decode-tiny-3x1xcycle(1,7,16)-p8-NHD-bf16",
    "provider": "triton", "mode": "eager", "l2": "warm", "status": "failed", "reason": "NA",
    "num_qo_heads": 32, "ms_p50": 0.1 + 0.2, "causal": True, "git_dirty": False, "features": None,
}  # fmt: skip


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / schema.RESULTS_CSV
    for row in rows:
        schema.append_row(path, row)
    return path


def test_columns() -> None:
    assert list(schema.COLUMNS) == COLUMNS
    assert set(PROMISED) <= set(schema.COLUMNS)
    assert set(schema.KEY) | set(schema.ENVIRONMENT) <= set(schema.COLUMNS)
    assert set(schema.COLUMNS.values()) == {"string", "Int64", "Float64", "boolean"}


def test_empty_frame() -> None:
    frame = schema.empty_frame()
    assert len(frame) == 0
    assert frame.dtypes.astype("string").to_dict() == schema.COLUMNS
    pd.testing.assert_frame_equal(frame, schema.to_frame([]))


def test_round_trip(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"reason": "None", "causal": None, "git_dirty": True, "n": 2**53 + 1},
        ROW | {"reason": 'says "no", twice\\', "ms_p50": 5e-324, "gbps": math.inf},
        ROW | {"reason": "nan", "provider": "-", "ms_p50": None, "features": "w4095-cap50.0"},
        ROW
        | {"reason": "Überlauf: µs < 0; a=b", "causal": False, "ms_p50": 1.7976931348623157e308},
    ]
    frame = schema.read_results(written(tmp_path, *rows))
    assert frame.dtypes.astype("string").to_dict() == schema.COLUMNS
    for name in schema.COLUMNS:
        expected = [row.get(name) for row in rows]
        assert [None if value is pd.NA else value for value in frame[name]] == expected, name

    schema.write_results(tmp_path, frame)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.parquet"]
    for again in (tmp_path, tmp_path / "results.csv", tmp_path / "results.parquet"):
        pd.testing.assert_frame_equal(schema.read_results(again), frame)
    # Rows may follow those that were written at once.
    schema.append_row(tmp_path / schema.RESULTS_CSV, ROW)
    assert len(schema.read_results(tmp_path)) == len(rows) + 1
    assert schema.read_results(tmp_path)["ms_p50"].iloc[-1] == 0.30000000000000004


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False), min_size=1, max_size=20))
def test_floats_come_back_bit_for_bit(
    values: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("floats")
    frame = schema.read_results(written(folder, *({"ms_p50": value} for value in values)))
    schema.write_results(folder, frame)
    for path in (folder / schema.RESULTS_CSV, folder / schema.RESULTS_PARQUET):
        read = schema.read_results(path)["ms_p50"]
        assert [struct.pack("d", x) for x in read] == [struct.pack("d", x) for x in values]


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_reason_is_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.mktemp("text"), {"reason": text, "status": "failed"}, ROW)
    assert path.read_bytes().count(b"\n") == 3
    frame = schema.read_results(path)
    expected = " ".join(text.split())  # spaces and line ends are one space, an empty text is none
    assert frame["reason"].fillna("").tolist() == [expected, "NA"]
    assert frame["status"].tolist() == ["failed", "failed"]


def test_nan_is_missing(tmp_path: Path) -> None:
    frame = schema.read_results(written(tmp_path, ROW | {"worst_row": math.nan}))
    assert frame["worst_row"].isna().tolist() == [True]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path, ROW, ROW | {"reason": 'a "quoted", long cell'})
    data = path.read_bytes()
    second = data.rfind(b"\n", 0, -1) + 1
    cell = data.index(b'"a ""quoted"", long cell"', second)
    whole = schema.read_results(path).head(1)
    for end in [*range(second, len(data), 29), *range(cell, cell + 24, 5), len(data) - 1]:
        path.write_bytes(data[:end])
        # A report may be asked for before the sweep is resumed.
        pd.testing.assert_frame_equal(schema.read_results(path), whole)
        schema.drop_torn_line(path)
        assert path.read_bytes() == data[:second]
    path.write_bytes(data)
    schema.drop_torn_line(path)
    assert path.read_bytes() == data


def test_torn_header(tmp_path: Path) -> None:
    path = tmp_path / schema.RESULTS_CSV
    path.write_text("run_id,timest")
    schema.drop_torn_line(path)
    assert path.read_bytes() == b""
    schema.append_row(path, ROW)
    assert schema.read_results(path)["reason"].tolist() == ["NA"]


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"columns \['ms', 'what'\], which the schema lacks"):
        schema.to_frame([ROW, ROW | {"what": 1, "ms": 2}])
    path = written(tmp_path, ROW)
    with pytest.raises(ValueError, match="what"):
        schema.append_row(path, ROW | {"what": 1})
    assert len(schema.read_results(path)) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("other.csv", b"a,b\n1,2\n", "lacks the columns"),
        ("half.csv", ",".join(COLUMNS[:-1]).encode() + b"\n", r"lacks the columns \['git_dirty'\]"),
        ("empty.csv", b"", "is not a sweep's table"),
        ("binary.csv", bytes(range(256)) + b"\n", "."),
        ("ragged.csv", b"a,b\n1,2\n1,2,3\n", "is not a sweep's table"),
        ("other.parquet", b"PAR2 and so on", "is not a sweep's table"),
    ],
)
def test_foreign_tables_are_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        schema.read_results(path)
    assert str(path) in str(error.value)


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there are no results at .*results\.csv"):
        schema.read_results(tmp_path)


def test_columns_in_another_order(tmp_path: Path) -> None:
    path = written(tmp_path, ROW)
    frame = schema.read_results(path)
    frame[COLUMNS[::-1]].assign(more=1).to_csv(path, index=False)
    pd.testing.assert_frame_equal(schema.read_results(path), frame)
