"""The one table of every sweep: its columns, and how rows get onto disk and back.

A row is one provider on one case in one mode, warm or cold, and says of itself where it was
measured. `results.csv` grows row by row, so a killed sweep loses nothing; `results.parquet` is the
same table, written when a sweep ends.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

RESULTS_CSV = "results.csv"
RESULTS_PARQUET = "results.parquet"

OK = "ok"
WRONG = "wrong"  # the output is not the oracle's
UNSUPPORTED = "unsupported"  # the provider says that it does not take the case, or is not installed
FAILED = "failed"  # it raised
OUT_OF_MEMORY = "out of memory"
NOT_RUN = "not run"  # the time budget was spent: the next run in the same folder measures it
STATUSES = (OK, WRONG, UNSUPPORTED, FAILED, OUT_OF_MEMORY, NOT_RUN)

# What a row measures: unique together within one sweep.
KEY = ("case", "provider", "mode", "l2")

# What must be equal for rows to be compared as times.
ENVIRONMENT: dict[str, str] = {
    "device": "string",  # cuda, or interpreter: its times say nothing about a GPU
    "gpu": "string",
    "sm": "string",  # compute capability, "9.0"
    "driver": "string",
    "cuda": "string",
    "torch": "string",
    "triton": "string",
    "flashinfer": "string",
    "vllm": "string",
    "tritonattn": "string",
    "python": "string",
    "git_commit": "string",
    "git_dirty": "boolean",  # the checkout had changes that are not in the commit
}

COLUMNS: dict[str, str] = {
    "run_id": "string",  # one per sweep, kept when it is resumed
    "timestamp": "string",  # UTC, ISO 8601
    "suite": "string",
    "op": "string",  # decode, prefill, mixed, speculative, block_copy, host
    "case": "string",  # unique for the whole parameter set
    "model": "string",  # name of the shape
    "num_qo_heads": "Int64",
    "num_kv_heads": "Int64",
    "head_dim": "Int64",
    "lengths": "string",  # requests x query tokens x key tokens, or a distribution with its seed
    "batch_size": "Int64",  # requests
    "total_q": "Int64",  # tokens
    "total_kv": "Int64",  # tokens
    "max_q_len": "Int64",  # tokens
    "max_kv_len": "Int64",  # tokens
    "page_size": "Int64",  # tokens
    "kv_layout": "string",
    "dtype": "string",
    "causal": "boolean",
    "features": "string",  # window and the like, empty if there are none
    "provider": "string",
    "role": "string",  # ours, peer, ceiling (not paged: a bound, no peer) or oracle
    "mode": "string",  # eager or graph
    "l2": "string",  # warm: one buffer set; cold: as many as never fit the L2 cache together
    "status": "string",
    "reason": "string",  # why the status is not ok
    "ms_p20": "Float64",  # per call
    "ms_p50": "Float64",
    "ms_p80": "Float64",
    "effort": "string",  # full or quick
    "n": "Int64",  # samples
    "calls": "Int64",  # in a sample, one after the other
    "plan_us": "Float64",  # one plan, until its results are on the device
    "launch_us": "Float64",  # one eager call, until it returns
    "gbps": "Float64",  # GB/s of K, V, q and out, each once
    "tflops": "Float64",  # 4 * heads * head_dim per query-key pair that the mask keeps
    "pct_roof": "Float64",  # the time that the nearer roof allows, in percent of ms_p50
    "rms_rel": "Float64",  # error against fp64 over all elements
    "worst_row": "Float64",  # the same of the worst row (one token of one head)
    "roof_copy_gbps": "Float64",  # measured in the same process: bytes read and written
    "roof_read_gbps": "Float64",
    "roof_matmul_tflops": "Float64",
    **ENVIRONMENT,
}


def empty_frame() -> pd.DataFrame:
    """Return a table without rows."""
    return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in COLUMNS.items()})


def to_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a table; a column that a row lacks is missing there.

    Raises
    ------
    ValueError
        If a row has a column that the schema lacks.
    """
    for row in rows:
        unknown = sorted(set(row) - set(COLUMNS))
        if unknown:
            raise ValueError(f"a row has the columns {unknown}, which the schema lacks")
    return pd.DataFrame(list(rows), columns=list(COLUMNS)).astype(COLUMNS)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a CSV file and see it onto the disk; a new file starts with the header."""
    line = io.StringIO()
    writer = csv.DictWriter(line, fieldnames=list(COLUMNS), lineterminator="\n")
    new = not path.exists() or path.stat().st_size == 0
    if new:
        writer.writeheader()
    writer.writerow({name: _cell(value) for name, value in row.items()})
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(line.getvalue())
        file.flush()
        os.fsync(file.fileno())


def _cell(value: Any) -> Any:
    # One row is one line, so that what a killed writer left behind can be told from a row.
    return " ".join(value.split()) if isinstance(value, str) else value


def drop_torn_line(path: Path) -> None:
    """Cut off what a killed writer left behind the last complete row."""
    data = path.read_bytes()
    complete = _complete_lines(data)
    if complete != data:
        path.write_bytes(complete)


def _complete_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def read_results(path: Path) -> pd.DataFrame:
    """Read a table.

    Parameters
    ----------
    path : Path
        A `.csv` or `.parquet` file, or a folder with `results.csv`.

    Raises
    ------
    ValueError
        If there is no such table, or it is one of another schema.
    """
    path = path / RESULTS_CSV if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there are no results at {path}")
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except ValueError as error:  # of pandas and pyarrow alike
        raise ValueError(f"{path} is not a sweep's table: {error}") from error
    absent = [name for name in COLUMNS if name not in frame]
    if absent:
        raise ValueError(f"{path} lacks the columns {absent}: it is not a sweep's table")
    frame = frame[list(COLUMNS)]
    booleans = [name for name, dtype in COLUMNS.items() if dtype == "boolean"]
    frame = frame.assign(
        **{name: frame[name].map({"True": True, "False": False, True: True, False: False})
           for name in booleans}
    )  # fmt: skip
    return frame.astype(COLUMNS)


def _read_csv(path: Path) -> pd.DataFrame:
    # A reason may read "NA" or "None"; only the empty cell is missing.
    return pd.read_csv(
        io.BytesIO(_complete_lines(path.read_bytes())),
        dtype="string",
        keep_default_na=False,
        na_values=[""],
    )


def write_results(folder: Path, frame: pd.DataFrame) -> None:
    """Write `results.csv` and `results.parquet`, each in one step."""
    for name, write in ((RESULTS_CSV, _write_csv), (RESULTS_PARQUET, _write_parquet)):
        fresh = folder / f".{name}"
        write(frame, fresh)
        fresh.replace(folder / name)


def _write_csv(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False)


def _write_parquet(frame: pd.DataFrame, path: Path) -> None:
    frame.to_parquet(path, index=False)
