"""Compare numbers: ours, a second implementation's, and the fp64 oracle's.

`comparison` judges two tensors, `report` is what it returns, `numerics` measures in chunks; `grid`
is the `tritonattn diff` command, `case_file` saves and loads the inputs of a case.
"""

from tritonattn.diff.case_file import dump_case, load_case
from tritonattn.diff.comparison import compare
from tritonattn.diff.numerics import OracleError
from tritonattn.diff.report import (
    FRAME_SCHEMA,
    VERDICTS,
    DiffReport,
    Tolerance,
    WorstElement,
    reports_to_frame,
)

__all__ = [
    "FRAME_SCHEMA",
    "VERDICTS",
    "DiffReport",
    "OracleError",
    "Tolerance",
    "WorstElement",
    "compare",
    "dump_case",
    "load_case",
    "reports_to_frame",
]
