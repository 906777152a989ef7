"""`DiffReport`: the worst element, the text, the dict and the frame."""

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
from tritonattn.diff import compare

INF, NAN = math.inf, math.nan


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
