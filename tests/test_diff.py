"""`compare`, its report, and case files: numbers worked out by hand, verdicts, round trips."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonattn import diff
from tritonattn.diff.numerics import _CHUNK_ELEMENTS, ulp_distance
from tritonattn.diff import DiffReport, Tolerance, compare, dump_case, load_case

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


# Numbers


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


# ULP distance


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


# NaN and inf


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


# Verdicts


def shifted(value: torch.Tensor, by: float) -> torch.Tensor:
    moved = value.clone()
    moved[5, 1, 3] += by
    return moved


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("actual_by", "expected_by", "verdict"),
    [
        (0.0, 0.0, "agree"),
        (1.0, 0.0, "actual is wrong"),
        (0.0, 1.0, "expected is wrong"),
        (1.0, 1.0, "both are wrong"),
        (NAN, 0.0, "actual is wrong"),
        (0.0, INF, "expected is wrong"),
        (NAN, NAN, "both are wrong"),
        (-INF, 1.0, "both are wrong"),
    ],
)
def test_verdict_table(dtype, actual_by, expected_by, verdict):
    oracle, rounded = attention_like(dtype=dtype)
    report = compare(shifted(rounded, actual_by), shifted(rounded, expected_by), oracle)
    assert report.verdict == verdict
    assert report.passed == (verdict in ("agree", "expected is wrong"))
    for side, by in (("actual", actual_by), ("expected", expected_by)):
        assert (f"{side} disagrees" in report.reason) == (not math.isfinite(by))


def test_actual_may_be_twice_as_far_off_as_expected_and_a_band():
    oracle, _ = attention_like()
    row_ulp = 2.0**-7 * oracle[5, 1].abs().max().item()
    # fp64 carries the exact errors; the bounds are those of bf16, in row ulps of fp64.
    bf16 = Tolerance.of(torch.bfloat16)
    bounds = {
        key: getattr(bf16, key) * 2.0**45
        for key in ("band_max", "band_rms", "wrong_max", "wrong_rms")
    }
    tolerance = dataclasses.replace(bf16, **bounds)

    def judged(actual_ulps: float, expected_ulps: float) -> DiffReport:
        actual = shifted(oracle, actual_ulps * row_ulp)
        expected = shifted(oracle, expected_ulps * row_ulp)
        return compare(actual, expected, oracle, tolerance=tolerance)

    assert judged(6.9, 3.0).passed
    assert not judged(7.1, 3.0).passed
    assert judged(7.1, 3.0).verdict == "actual is wrong"
    # Expected is wrong beyond 16: it no longer excuses anything.
    assert judged(15.0, 17.0).passed
    assert judged(15.0, 17.0).verdict == "expected is wrong"
    assert judged(16.5, 17.0).verdict == "both are wrong"
    assert not judged(16.5, 1e6).passed


def test_the_rms_is_bounded_too():
    oracle, rounded = attention_like(dtype=torch.float16)
    report = compare((oracle * (1 + 1.2 * 2**-10)).half(), rounded, oracle)
    assert report.actual_error is not None
    assert report.allowed_max_ulps is not None
    assert report.actual_error.max_ulps <= report.allowed_max_ulps
    assert report.actual_error.rms_ulps > report.allowed_rms_ulps
    assert (report.passed, report.verdict) == (False, "actual is wrong")


def test_lse_of_an_empty_row_given_as_a_large_negative_number_is_wrong():
    oracle = torch.tensor([[3.25, 1.5], [-INF, -INF]], dtype=torch.float64)
    actual = oracle.float()
    expected = actual.clone()
    expected[1] = -5e4
    report = compare(actual, expected, oracle, lse=True)
    assert (report.passed, report.verdict) == (True, "expected is wrong")
    assert report.inf_mismatch == 2
    assert report.expected_error is not None
    assert report.expected_error.nonfinite_mismatch == 2
    swapped = compare(expected, actual, oracle, lse=True)
    assert (swapped.passed, swapped.verdict) == (False, "actual is wrong")


def test_lse_in_natural_units_is_wrong():
    oracle = torch.linspace(-30, 30, 24, dtype=torch.float64).reshape(6, 4)
    report = compare((oracle * math.log(2)).float(), oracle.float(), oracle, lse=True)
    assert report.verdict == "actual is wrong"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_of_a_real_attention_agrees(dtype):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 64, generator=generator).to(dtype) for n in (24, 97, 97))
    logits = q.double() @ k.double().T / 8
    oracle = (logits.softmax(-1) @ v.double()).unsqueeze(1)
    same_dtype = (q.float() @ k.float().T / 8).softmax(-1).to(dtype) @ v
    weights = (q.float() @ k.float().T / 8).exp()
    tiled = (weights.to(dtype).float() @ v.float() / weights.sum(-1, keepdim=True)).to(dtype)
    report = compare(tiled.unsqueeze(1), same_dtype.unsqueeze(1), oracle)
    assert (report.passed, report.verdict) == (True, "agree")
    # One key less is far outside the bounds.
    short = logits[:, :-1].softmax(-1) @ v[:-1].double()
    wrong = compare(short.to(dtype).unsqueeze(1), same_dtype.unsqueeze(1), oracle)
    assert wrong.verdict == "actual is wrong"


def test_without_an_oracle_agreement_is_elementwise():
    expected = f32(1.0, 100.0)
    assert compare(expected + f32(1.9e-5, 9e-4), expected).verdict == "agree"
    report = compare(expected + f32(2.2e-5, 0.0), expected)
    assert (report.passed, report.verdict) == (False, "unknown (no oracle)")
    wider = dataclasses.replace(report.tolerance, atol=1e-4)
    assert compare(expected + f32(2.2e-5, 0.0), expected, tolerance=wider).passed


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"),
    [
        (torch.float16, 1e-3, 1e-3),
        (torch.bfloat16, 1e-2, 1e-2),
        (torch.float32, 1e-5, 1e-5),
        (torch.float64, 1e-10, 1e-10),
        (torch.float8_e5m2, 0.25, 0.25),
        (torch.int32, 0.0, 0.0),
    ],
    ids=str,
)
def test_default_elementwise_tolerance(dtype, atol, rtol):
    tolerance = Tolerance.of(dtype)
    assert (tolerance.atol, tolerance.rtol) == (atol, rtol)
    assert compare(torch.ones(2).to(dtype), torch.ones(2).to(dtype)).tolerance == tolerance


# Shapes and dtypes


@pytest.mark.parametrize(
    ("actual", "expected", "oracle", "verdict"),
    [
        ((2, 3), (2, 4), None, "unknown (no oracle)"),
        ((2, 3), (2, 4), (2, 3), "expected is wrong"),
        ((2, 3), (2, 4), (2, 4), "actual is wrong"),
        ((2, 3), (2, 3), (3, 2), "unknown (no oracle)"),
        ((6,), (2, 3), None, "unknown (no oracle)"),
        ((0, 3), (2, 3), None, "unknown (no oracle)"),
    ],
    ids=str,
)
def test_shape_mismatch_is_a_failed_report(actual, expected, oracle, verdict):
    third = None if oracle is None else torch.zeros(oracle, dtype=torch.float64)
    report = compare(torch.zeros(actual), torch.zeros(expected), third)
    assert (report.passed, report.verdict) == (False, verdict)
    assert str(list(actual)) in report.reason
    assert str(list(expected)) in report.reason
    assert report.max_abs == report.max_ulp == INF
    assert report.mismatch_count == report.numel == sum(report.ulp_histogram)
    assert report.mismatch_fraction == 1.0
    assert report.worst is None
    assert report.name in str(report)
    assert report.to_frame().shape == (1, len(diff.FRAME_SCHEMA))


def test_dtype_mismatch_is_a_failed_report_with_measured_values():
    oracle, rounded = attention_like()
    report = compare(rounded, rounded.float(), oracle)
    assert not report.passed
    assert "actual bfloat16, expected float32" in report.reason
    assert (report.max_abs, report.max_ulp, report.verdict) == (0.0, 0.0, "agree")
    assert compare(rounded, rounded.float()).verdict == "unknown (no oracle)"
    assert compare(shifted(rounded, 1.0), rounded.float(), oracle).verdict == "actual is wrong"


@pytest.mark.parametrize("shape", [(0,), (0, 4, 16), (3, 0), (2, 3, 0, 5)], ids=str)
def test_no_elements_pass(shape):
    empty = torch.empty(shape, dtype=torch.bfloat16)
    for oracle in (None, empty.double()):
        report = compare(empty, empty.clone(), oracle)
        assert (report.passed, report.verdict, report.numel) == (True, "agree", 0)
        assert (report.max_abs, report.mismatch_fraction, report.worst) == (0.0, 0.0, None)
        json.dumps(report.to_dict(), allow_nan=False)


def test_scalars():
    report = compare(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(2.0).double())
    assert (report.shape, report.max_abs, report.verdict) == ((), 1.0, "expected is wrong")
    assert report.worst is not None
    assert report.worst.index == ()


def test_strided_inputs_give_the_same_report_and_stay_untouched():
    oracle, rounded = attention_like()
    actual = shifted(rounded, 0.5)
    wide = torch.full((12, 8, 32), NAN, dtype=torch.bfloat16)
    view = wide[:, ::2, 3:19]
    view.copy_(actual)
    turned = rounded.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    copies = [t.clone() for t in (wide, turned, oracle)]
    strided = compare(view, turned, oracle.transpose(0, 1).contiguous().transpose(0, 1))
    assert strided == compare(actual, rounded, oracle)
    for before, after in zip(copies, (wide, turned, oracle), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


def test_gradients_do_not_matter():
    leaf = torch.ones(2, 3, requires_grad=True)
    assert compare(leaf, leaf * 1, leaf.detach().double()).passed


def test_chunks_add_up():
    rows = _CHUNK_ELEMENTS // 64 + 3
    expected = torch.ones(rows, 1, 64, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[-1, 0, 5] = 1.5
    actual[0, 0, 0] = 1.25
    report = compare(actual, expected, expected.double())
    assert report.worst is not None
    assert (report.worst.index, report.max_abs) == ((rows - 1, 0, 5), 0.5)
    assert report.mean_abs == pytest.approx(0.75 / (rows * 64))
    assert report.mismatch_count == 2
    assert sum(report.ulp_histogram) == report.numel == rows * 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], torch.ones(1)), "actual must be a torch.Tensor, got list"),
        ((torch.ones(1), None), "expected must be a torch.Tensor, got NoneType"),
        ((torch.ones(1), torch.ones(1), 1.0), "oracle must be a torch.Tensor, got float"),
        ((torch.ones(1), torch.ones(1).to(torch.complex64)), "expected must be of a real dtype"),
    ],
)
def test_arguments_that_are_no_tensors_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        compare(*arguments)


def test_bad_tolerance_and_indptr_are_refused():
    one = torch.ones(1, 1)
    with pytest.raises(TypeError, match="tolerance must be a Tolerance, got float"):
        compare(one, one, tolerance=1e-3)
    with pytest.raises(ValueError, match=r"qo_indptr must not decrease, got \[0, 3, 2\]"):
        compare(one, one, qo_indptr=[0, 3, 2])
    with pytest.raises(ValueError, match=r"qo_indptr must be of shape \[batch \+ 1\]"):
        compare(one, one, qo_indptr=torch.zeros(2, 2, dtype=torch.int32))


# The worst element


@pytest.mark.parametrize(
    ("token", "request_id", "in_request"),
    [(0, 1, 0), (2, 1, 2), (3, 4, 0), (7, 4, 4), (8, 6, 0), (9, 6, 1), (10, None, None)],
)
def test_worst_element_names_its_request(token, request_id, in_request):
    # Requests 0, 2, 3 and 5 are empty; rows 10 and 11 are padding.
    qo_indptr = torch.tensor([0, 0, 3, 3, 3, 8, 8, 10], dtype=torch.int32)
    oracle, expected = attention_like()
    actual = expected.clone()
    actual[token, 2, 9] += 4.0
    report = compare(actual, expected, oracle, qo_indptr=qo_indptr)
    worst = report.worst
    assert worst is not None
    assert worst.index == (token, 2, 9)
    assert (worst.request, worst.token_in_request) == (request_id, in_request)
    assert (worst.token, worst.head, worst.dim) == (token, 2, 9)
    assert worst.actual == actual[token, 2, 9].item()
    assert worst.expected == expected[token, 2, 9].item()
    assert worst.oracle == oracle[token, 2, 9].item()
    assert compare(actual, expected, qo_indptr=qo_indptr.tolist()).worst.request == request_id


def test_worst_element_of_other_ranks():
    expected = torch.zeros(2, 3, 4, 5)
    actual = expected.clone()
    actual[1, 2, 0, 3] = 1.0
    worst = compare(actual, expected).worst
    assert worst is not None
    assert (worst.index, worst.token, worst.head, worst.dim) == ((1, 2, 0, 3), None, None, None)
    lse = compare(actual[0, :, 0], expected[0, :, 0] + 1).worst
    assert lse is not None
    assert (lse.token, lse.head, lse.dim) == (0, 0, None)
    assert "index (1, 2, 0, 3)" in str(compare(actual, expected))


def test_a_nan_is_worse_than_any_number():
    expected = torch.zeros(4, 2)
    actual = expected.clone()
    actual[0, 0], actual[2, 1], actual[3, 0] = 1e30, NAN, NAN
    worst = compare(actual, expected).worst
    assert worst is not None
    assert worst.index == (2, 1)


# Text, dict, frame


def test_histogram_buckets_by_hand():
    steps = torch.tensor([0, 1, 2, 3, 4, 7, 8, 2**13, 2**14 - 1, 2**14, 2**20], dtype=torch.int32)
    one = torch.ones(12)
    actual = one.clone()
    actual[:11] = (one[:11].view(torch.int32) + steps).view(torch.float32)
    actual[11] = NAN
    histogram = compare(actual, one).ulp_histogram
    assert histogram == (1, 1, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=20))
def test_histogram_sums_to_numel_and_the_report_is_printable(pairs):
    actual, expected = (f32(*(pair[side] for pair in pairs)) for side in (0, 1))
    report = compare(actual, expected, expected.double())
    assert sum(report.ulp_histogram) == len(pairs)
    assert 0 <= report.mismatch_count <= len(pairs)
    assert report.expected_error.max_abs == 0.0
    assert str(report).count("\n") > 16
    json.dumps(report.to_dict(), allow_nan=False)


def test_text_shows_the_tolerance_beside_the_measurement():
    oracle, rounded = attention_like()
    qo_indptr = [0, 3, 12]
    text = str(compare(shifted(rounded, 1.0), rounded, oracle, name="d128", qo_indptr=qo_indptr))
    lines = text.splitlines()
    assert lines[0] == "d128: FAILED, actual is wrong"
    assert "actual's error against the oracle" in lines[1]
    assert "bfloat16 [12, 4, 16]" in text
    assert "worst at request 1, token 2 (row 5), head 1, dim 3: actual" in text
    assert "allowed |difference| 0.01 + 0.01 x |expected|" in text
    assert "(allowed 16)" in text
    bars = [line for line in lines if line.lstrip().startswith(("0 ", "1 ", "< 2^", ">= 2^"))]
    assert len(bars) == 16
    assert bars[0].split()[1] == str(rounded.numel() - 1)
    assert str(compare(rounded, rounded, oracle)).splitlines()[0] == "diff: ok, agree"


def test_dict_is_strict_json():
    expected = torch.tensor([[1.0, -INF]])
    report = compare(torch.tensor([[NAN, -INF]]), expected, name="lse", qo_indptr=[0, 1])
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(loaded) == [*diff.FRAME_SCHEMA, "ulp_histogram"]
    assert loaded["max_abs"] == "inf"
    assert loaded["worst_actual"] == "nan"
    assert loaded["worst_oracle"] is None
    assert loaded["actual_err_max"] is None
    assert loaded["shape"] == [1, 2]
    assert loaded["worst_index"] == [0, 0]
    assert (loaded["worst_request"], loaded["passed"]) == (0, False)
    assert loaded["ulp_histogram"] == [1] + [0] * 14 + [1]


def test_frame_has_one_constant_schema():
    oracle, rounded = attention_like()
    reports = [
        compare(rounded, rounded, oracle, name="a", qo_indptr=[0, 12]),
        compare(shifted(rounded, NAN), rounded, name="b"),
        compare(rounded[:1], rounded, name="c"),
        compare(rounded[:0], rounded[:0], name="d"),
    ]
    for subset in (reports, *[[report] for report in reports], []):
        frame = diff.reports_to_frame(subset)
        assert {key: str(dtype) for key, dtype in frame.dtypes.items()} == diff.FRAME_SCHEMA
        assert len(frame) == len(subset)
    frame = diff.reports_to_frame(reports)
    assert frame["name"].tolist() == ["a", "b", "c", "d"]
    assert frame["passed"].tolist() == [True, False, False, True]
    assert frame["shape"].tolist()[2] == "[1, 4, 16]"
    assert frame["worst_request"].isna().tolist() == [False, True, True, True]
    assert frame["max_abs"].tolist() == [0.0, INF, INF, 0.0]
    one = reports[0].to_frame().iloc[0]
    assert one["actual_err_max"] == reports[0].actual_error.max_abs
    assert one["expected_err_rms_ulps"] == reports[0].expected_error.rms_ulps
    assert one["allowed_max_ulps"] == reports[0].allowed_max_ulps
    assert one["wrong_rms"] == 2.0


def test_schema_names_are_snake_case():
    assert all(key.isidentifier() and key == key.lower() for key in diff.FRAME_SCHEMA)


def test_frame_without_pandas_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'tritonattn\[perf\]'"):
        compare(torch.ones(1), torch.ones(1)).to_frame()


def test_report_is_frozen():
    report = compare(torch.ones(1), torch.ones(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.passed = False


# Case files


def assert_same(loaded: torch.Tensor, saved: torch.Tensor) -> None:
    assert loaded.shape == saved.shape
    assert loaded.stride() == saved.stride()
    assert loaded.dtype == saved.dtype
    loaded, saved = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (loaded, saved))
    assert torch.equal(loaded, saved)


def views() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(6, 3, 2, 4, 2, 8, generator=generator)  # pages, layers, K/V, ...
    return {
        "contiguous": pool[0].clone(),
        "cross_layer": pool[:, 1],
        "keys": pool[:, 1, 0],
        "permuted": pool.permute(5, 0, 2, 1, 4, 3),
        "expanded": pool[0, 0, 0, 0, 0].expand(5, 8),
        "expanded_gaps": pool[:, 0, 0, 0, 0].expand(4, 6, 8),
        "stepped": pool[::2, ..., ::3],
        "overlapping": pool.view(-1).as_strided((5, 3), (2, 1)),
        "size_one": pool[:1, 0].as_strided((1, 2, 4, 1, 8), (384, 64, 16, 1, 1)),
        "padded_bool": (pool > 0)[..., :5],
        "fp8": pool.to(torch.float8_e4m3fn)[..., :4],
        "int32": torch.arange(20, dtype=torch.int32)[3:9:2],
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "empty_expanded": torch.empty(1, 0).expand(7, 0),
    }


@pytest.mark.parametrize("key", sorted(views()))
def test_case_file_keeps_strides(key, tmp_path):
    saved = views()[key]
    dump_case(tmp_path / "case.pt", tensor=saved)
    assert_same(load_case(tmp_path / "case.pt")["tensor"], saved)


def test_case_file_keeps_structure_and_values(tmp_path):
    params = {
        "kv_layout": "NHD",
        "causal": True,
        "sm_scale": 0.125,
        "window_left": -1,
        "lse": None,
        "dtype": torch.bfloat16,
        "shape": (1, 2),
        "lens": [3, 0],
        "logits": {"cap": math.inf, "kind": "tensor"},
    }
    cache = (torch.ones(2, 3), torch.zeros(2, 3))
    dump_case(tmp_path / "case.pt", kv_cache=cache, path="not the file", **params)
    loaded = load_case(str(tmp_path / "case.pt"))
    assert isinstance(loaded["kv_cache"], tuple)
    assert_same(loaded["kv_cache"][0], cache[0])
    assert_same(loaded["kv_cache"][1], cache[1])
    assert {key: loaded[key] for key in params} == params
    assert isinstance(loaded["shape"], tuple)
    assert loaded["path"] == "not the file"


def test_a_small_view_makes_a_small_file(tmp_path):
    pool = torch.zeros(1000, 8, 16, 64)
    dump_case(tmp_path / "slice.pt", view=pool[10:12])
    dump_case(tmp_path / "gaps.pt", view=pool[:, 3, :, :1])
    assert (tmp_path / "slice.pt").stat().st_size < 100_000  # 2 pages of 32 KiB
    assert (tmp_path / "gaps.pt").stat().st_size < 100_000  # 16,000 elements


def test_memory_between_elements_is_poisoned(tmp_path):
    pool = torch.ones(4, 2, 8)
    dump_case(tmp_path / "case.pt", view=pool[:, 0], ids=torch.ones(6, dtype=torch.int32)[::2])
    loaded = load_case(tmp_path / "case.pt")
    between = loaded["view"].as_strided((3, 8), (16, 1), 8)
    assert between.isnan().all()
    assert loaded["ids"].as_strided((2,), (2,), 1).tolist() == [-1, -1]


def test_case_file_rejects_what_would_not_load(tmp_path):
    with pytest.raises(TypeError, match=r"q\[1\] must be a tensor, None, bool.*got object"):
        dump_case(tmp_path / "case.pt", q=[1, object()])
    with pytest.raises(TypeError, match="d must have string keys"):
        dump_case(tmp_path / "case.pt", d={1: 2})
    with pytest.raises(TypeError, match="s must be a strided tensor"):
        dump_case(tmp_path / "case.pt", s=torch.eye(2).to_sparse())
    assert not (tmp_path / "case.pt").exists()


def test_other_files_and_versions_are_refused(tmp_path):
    torch.save({"weights": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a case file"):
        load_case(tmp_path / "other.pt")
    torch.save({"format": "tritonattn-case", "version": 99, "values": {}}, tmp_path / "new.pt")
    with pytest.raises(ValueError, match="of version 99; this release reads version 1"):
        load_case(tmp_path / "new.pt")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.bool], ids=str
)
def test_device_tensors_give_the_report_of_host_tensors(dtype, tmp_path):
    oracle = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(2)).double() * 4
    expected = oracle.to(dtype)
    actual = expected.clone()
    actual[3, 1, 2] = 0
    if dtype.is_floating_point:
        actual[4, 2, 1] = NAN
    on_host = compare(actual, expected, oracle, qo_indptr=[0, 4, 9])
    indptr = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    # The oracle may stay on the host.
    on_device = compare(actual.cuda(), expected.cuda(), oracle, qo_indptr=indptr)
    host, device = on_host.to_dict(), on_device.to_dict()
    assert host.keys() == device.keys()
    for key, value in host.items():
        expected_value = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        if key != "reason":
            assert device[key] == expected_value, key
    dump_case(tmp_path / "case.pt", q=actual.cuda()[:, 1])
    assert_same(load_case(tmp_path / "case.pt")["q"], actual[:, 1])
    assert load_case(tmp_path / "case.pt", device="cuda")["q"].is_cuda
