"""Compare two results of one computation, and say which of them is wrong.

``compare(actual, expected, oracle)`` returns a `DiffReport`. ``expected`` is a second
implementation of the same thing (FlashInfer, or torch in the same dtype), itself possibly wrong;
``oracle`` is the fp64 result, which decides.

With an oracle the bounds come from the data. A side's error against the oracle is measured in
*row ulps*: ``|side - oracle| / (eps(dtype) * scale)``, with ``scale`` the largest ``|oracle|`` of
the element's row (its last dimension, so one token of one head; at least 1/256 of the largest row;
for ``lse=True`` the element itself, at least 1). A side on its own is

    wrong when it disagrees with the oracle on NaN or inf, or its maximum or RMS error is above
    ``wrong_max`` / ``wrong_rms`` row ulps (16 / 2 for dtypes that accumulate in fp32, 512 / 64 for
    fp32 and fp64, whose logits carry the same rounding as the result).

Tiled attention emulated in torch over 1 to 16,000 random keys stays below 1 / 0.2 row ulps in bf16
and fp16, and plain torch below 200 / 15 in fp32 (logits up to about 100). When ``expected`` is
right by this rule, ``actual`` has to keep up with it:

    max error <= 2 * (expected's max error) + band_max, and the same for the RMS.

The band is one rounding of the result: 1 row ulp, RMS 1/sqrt(12). In fp32 and fp64 it is 8 / 2,
because the order of the sums is then visible too. Integers have no rounding: every bound is 0, and
the unit 1. When ``expected`` is wrong, ``actual`` is judged on its own: ``passed`` is about
``actual`` only.

What this cannot see: one key too many or too few among tens of thousands, which in bf16 is less
than a rounding (among 4,000 it is still seen). And a tensor whose rows all cancel to about zero
has no scale to judge by: give it an ordinary row.

Without an oracle the rule is ``|actual - expected| <= atol + rtol * |expected|`` from a table per
dtype. It is weaker: it knows nothing of the size of the sums, and cannot tell which side is wrong.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tritonattn.diff.numerics import HISTOGRAM_BUCKETS, Measurement, OracleError, coarser, measure
from tritonattn.diff.report import (
    ACTUAL_WRONG,
    AGREE,
    BOTH_WRONG,
    EXPECTED_WRONG,
    UNKNOWN,
    DiffReport,
    Tolerance,
    WorstElement,
)


def compare(
    actual: Tensor,
    expected: Tensor,
    oracle: Tensor | None = None,
    *,
    name: str = "",
    qo_indptr: Tensor | Sequence[int] | None = None,
    lse: bool = False,
    tolerance: Tolerance | None = None,
) -> DiffReport:
    """Compare a result with a second implementation's, and both with an fp64 oracle.

    Reads values on the host, so it synchronizes; inputs stay untouched. Shapes or dtypes that
    differ make a failed report, not an exception.

    Parameters
    ----------
    actual : Tensor, shape [total_q, num_qo_heads, head_dim], or LSE [total_q, num_qo_heads]
        The result to judge. Any other shape works too, 0-d included, and any strides.
    expected : Tensor, same shape and dtype
        A second implementation's result. Not the rounded oracle: with that, ``actual`` would be
        allowed two roundings and nothing for its sums.
    oracle : Tensor, same shape, dtype float64, optional
        The true result. A narrower dtype is accepted, and limits what can be seen.
    name : str
        Title of the report.
    qo_indptr : Tensor or sequence of int, shape [batch + 1], optional
        Names the request of the worst element; dimension 0 is then tokens, whatever the rank.
    lse : bool
        The tensors are log-sum-exp values: an absolute error is a relative error of the sum, so
        the scale of an element is at least 1.
    tolerance : Tolerance, optional
        Default ``Tolerance.of`` the coarser dtype.

    Returns
    -------
    DiffReport
        ``passed`` says whether ``actual`` is right, ``verdict`` which side is not.
    """
    _check_arguments(actual, expected, oracle, tolerance)
    indptr = None if qo_indptr is None else _checked_indptr(qo_indptr)
    tol = tolerance or Tolerance.of(coarser(actual.dtype, expected.dtype))
    problem = _shape_problem(actual, expected, oracle)
    if problem is not None:
        found = _nothing_measured(max(actual.numel(), expected.numel()))
        verdict, reason = problem
        return _report(name, actual, expected, found, None, tol, False, verdict, reason)

    found = measure(actual, expected, oracle, atol=tol.atol, rtol=tol.rtol, lse=lse)
    passed, verdict, reason = _judge(found, tol, actual.numel())
    if actual.dtype != expected.dtype:
        verdict = UNKNOWN if oracle is None else verdict
        dtypes = f"actual {_dtype_name(actual)}, expected {_dtype_name(expected)}"
        passed, reason = False, f"dtypes differ: {dtypes}; of the values, {reason}"
    worst = _worst_element(found.worst, actual, expected, oracle, indptr)
    return _report(name, actual, expected, found, worst, tol, passed, verdict, reason)


def _check_arguments(
    actual: Tensor, expected: Tensor, oracle: Tensor | None, tolerance: Tolerance | None
) -> None:
    for label, tensor in (("actual", actual), ("expected", expected), ("oracle", oracle)):
        if tensor is None and label == "oracle":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{label} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype.is_complex:
            raise TypeError(f"{label} must be of a real dtype, got {_dtype_name(tensor)}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance, got {type(tolerance).__name__}")


def _checked_indptr(qo_indptr: Tensor | Sequence[int]) -> list[int]:
    indptr = qo_indptr.tolist() if isinstance(qo_indptr, Tensor) else list(qo_indptr)
    if not isinstance(indptr, list) or not indptr or isinstance(indptr[0], list):
        raise ValueError(f"qo_indptr must be of shape [batch + 1], got {qo_indptr!r}")
    if any(a > b for a, b in pairwise(indptr)):
        raise ValueError(f"qo_indptr must not decrease, got {indptr}")
    return indptr


def _shape_problem(
    actual: Tensor, expected: Tensor, oracle: Tensor | None
) -> tuple[str, str] | None:
    """Return (verdict, reason) when the shapes forbid a comparison."""
    shapes = f"actual {list(actual.shape)}, expected {list(expected.shape)}"
    if oracle is None:
        same = actual.shape == expected.shape
        return None if same else (UNKNOWN, f"shapes differ: {shapes}")
    actual_fits, expected_fits = actual.shape == oracle.shape, expected.shape == oracle.shape
    if actual_fits and expected_fits:
        return None
    reason = f"shapes differ: {shapes}, oracle {list(oracle.shape)}"
    if actual_fits or expected_fits:
        return (EXPECTED_WRONG if actual_fits else ACTUAL_WRONG), reason
    # An oracle that fits neither side decides nothing.
    return UNKNOWN, reason


def _judge(found: Measurement, tol: Tolerance, numel: int) -> tuple[bool, str, str]:
    """Return (passed, verdict, reason) of two tensors of one shape."""
    actual, expected = found.actual_error, found.expected_error
    if numel == 0:
        return True, AGREE, "there are no elements to compare"
    if actual is None or expected is None:
        rule = f"{tol.atol:g} + {tol.rtol:g} x |expected| (no oracle: the weaker rule)"
        if found.mismatch_count == 0:
            return True, AGREE, f"all {numel} elements differ by at most {rule}"
        nonfinite = found.nan_mismatch + found.inf_mismatch
        also = f", {nonfinite} of them in NaN or inf" if nonfinite else ""
        return False, UNKNOWN, f"{found.mismatch_count} of {numel} elements{also} exceed {rule}"
    expected_right = _is_right(expected, tol.wrong_max, tol.wrong_rms)
    allowed_max, allowed_rms = _allowed(found, tol)
    actual_right = _is_right(actual, allowed_max, allowed_rms)
    verdict = {
        (True, True): AGREE,
        (False, True): ACTUAL_WRONG,
        (True, False): EXPECTED_WRONG,
        (False, False): BOTH_WRONG,
    }[actual_right, expected_right]
    reason = _side_reason("actual", actual, allowed_max, allowed_rms)
    if not expected_right:
        reason += "; " + _side_reason("expected", expected, tol.wrong_max, tol.wrong_rms)
    return actual_right, verdict, reason


def _allowed(found: Measurement, tol: Tolerance) -> tuple[float, float]:
    """Return the bounds of actual's error, (maximum, RMS) in row ulps."""
    expected = found.expected_error
    if expected is None or not _is_right(expected, tol.wrong_max, tol.wrong_rms):
        return tol.wrong_max, tol.wrong_rms
    return (
        min(tol.wrong_max, tol.factor * expected.max_ulps + tol.band_max),
        min(tol.wrong_rms, tol.factor * expected.rms_ulps + tol.band_rms),
    )


def _is_right(error: OracleError, allowed_max: float, allowed_rms: float) -> bool:
    return (
        error.nonfinite_mismatch == 0
        and error.max_ulps <= allowed_max
        and error.rms_ulps <= allowed_rms
    )


def _side_reason(side: str, error: OracleError, allowed_max: float, allowed_rms: float) -> str:
    if error.nonfinite_mismatch:
        count = error.nonfinite_mismatch
        return f"{side} disagrees with the oracle on NaN or inf at {count} position(s)"
    word = "within" if _is_right(error, allowed_max, allowed_rms) else "above"
    return (
        f"{side}'s error against the oracle, max {error.max_ulps:.4g} and rms "
        f"{error.rms_ulps:.4g} row ulps, is {word} the allowed {allowed_max:.4g} "
        f"and {allowed_rms:.4g}"
    )


def _worst_element(
    flat: int | None,
    actual: Tensor,
    expected: Tensor,
    oracle: Tensor | None,
    indptr: list[int] | None,
) -> WorstElement | None:
    if flat is None:
        return None
    index: tuple[int, ...] = ()
    for size in reversed(actual.shape):
        flat, last = divmod(flat, size)
        index = (last, *index)
    rank = len(index)
    token = index[0] if rank in (2, 3) or (indptr is not None and rank) else None
    request = offset = None
    if indptr is not None and token is not None and indptr[0] <= token < indptr[-1]:
        # The last request that starts at or before the token: empty ones end before it.
        request = bisect_right(indptr, token) - 1
        offset = token - indptr[request]
    return WorstElement(
        index=index,
        request=request,
        token=token,
        token_in_request=offset,
        head=index[1] if rank in (2, 3) else None,
        dim=index[2] if rank == 3 else None,
        actual=_value(actual, index),
        expected=_value(expected, index),
        oracle=None if oracle is None else _value(oracle, index),
    )


def _value(tensor: Tensor, index: tuple[int, ...]) -> float:
    return float(tensor.detach()[index].to(torch.float64).item())


def _nothing_measured(numel: int) -> Measurement:
    """Return the measurement of tensors that have no common shape: everything is off by inf."""
    return Measurement(
        max_abs=math.inf,
        mean_abs=math.inf,
        rms_rel=math.inf,
        max_ulp=math.inf,
        mismatch_count=numel,
        nan_mismatch=0,
        inf_mismatch=0,
        worst=None,
        ulp_histogram=(*[0] * (HISTOGRAM_BUCKETS - 1), numel),
        actual_error=None,
        expected_error=None,
    )


def _report(
    name: str,
    actual: Tensor,
    expected: Tensor,
    found: Measurement,
    worst: WorstElement | None,
    tol: Tolerance,
    passed: bool,
    verdict: str,
    reason: str,
) -> DiffReport:
    numel = max(actual.numel(), expected.numel())
    allowed = (None, None) if found.actual_error is None else _allowed(found, tol)
    return DiffReport(
        name=name,
        passed=passed,
        verdict=verdict,
        reason=reason,
        shape=tuple(actual.shape),
        expected_shape=tuple(expected.shape),
        dtype=_dtype_name(actual),
        expected_dtype=_dtype_name(expected),
        numel=numel,
        max_abs=found.max_abs,
        mean_abs=found.mean_abs,
        rms_rel=found.rms_rel,
        max_ulp=found.max_ulp,
        mismatch_count=found.mismatch_count,
        mismatch_fraction=found.mismatch_count / numel if numel else 0.0,
        nan_mismatch=found.nan_mismatch,
        inf_mismatch=found.inf_mismatch,
        worst=worst,
        actual_error=found.actual_error,
        expected_error=found.expected_error,
        allowed_max_ulps=allowed[0],
        allowed_rms_ulps=allowed[1],
        tolerance=tol,
        ulp_histogram=found.ulp_histogram,
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
