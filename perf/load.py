"""Results named on a command line, as one table for each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from tritonattn.perf import schema


def read_sweeps(paths: Sequence[Path]) -> list[pd.DataFrame]:
    """Read results.

    Parameters
    ----------
    paths : sequence of Path
        Each a `.csv` or `.parquet` file, a folder with `results.csv`, or a folder of such folders.

    Raises
    ------
    ValueError
        If one holds no results.
    """
    return [schema.read_results(found) for path in paths for found in _results_at(path)]


def _results_at(path: Path) -> list[Path]:
    if not path.is_dir() or (path / schema.RESULTS_CSV).is_file():
        return [path]
    found = sorted(child.parent for child in path.glob(f"*/{schema.RESULTS_CSV}"))
    if not found:
        raise ValueError(
            f"{path} holds no results: neither {schema.RESULTS_CSV} nor folders with one"
        )
    return found
