"""`compare`: which side is wrong, with and without an oracle; shapes, dtypes, strides."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from tritonattn import diff
from tritonattn.diff import DiffReport, Tolerance, compare
from tritonattn.diff.numerics import _CHUNK_ELEMENTS

INF, NAN = math.inf, math.nan
FLOATS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def attention_like(seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """Return (oracle, its rounding) of shape [total_q 12, num_qo_heads 4, head_dim 16]."""
    generator = torch.Generator().manual_seed(seed)
    oracle = torch.randn(12, 4, 16, generator=generator, dtype=torch.float64)
    return oracle, oracle.to(dtype)


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
