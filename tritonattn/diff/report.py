"""The record of a comparison: its fields, its text, its row of a frame, its dict.

What the numbers mean and how they are judged is told in `tritonattn.diff`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from tritonattn.diff.numerics import OracleError, eps_of

if TYPE_CHECKING:
    import pandas as pd

AGREE = "agree"
ACTUAL_WRONG = "actual is wrong"
EXPECTED_WRONG = "expected is wrong"
BOTH_WRONG = "both are wrong"
UNKNOWN = "unknown (no oracle)"
VERDICTS = (AGREE, ACTUAL_WRONG, EXPECTED_WRONG, BOTH_WRONG, UNKNOWN)

# (atol, rtol) without an oracle. Other floats get one eps for both, integers must be equal.
_ELEMENTWISE = {
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float32: (1e-5, 1e-5),
    torch.float64: (1e-10, 1e-10),
}

# Columns of `DiffReport.to_frame` and their pandas dtypes, in order.
FRAME_SCHEMA = {
    "name": "string",
    "passed": "bool",
    "verdict": "string",
    "reason": "string",
    "shape": "string",
    "expected_shape": "string",
    "dtype": "string",
    "expected_dtype": "string",
    "numel": "int64",
    "max_abs": "float64",
    "mean_abs": "float64",
    "rms_rel": "float64",
    "max_ulp": "float64",
    "mismatch_count": "int64",
    "mismatch_fraction": "float64",
    "nan_mismatch": "int64",
    "inf_mismatch": "int64",
    "worst_index": "string",
    "worst_request": "Int64",
    "worst_token": "Int64",
    "worst_token_in_request": "Int64",
    "worst_head": "Int64",
    "worst_dim": "Int64",
    "worst_actual": "float64",
    "worst_expected": "float64",
    "worst_oracle": "float64",
    "actual_err_max": "float64",
    "actual_err_rms": "float64",
    "actual_err_max_ulps": "float64",
    "actual_err_rms_ulps": "float64",
    "actual_nonfinite_mismatch": "Int64",
    "expected_err_max": "float64",
    "expected_err_rms": "float64",
    "expected_err_max_ulps": "float64",
    "expected_err_rms_ulps": "float64",
    "expected_nonfinite_mismatch": "Int64",
    "allowed_max_ulps": "float64",
    "allowed_rms_ulps": "float64",
    "atol": "float64",
    "rtol": "float64",
    "factor": "float64",
    "band_max": "float64",
    "band_rms": "float64",
    "wrong_max": "float64",
    "wrong_rms": "float64",
}


@dataclass(slots=True, frozen=True)
class Tolerance:
    """Bounds of a comparison; see the module's text for how they are used.

    ``dataclasses.replace(Tolerance.of(torch.bfloat16), factor=3.0)`` changes one of them.
    """

    atol: float  # elementwise; decides only without an oracle, counts mismatches always
    rtol: float  # elementwise
    factor: float  # of expected's error against the oracle
    band_max: float  # row ulps
    band_rms: float  # row ulps
    wrong_max: float  # row ulps
    wrong_rms: float  # row ulps

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerance:
        """Return the default bounds of a dtype."""
        eps = eps_of(dtype)
        atol, rtol = _ELEMENTWISE.get(dtype, (eps, eps))
        if eps == 0.0:
            return cls(atol, rtol, 2.0, band_max=0.0, band_rms=0.0, wrong_max=0.0, wrong_rms=0.0)
        if eps <= eps_of(torch.float32):
            return cls(atol, rtol, 2.0, band_max=8.0, band_rms=2.0, wrong_max=512.0, wrong_rms=64.0)
        return cls(
            atol, rtol, 2.0, band_max=1.0, band_rms=12.0**-0.5, wrong_max=16.0, wrong_rms=2.0
        )


@dataclass(slots=True, frozen=True)
class WorstElement:
    """The element where actual and expected differ most; a NaN or inf disagreement comes first."""

    index: tuple[int, ...]
    request: int | None  # None without qo_indptr, or for a token outside every request
    token: int | None  # row of the whole tensor; None when dimension 0 is not known to be tokens
    token_in_request: int | None
    head: int | None
    dim: int | None
    actual: float
    expected: float
    oracle: float | None

    def place(self) -> str:
        """Return where it is, in words."""
        if self.token is None:
            return f"index {self.index}"
        parts = [f"token {self.token}"]
        if self.request is not None:
            parts = [f"request {self.request}", f"token {self.token_in_request} (row {self.token})"]
        parts += [f"head {self.head}"] if self.head is not None else []
        parts += [f"dim {self.dim}"] if self.dim is not None else []
        return ", ".join(parts)


@dataclass(slots=True, frozen=True)
class DiffReport:
    """What `compare` found.

    Both NaN, or the same inf, agree and are left out of the averages. Any other pair with a NaN or
    inf counts as an infinite error, and so does every element when the shapes differ.
    """

    name: str
    passed: bool  # is actual right?
    verdict: str  # one of VERDICTS
    reason: str  # one sentence
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    dtype: str
    expected_dtype: str
    numel: int
    max_abs: float  # of |actual - expected|
    mean_abs: float
    rms_rel: float  # RMS of the difference / RMS of expected
    max_ulp: float  # whole steps, in the coarser of the two dtypes
    mismatch_count: int  # |actual - expected| > atol + rtol * |expected|
    mismatch_fraction: float
    nan_mismatch: int  # positions where only one side is NaN
    inf_mismatch: int  # positions where only one side is inf, or the signs of the infs differ
    worst: WorstElement | None  # None without elements, or when the shapes differ
    actual_error: OracleError | None  # against the oracle
    expected_error: OracleError | None
    allowed_max_ulps: float | None  # that actual's maximum error was allowed
    allowed_rms_ulps: float | None
    tolerance: Tolerance
    ulp_histogram: tuple[int, ...]  # elements by ULP distance: 0, [1, 2), [2, 4), ..., >= 2^14

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dict that ``json.dumps(..., allow_nan=False)`` accepts.

        Keys are the columns of `to_frame` and ``ulp_histogram``; shapes and index are lists; NaN
        and inf are the strings "nan", "inf" and "-inf"; what was not measured is None.
        """
        row = self._row() | {"ulp_histogram": self.ulp_histogram}
        return {key: _json_safe(value) for key, value in row.items()}

    def to_frame(self) -> pd.DataFrame:
        """Return one row with the columns of `FRAME_SCHEMA`."""
        return reports_to_frame([self])

    def __str__(self) -> str:
        """Return the report as text of several lines."""
        return "\n".join(_text_lines(self))

    def _row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            key: getattr(self, key) for key in FRAME_SCHEMA if hasattr(self, key)
        }
        worst = self.worst
        for key in (key for key in FRAME_SCHEMA if key.startswith("worst_")):
            row[key] = None if worst is None else getattr(worst, key.removeprefix("worst_"))
        for side, error in (("actual", self.actual_error), ("expected", self.expected_error)):
            row[f"{side}_err_max"] = error and error.max_abs
            row[f"{side}_err_rms"] = error and error.rms_abs
            row[f"{side}_err_max_ulps"] = error and error.max_ulps
            row[f"{side}_err_rms_ulps"] = error and error.rms_ulps
            row[f"{side}_nonfinite_mismatch"] = error and error.nonfinite_mismatch
        row |= asdict(self.tolerance)
        return {key: row[key] for key in FRAME_SCHEMA}


def reports_to_frame(reports: Sequence[DiffReport]) -> pd.DataFrame:
    """Return one row a report, with the columns of `FRAME_SCHEMA` (also for no reports)."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ImportError(
            "DiffReport.to_frame needs pandas, which is not installed: "
            "pip install 'tritonattn[perf]'"
        ) from error
    rows = [report._row() for report in reports]
    for row in rows:
        for key in ("shape", "expected_shape", "worst_index"):
            row[key] = None if row[key] is None else str(list(row[key]))
    columns = {
        key: pd.Series([row[key] for row in rows], dtype=dtype)
        for key, dtype in FRAME_SCHEMA.items()
    }
    return pd.DataFrame(columns)


def _json_safe(value: Any) -> Any:
    """Return a value that strict JSON can hold."""
    if isinstance(value, tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf" or "-inf"
    return value


def _text_lines(report: DiffReport) -> list[str]:
    tol = report.tolerance
    lines = [
        f"{report.name or 'diff'}: {'ok' if report.passed else 'FAILED'}, {report.verdict}",
        f"  {report.reason}",
        f"  actual {report.dtype} {list(report.shape)}, "
        f"expected {report.expected_dtype} {list(report.expected_shape)}",
        f"  max_abs {report.max_abs:.4g}, mean_abs {report.mean_abs:.4g}, "
        f"rms_rel {report.rms_rel:.4g}, max_ulp {_whole(report.max_ulp)}",
        f"  mismatches {report.mismatch_count} of {report.numel} "
        f"({100 * report.mismatch_fraction:.3g} %), "
        f"allowed |difference| {tol.atol:g} + {tol.rtol:g} x |expected|",
        f"  disagreements on NaN {report.nan_mismatch}, on inf {report.inf_mismatch}",
    ]
    if report.worst is not None and report.max_abs > 0:
        worst = report.worst
        oracle = "" if worst.oracle is None else f", oracle {worst.oracle:.9g}"
        lines.append(
            f"  worst at {worst.place()}: actual {worst.actual:.9g}, "
            f"expected {worst.expected:.9g}{oracle}"
        )
    lines += _oracle_lines(report)
    return lines + _histogram_lines(report.ulp_histogram)


def _oracle_lines(report: DiffReport) -> list[str]:
    if report.actual_error is None or report.expected_error is None:
        return []
    tol = report.tolerance
    sides = (
        ("actual", report.actual_error, report.allowed_max_ulps, report.allowed_rms_ulps),
        ("expected", report.expected_error, tol.wrong_max, tol.wrong_rms),
    )
    return ["  error against the oracle (row ulps: of eps x the row's largest |oracle|)"] + [
        f"    {label:8} max {error.max_abs:.4g}, rms {error.rms_abs:.4g}; "
        f"row ulps max {error.max_ulps:.4g} (allowed {allowed_max:.4g}), "
        f"rms {error.rms_ulps:.4g} (allowed {allowed_rms:.4g}); "
        f"NaN/inf disagreements {error.nonfinite_mismatch}"
        for label, error, allowed_max, allowed_rms in sides
    ]


def _histogram_lines(counts: Sequence[int]) -> list[str]:
    last = len(counts) - 1
    labels = ["0", "1"] + [f"< 2^{row}" for row in range(2, last)] + [f">= 2^{last - 1}"]
    most = max(*counts, 1)
    # Rounded up, so that a single element among millions still shows.
    bars = ["#" * -(-40 * count // most) for count in counts]
    rows = [
        f"    {label:>7} {count:>12} {bar}".rstrip()
        for label, count, bar in zip(labels, counts, bars, strict=True)
    ]
    return [
        "  elements by |actual - expected| in ulps (last row: NaN/inf disagreements too)",
        *rows,
    ]


def _whole(value: float) -> str:
    return f"{value:.0f}" if value < 1e6 else f"{value:.4g}"
