"""`compare`: its numbers on examples computed by hand, ULP distances, NaN and inf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn import diff
from tritonattn.diff import compare
from tritonattn.diff.numerics import ulp_distance

INF, NAN = math.inf, math.nan
FLOATS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def attention_like(seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """Return (oracle, its rounding) of shape [total_q 12, num_qo_heads 4, head_dim 16]."""
    generator = torch.Generator().manual_seed(seed)
    oracle = torch.randn(12, 4, 16, generator=generator, dtype=torch.float64)
    return oracle, oracle.to(dtype)


def test_numbers_of_a_hand_computed_pair():
    actual, expected = f32(1.0, 2.0, -3.5, 0.0), f32(1.0, 2.5, -3.0, 0.0)
    report = compare(actual, expected, name="hand")
    assert report.name == "hand"
    assert (report.shape, report.expected_shape) == ((4,), (4,))
    assert (report.dtype, report.expected_dtype) == ("float32", "float32")
    assert report.numel == 4
    assert report.max_abs == 0.5
    assert report.mean_abs == 0.25
    # RMS of (0, 0.5, 0.5, 0) over RMS of (1, 2.5, 3, 0)
    assert report.rms_rel == pytest.approx(math.sqrt(0.5 / 16.25), rel=1e-14)
    # Both steps of 0.5 lie in [2, 4), where a float32 step is 2^-22.
    assert report.max_ulp == 2.0**21
    assert (report.mismatch_count, report.mismatch_fraction) == (2, 0.5)
    assert (report.nan_mismatch, report.inf_mismatch) == (0, 0)
    assert report.worst is not None
    assert (report.worst.index, report.worst.actual, report.worst.expected) == ((1,), 2.0, 2.5)
    assert report.worst.oracle is None
    assert report.actual_error is None
    assert report.allowed_max_ulps is None
    assert not report.passed
    assert report.verdict == "unknown (no oracle)"
    assert "2 of 4 elements" in report.reason


def test_errors_against_the_oracle_by_hand():
    # One row; its largest |oracle| is 4, so a row ulp of bf16 (eps 2^-7) is 2^-5.
    oracle = f64(4.0, 1.0, -2.0, 0.0).reshape(1, 1, 4)
    actual = torch.tensor([4.0, 1.0625, -2.0, 0.0], dtype=torch.bfloat16).reshape(1, 1, 4)
    expected = torch.tensor([4.03125, 1.0, -2.0, 0.0], dtype=torch.bfloat16).reshape(1, 1, 4)
    report = compare(actual, expected, oracle)
    assert report.actual_error == diff.OracleError(
        max_abs=0.0625, rms_abs=0.03125, max_ulps=2.0, rms_ulps=1.0, nonfinite_mismatch=0
    )
    assert report.expected_error == diff.OracleError(
        max_abs=0.03125, rms_abs=0.015625, max_ulps=1.0, rms_ulps=0.5, nonfinite_mismatch=0
    )
    assert report.allowed_max_ulps == 2 * 1.0 + 1.0
    assert report.allowed_rms_ulps == pytest.approx(2 * 0.5 + 1 / math.sqrt(12))
    assert report.passed
    assert report.verdict == "agree"


def test_each_row_has_its_own_scale_down_to_a_floor():
    # Rows of scale 1, 2^-4 and 0; the floor is 2^-8.
    oracle = torch.tensor([[1.0, 0.5], [2.0**-4, 0.0], [0.0, 0.0]], dtype=torch.float64)
    eps = 2.0**-10
    actual = oracle + torch.tensor([[eps, 0], [0, 2.0**-4 * eps], [2.0**-8 * eps, 0]])
    found = compare(actual.half(), oracle.half(), oracle).actual_error
    assert found is not None
    assert found.max_ulps == 1.0
    assert found.rms_ulps == pytest.approx(math.sqrt(3 / 6))


def test_an_error_in_a_small_row_is_not_hidden_by_a_large_one():
    oracle, expected = attention_like()
    oracle, expected = oracle.clone(), expected.clone()
    oracle[3:] /= 64
    expected[3:] /= 64
    actual = expected.clone()
    actual[7] *= 1.05
    assert (actual[7] - expected[7]).abs().max() < 0.01 * oracle.abs().max()
    report = compare(actual, expected, oracle)
    assert (report.passed, report.verdict) == (False, "actual is wrong")


def test_a_vector_is_one_row():
    oracle = f64(1.0, 1e-6)
    found = compare(f32(1.0, 1e-6 + 2.0**-23), oracle.float(), oracle).actual_error
    assert found is not None
    assert found.max_ulps == pytest.approx(1.0, rel=1e-3)


def test_lse_is_judged_at_a_scale_of_at_least_one():
    oracle = torch.tensor([[1e-3, -40.0]], dtype=torch.float64)
    actual = (oracle + torch.tensor([[2.0**-22, 0.0]])).float()
    plain = compare(actual, oracle.float(), oracle.clone().fill_(1e-3), lse=False)
    as_lse = compare(actual, oracle.float(), oracle, lse=True)
    assert as_lse.actual_error is not None
    assert as_lse.actual_error.max_ulps == pytest.approx(2.0, rel=1e-3)
    assert as_lse.passed
    assert not plain.passed


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_differences_and_a_zero_expected(dtype):
    zero = torch.zeros(2, 3, dtype=dtype)
    report = compare(zero, -zero, zero.double())
    assert (report.max_abs, report.rms_rel, report.max_ulp, report.verdict) == (0, 0, 0, "agree")
    off = zero.clone()
    off[1, 1] = 1.0
    report = compare(off, zero, zero.double())
    assert (report.max_abs, report.rms_rel, report.mismatch_count) == (1.0, INF, 1)
    assert report.verdict == "actual is wrong"


def test_integers_and_bools_are_compared_exactly():
    big = torch.tensor([2**60, 5], dtype=torch.int64)
    report = compare(big + torch.tensor([1, 0]), big)
    assert (report.max_abs, report.max_ulp, report.mismatch_count) == (1.0, 1.0, 1)
    assert not report.passed
    mask = torch.tensor([True, False, True])
    assert compare(mask, mask).passed
    assert compare(mask, ~mask).mismatch_count == 3
    small = torch.tensor([3, 4], dtype=torch.int32)
    assert compare(small, small + 1, small.double()).verdict == "expected is wrong"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_neighbours_are_one_ulp_apart(dtype):
    one = torch.ones(3, 5).to(dtype)
    up = (one.view(torch.uint8) + 1).view(dtype)
    report = compare(up, one)
    assert report.max_ulp == 1.0
    assert report.max_abs == torch.finfo(dtype).eps
    nan = torch.full((3, 5), NAN).to(dtype)
    assert compare(nan, one).nan_mismatch == 15


def as_values(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(bits, dtype=FLOATS[dtype]).view(dtype)


@st.composite
def finite_pairs(draw):
    dtype = draw(st.sampled_from(sorted(FLOATS, key=str)))
    width = torch.iinfo(FLOATS[dtype])
    bits = st.integers(width.min, width.max)
    pair = as_values([draw(bits), draw(bits)], dtype)
    return torch.where(pair.isfinite(), pair, 1.0).unbind()


@settings(max_examples=200, deadline=None)
@given(finite_pairs())
def test_ulp_distance_is_symmetric_and_zero_only_for_equals(pair):
    a, b = pair
    distance = ulp_distance(a, b)
    assert distance == ulp_distance(b, a)
    assert distance >= 0
    assert (distance == 0) == (a == b)  # == takes +0 for -0, as the distance does
    assert compare(a, b).max_ulp == float(distance)


@settings(max_examples=200, deadline=None)
@given(finite_pairs())
def test_adjacent_floats_differ_by_one(pair):
    a, _ = pair
    up = torch.nextafter(a, torch.tensor(INF, dtype=a.dtype))
    if up.isfinite():
        assert ulp_distance(a, up) == 1


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FLOATS, key=str)), st.integers(0, 1000), st.integers(0, 1000))
def test_ulp_distance_counts_through_zero(dtype, above, below):
    a = as_values([above], dtype)
    b = -as_values([below], dtype)
    assert ulp_distance(a, b).item() == above + below


def test_ulp_distance_saturates():
    largest = torch.finfo(torch.float64).max
    assert ulp_distance(f64(largest), f64(-largest)).item() == torch.iinfo(torch.int64).max


def test_max_ulp_is_in_the_coarser_dtype():
    expected = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    report = compare(f32(1.0 + 2**-7, 2.0 + 2**-20), expected)
    assert report.max_ulp == 1.0  # bf16 steps: 1 and 0
    assert (report.tolerance.atol, report.tolerance.rtol) == (1e-2, 1e-2)


@pytest.mark.parametrize(
    ("a", "e", "nan", "inf"),
    [
        (NAN, NAN, 0, 0),
        (INF, INF, 0, 0),
        (-INF, -INF, 0, 0),
        (NAN, 1.0, 1, 0),
        (1.0, NAN, 1, 0),
        (INF, 1.0, 0, 1),
        (1.0, -INF, 0, 1),
        (INF, -INF, 0, 1),
        (NAN, INF, 1, 0),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_inf_agreement(a, e, nan, inf, dtype):
    actual = torch.tensor([2.0, a, 4.0], dtype=dtype)
    expected = torch.tensor([2.0, e, 4.0], dtype=dtype)
    report = compare(actual, expected)
    assert (report.nan_mismatch, report.inf_mismatch) == (nan, inf)
    agree = nan + inf == 0
    assert report.passed == agree
    assert report.mismatch_count == nan + inf
    for value in (report.max_abs, report.mean_abs, report.rms_rel, report.max_ulp):
        assert value == (0.0 if agree else INF)
    if not agree:
        assert report.worst is not None
        assert report.worst.index == (1,)


def test_agreeing_infs_are_left_out_of_the_averages():
    report = compare(f32(1.0, -INF, 3.0), f32(1.5, -INF, 3.0))
    assert report.mean_abs == 0.25
    assert report.rms_rel == pytest.approx(math.sqrt((0.25 / 2) / (11.25 / 2)))
