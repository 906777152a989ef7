"""Measure how far two tensors are apart, and how far each is from an fp64 oracle.

Pure torch, any device, one pass over chunks of rows, so a large tensor never needs a full fp64
copy. Two units of error are used:

- *ULP distance* between actual and expected: how many representable numbers lie between them, in
  the coarser of the two dtypes. It says whether two results are neighbours, but near zero it is
  huge for errors that do not matter.
- *Row ulps* of each side against the oracle: the absolute error divided by ``eps * scale``, where
  ``scale`` is the largest ``|oracle|`` of the element's row (its last dimension: one token of one
  head). It is free of dtype and of magnitude, so one bound holds for all tensors, and a long
  request whose outputs average out to little is not hidden by a short one beside it.

One rule for NaN and inf everywhere: both NaN, or the same inf, agree and are left out of the
averages; anything else counts as an infinite error, so no statistic can look good by omission.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

HISTOGRAM_BUCKETS = 16  # 0, [1, 2), [2, 4), ..., [2^13, 2^14), and 2^14 or more
# Rows whose oracle lies further below the largest than this are judged as if they were that
# large: what is left after cancellation carries the rounding of what cancelled.
_ROW_FLOOR = 2.0**-8
_CHUNK_ELEMENTS = 1 << 18
_INT64_MAX = torch.iinfo(torch.int64).max
_SAME_SIZE_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, frozen=True)
class OracleError:
    """Error of one side against the fp64 oracle."""

    max_abs: float
    rms_abs: float
    max_ulps: float  # in row ulps
    rms_ulps: float  # in row ulps
    nonfinite_mismatch: int  # positions that disagree with the oracle on NaN or inf


@dataclass(slots=True, frozen=True)
class Measurement:
    """Everything `measure` finds, before any judgement."""

    max_abs: float
    mean_abs: float
    rms_rel: float
    max_ulp: float
    mismatch_count: int
    nan_mismatch: int
    inf_mismatch: int
    worst: int | None  # flat index of the largest difference, None when there are no elements
    ulp_histogram: tuple[int, ...]
    actual_error: OracleError | None
    expected_error: OracleError | None


def eps_of(dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number of a dtype; 0 for integers (exact)."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger rounding step."""
    return a if eps_of(a) >= eps_of(b) else b


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the number of steps between two tensors of one dtype, int64.

    Counts representable numbers, across zero as well (+0 and -0 are the same one). Saturates at
    the largest int64, which only fp64 values of opposite sign can reach. Integers: ``|a - b|``.
    The result is meaningless where either side is NaN.
    """
    if not a.dtype.is_floating_point:
        distance = (a.to(torch.int64) - b.to(torch.int64)).abs()
        return torch.where(distance < 0, _INT64_MAX, distance)
    as_int = _SAME_SIZE_INT[a.element_size()]
    mask = torch.iinfo(as_int).max
    bits_a, bits_b = a.view(as_int).to(torch.int64), b.view(as_int).to(torch.int64)
    # Sign and magnitude: the magnitude bits of IEEE numbers are ordered like their values.
    size_a, size_b = bits_a & mask, bits_b & mask
    same_sign = (bits_a < 0) == (bits_b < 0)
    distance = torch.where(same_sign, (size_a - size_b).abs(), size_a + size_b)
    return torch.where(distance < 0, _INT64_MAX, distance)


def difference(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return (|x - y| in fp64, True where both are finite).

    The difference is 0 where both are NaN or the same inf, and inf where they disagree on that.
    """
    if not (x.dtype.is_floating_point or y.dtype.is_floating_point):
        # int64 subtraction: fp64 cannot tell apart neighbours above 2^53.
        return ulp_distance(x, y).to(torch.float64), torch.ones_like(x, dtype=torch.bool)
    x, y = x.to(torch.float64), y.to(torch.float64)
    finite = x.isfinite() & y.isfinite()
    agree = (x == y) | (x.isnan() & y.isnan())
    error = torch.where(finite, (x - y).abs(), torch.where(agree, 0.0, math.inf))
    return error, finite


def measure(
    actual: Tensor,
    expected: Tensor,
    oracle: Tensor | None,
    *,
    atol: float,
    rtol: float,
    lse: bool = False,
) -> Measurement:
    """Measure two tensors of one shape against each other, and both against an oracle.

    Parameters
    ----------
    actual, expected, oracle : Tensor
        Of one shape. Any float, integer or bool dtype, any strides, any device (chunks are moved
        to the device of ``actual``).
    atol, rtol : float
        An element mismatches when ``|actual - expected| > atol + rtol * |expected|``.
    lse : bool
        Logarithms: every element is its own row, with a scale of at least 1.
    """
    dtype = coarser(actual.dtype, expected.dtype)
    by_row = actual.dim() >= 2 and not lse
    width = actual.shape[-1] if by_row else 1
    pair, sides = _PairSum(), (_SideSum(), _SideSum())
    floor = 0.0
    if oracle is not None:
        largest = _largest_finite(oracle)
        # A vector without rows is one row: its scale is the largest element.
        floor = largest if actual.dim() < 2 and not lse else largest * _ROW_FLOOR
        floor = max(floor, 1.0) if lse else floor
    tensors = [actual, expected] if oracle is None else [actual, expected, oracle]
    for chunks in _row_chunks(tensors, width):
        pair.add(chunks[0], chunks[1], dtype, atol, rtol)
        if oracle is not None:
            unit = _row_ulp(chunks[2], dtype, floor)
            sides[0].add(chunks[0], chunks[2], unit)
            sides[1].add(chunks[1], chunks[2], unit)
    return Measurement(
        max_abs=pair.error.largest,
        mean_abs=pair.error.mean,
        rms_rel=_ratio(pair.error.rms, pair.expected.rms),
        max_ulp=pair.max_ulp,
        mismatch_count=pair.mismatches,
        nan_mismatch=pair.nan_mismatch,
        inf_mismatch=pair.inf_mismatch,
        worst=pair.worst,
        ulp_histogram=tuple(pair.histogram),
        actual_error=None if oracle is None else sides[0].result(),
        expected_error=None if oracle is None else sides[1].result(),
    )


@dataclass(slots=True)
class _Spread:
    """Running count, maximum, sum and sum of squares of a non-negative quantity."""

    count: int = 0
    largest: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor, count: int) -> None:
        """Add values; ``count`` of them matter, the others are zero."""
        self.count += count
        self.largest = max(self.largest, values.max().item())
        self.total += values.sum().item()
        self.squares += values.square().sum().item()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class _PairSum:
    """What `measure` gathers about actual against expected."""

    error: _Spread = field(default_factory=_Spread)
    expected: _Spread = field(default_factory=_Spread)
    seen: int = 0
    worst: int | None = None
    max_ulp: float = 0.0
    mismatches: int = 0
    nan_mismatch: int = 0
    inf_mismatch: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BUCKETS)

    def add(
        self, actual: Tensor, expected: Tensor, dtype: torch.dtype, atol: float, rtol: float
    ) -> None:
        error, finite = difference(actual, expected)
        differ = ~finite & (error > 0)
        peak = int(error.argmax())  # the first one among equals
        if self.worst is None or error.view(-1)[peak].item() > self.error.largest:
            self.worst = self.seen + peak
        self.seen += error.numel()
        self.error.add(error, int((finite | differ).sum()))

        actual64, expected64 = actual.to(torch.float64), expected.to(torch.float64)
        size = torch.where(expected64.isfinite(), expected64.abs(), 0.0)
        self.expected.add(size, int(expected64.isfinite().sum()))
        # Not `error > limit`: a NaN limit has to count as a mismatch.
        self.mismatches += int((~(error <= atol + rtol * size)).sum())
        one_nan = actual64.isnan() ^ expected64.isnan()
        self.nan_mismatch += int(one_nan.sum())
        self.inf_mismatch += int((differ & ~one_nan).sum())

        ulps = ulp_distance(actual.to(dtype), expected.to(dtype)).to(torch.float64)
        ulps = torch.where(finite, ulps, torch.where(differ, math.inf, 0.0))
        self.max_ulp = max(self.max_ulp, ulps.max().item())
        top = HISTOGRAM_BUCKETS - 1
        # frexp's exponent is 0 for 0, 1 for 1, 2 for 2..3, and so on: the bucket itself.
        bucket = torch.frexp(ulps.clamp(max=2.0**top)).exponent.clamp(max=top)
        counts = torch.bincount(bucket.reshape(-1), minlength=HISTOGRAM_BUCKETS).tolist()
        self.histogram = [old + new for old, new in zip(self.histogram, counts, strict=True)]


@dataclass(slots=True)
class _SideSum:
    """What `measure` gathers about one side against the oracle."""

    absolute: _Spread = field(default_factory=_Spread)
    ulps: _Spread = field(default_factory=_Spread)
    nonfinite: int = 0

    def add(self, side: Tensor, oracle: Tensor, unit: Tensor) -> None:
        error, finite = difference(side, oracle)
        differ = ~finite & (error > 0)
        count = int((finite | differ).sum())
        self.nonfinite += int(differ.sum())
        self.absolute.add(error, count)
        self.ulps.add(error / unit, count)

    def result(self) -> OracleError:
        return OracleError(
            max_abs=self.absolute.largest,
            rms_abs=self.absolute.rms,
            max_ulps=self.ulps.largest,
            rms_ulps=self.ulps.rms,
            nonfinite_mismatch=self.nonfinite,
        )


def _row_chunks(tensors: list[Tensor], width: int) -> Iterator[list[Tensor]]:
    """Yield matching ``[rows, width]`` chunks of tensors of one shape, on the first's device."""
    if tensors[0].numel() == 0:
        return
    flat = [tensor.detach().reshape(-1, width) for tensor in tensors]
    step = max(1, _CHUNK_ELEMENTS // width)
    device = tensors[0].device
    for start in range(0, flat[0].shape[0], step):
        # Contiguous, so that the order of the sums does not depend on the strides of the input.
        yield [rows[start : start + step].to(device).contiguous() for rows in flat]


def _largest_finite(oracle: Tensor) -> float:
    """Return the largest finite ``|oracle|``, 0 when there is none."""
    largest = 0.0
    for (rows,) in _row_chunks([oracle], 1):
        size = rows.to(torch.float64).abs()
        largest = max(largest, torch.where(size.isfinite(), size, 0.0).max().item())
    return largest


def _row_ulp(oracle: Tensor, dtype: torch.dtype, floor: float) -> Tensor:
    """Return ``eps * scale`` of each row of the oracle ``[rows, width]``, as ``[rows, 1]``."""
    size = oracle.to(torch.float64).abs()
    scale = torch.where(size.isfinite(), size, 0.0).amax(-1, keepdim=True).clamp(min=floor)
    eps = eps_of(dtype)
    if eps == 0.0:  # integers: plain differences
        return torch.ones_like(scale)
    # The smallest subnormal is the smallest step there is; 1e-300 keeps fp64 clear of 1 / 0.
    return (eps * scale).clamp(min=max(torch.finfo(dtype).smallest_normal * eps, 1e-300))


def _ratio(error: float, size: float) -> float:
    """Return error / size, where no error at all is 0 whatever the size."""
    if error == 0.0:
        return 0.0
    return error / size if size else math.inf
