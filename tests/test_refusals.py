"""What `paged_attention` and `plan_attention` refuse, before any launch, and in what words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tritonattn
from tritonattn.backends import UnsupportedError
from tritonattn.cases import AttentionCase, make_inputs


@pytest.fixture
def call() -> dict[str, Any]:
    return make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 16)).arguments()


@pytest.fixture(params=["dense", "csr"])
def either(request: pytest.FixtureRequest) -> dict[str, Any]:
    return make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 16, table=request.param)).arguments()


def refused(call: dict[str, Any], error: type[Exception], match: str, **changes: Any) -> None:
    """Assert the error, and that outputs and cache are as they were."""
    arguments = {**call, **changes}
    out = torch.full((call["q"].size(0), call["q"].size(1), 16), 7.0, dtype=call["q"].dtype)
    arguments.setdefault("out", out)
    before = call["kv_cache"].clone()
    with pytest.raises(error, match=match):
        tritonattn.paged_attention(**arguments)
    assert (out == 7.0).all()
    torch.testing.assert_close(call["kv_cache"], before, rtol=0, atol=0, equal_nan=True)


INT32 = {"dtype": torch.int32}


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (ValueError, "kv_layout must be 'NHD' or 'HND', got 'nhd'", {"kv_layout": "nhd"}),
        (ValueError, r"q must be \[total_q", {"q": torch.ones(13, 64)}),
        (ValueError, "last dimension of q must have stride 1", {"q": torch.ones(13, 16, 4).mT}),
        (TypeError, "q must be float16, bfloat16 or float32", {"q": torch.ones(9, 4, 16).double()}),
        (TypeError, "cache must have q's dtype", {"q": torch.ones(13, 4, 16)}),
        (ValueError, "head_dim of q must be a multiple of 8 from 16 to 256, got 12",
         {"q": torch.ones(13, 4, 12, dtype=torch.bfloat16)}),
        (ValueError, "one head_dim, got 32 and 16",
         {"q": torch.ones(13, 4, 32, dtype=torch.bfloat16)}),
        (ValueError, "positive multiple of num_kv_heads, got 3 and 2",
         {"q": torch.ones(13, 3, 16, dtype=torch.bfloat16)}),
        (ValueError, r"qo_indptr must have batch \+ 1 = 3 entries .* got 1",
         {"qo_indptr": torch.zeros(1, **INT32)}),
        (TypeError, "qo_indptr must be int32, got torch.int64",
         {"qo_indptr": torch.zeros(3).long()}),
        (TypeError, "seq_lens must be int32", {"seq_lens": torch.ones(2)}),
        (TypeError, "seq_lens must be a torch.Tensor, got list", {"seq_lens": [19, 21]}),
        (ValueError, "num_kv_heads=4 disagrees with the cache, which has 2", {"num_kv_heads": 4}),
        (ValueError, "page_size=8 disagrees with the cache, which has 16", {"page_size": 8}),
        (ValueError, "max_q_len must be at least 0, got -1", {"max_q_len": -1}),
        (TypeError, "max_kv_len must be an int or None, got float", {"max_kv_len": 3.0}),
        (ValueError, "lse_base must be 'log2' or 'e', got 'ln'", {"lse_base": "ln"}),
        (ValueError, "backend must be one of .* got 'cuda'", {"backend": "cuda"}),
        (TypeError, "kv_cache must be a tensor or a", {"kv_cache": [1, 2]}),
        (ValueError, r"out must have shape \(13, 4, 16\)", {"out": torch.ones(12, 4, 16)}),
        (TypeError, "out must be torch.bfloat16", {"out": torch.ones(13, 4, 16)}),
        (TypeError, "lse must be torch.float32", {"lse": torch.ones(13, 4).double()}),
        (ValueError, r"lse must have shape \(13, 4\)", {"lse": torch.ones(4, 13)}),
    ],
)  # fmt: skip
def test_arguments(
    call: dict[str, Any], error: type[Exception], match: str, changes: dict[str, Any]
) -> None:
    if "kv_cache" in changes:
        with pytest.raises(error, match=match):
            tritonattn.paged_attention(**{**call, **changes})
    else:
        refused(call, error, match, **changes)


@pytest.mark.parametrize(
    ("error", "match", "shape"),
    [
        (
            ValueError,
            r"kv_cache must be \[num_pages, 2, page_size, num_kv_heads",
            (2, 7, 16, 2, 16),
        ),
        (ValueError, r"kv_cache must be \[num_pages, 2, page_size, num_kv_heads", (7, 2, 16, 32)),
        (ValueError, "page_size must be at least 1, got 0", (7, 2, 0, 2, 16)),
    ],
)
def test_vllm_17362_caches_of_another_layout(
    call: dict[str, Any], error: type[Exception], match: str, shape: tuple[int, ...]
) -> None:
    """`(2, num_pages, ...)` is not this library's layout, and is refused, not read."""
    with pytest.raises(error, match=match):
        tritonattn.paged_attention(**{**call, "kv_cache": torch.ones(shape, dtype=torch.bfloat16)})


def test_caches_that_do_not_fit(call: dict[str, Any]) -> None:
    k, v = call["kv_cache"].unbind(1)
    for error, match, cache in [
        (ValueError, "agree in pages, page size and heads", (k, v[:-1])),
        (TypeError, "k and v must have one dtype", (k, v.half())),
        (ValueError, "last dimension of the v cache must have stride 1", (k, v.mT.contiguous().mT)),
        (TypeError, r"must be \(k, v\)", (k, v, v)),
        (ValueError, "k of a kv_cache tuple must be", (k[0], v[0])),
    ]:
        with pytest.raises(error, match=match):
            tritonattn.paged_attention(**{**call, "kv_cache": cache})


def test_the_table_has_exactly_one_form(either: dict[str, Any]) -> None:
    other = {
        "block_table": torch.zeros(2, 3, **INT32),
        "indptr": torch.zeros(3, **INT32),
        "indices": torch.zeros(5, **INT32),
    }
    tables = dict.fromkeys(other)
    refused({**either, **tables}, ValueError, "exactly one of block_table and .* got neither")
    refused({**either, **other}, ValueError, "exactly one of block_table and .* got both")
    only = {**tables, "indptr": other["indptr"]}
    refused({**either, **only}, ValueError, "indptr and indices go together")


def test_seed_1_tables_of_the_wrong_length(either: dict[str, Any]) -> None:
    """A profile run's indptr of length 1 against a batch of 2, and a table with a row too few."""
    if "indptr" in either:
        match = r"indptr must have batch \+ 1 = 3 entries .* got 1"
        refused(either, ValueError, match, indptr=torch.zeros(1, **INT32))
    else:
        match = "one row per request: seq_lens names 2 requests, block_table has 1"
        refused(either, ValueError, match, block_table=either["block_table"][:1])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_seed_1_a_table_without_columns(either: dict[str, Any], batch_size: int) -> None:
    """Refused with queries and a cache, unless max_kv_len=0 says that it is meant."""
    call = {
        **either,
        "qo_indptr": torch.arange(batch_size + 1, **INT32),
        "seq_lens": torch.full((batch_size,), 5, **INT32),
    }
    if "indptr" in either:
        call.update(indptr=torch.zeros(batch_size + 1, **INT32), indices=torch.empty(0, **INT32))
        match = "indices has no entries"
    else:
        call["block_table"] = torch.empty(batch_size, 0, **INT32)
        match = "block_table has no columns"
    refused(call, ValueError, match)
    out, lse = tritonattn.paged_attention(**call, max_kv_len=0, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_seed_1_an_all_zero_indptr_is_length_0_for_all() -> None:
    """Prefill does read the cache: no pages means no keys, whatever the lengths say."""
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 16, table="csr"))
    inputs.table["indptr"].zero_()
    out, lse = tritonattn.paged_attention(**inputs.arguments(), return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("given", [False, True])
def test_seed_1_profile_run(either: dict[str, Any], given: bool) -> None:
    """kv_cache=None: out 0, LSE -inf, nothing is read, any table."""
    tables = dict.fromkeys(("block_table", "indptr", "indices"))
    call = {**either, **tables, "kv_cache": None, "qo_indptr": torch.zeros(1, **INT32)}
    out = torch.full((13, 4, 16), math.nan, dtype=torch.bfloat16) if given else None
    result, lse = tritonattn.paged_attention(**call, out=out, return_lse=True)
    assert result is out or not given
    assert result.shape == (13, 4, 16)
    assert (result == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("window_left", {"window_left": 0}),
        ("logits_soft_cap", {"logits_soft_cap": 30.0}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(4)}),
        ("sinks", {"sinks": torch.ones(4)}),
        ("custom_mask", {"custom_mask": torch.ones(229, dtype=torch.bool)}),
        ("k_scale", {"k_scale": 0.5}),
        ("v_scale", {"v_scale": torch.ones([])}),
        ("batch_invariant", {"batch_invariant": True}),
    ],
)
def test_features_that_are_not_built_are_refused_by_name(
    call: dict[str, Any], backend: str, name: str, changes: dict[str, Any]
) -> None:
    match = f"the {backend} backend does not support {name} yet"
    refused(call, UnsupportedError, match, backend=backend, **changes)
    verdicts = tritonattn.explain(**call, **changes).verdicts
    assert name in verdicts[backend]


def test_fp8_cache_is_refused_by_name(call: dict[str, Any]) -> None:
    cache = call["kv_cache"].to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="does not support fp8 KV cache yet"):
        tritonattn.paged_attention(**{**call, "kv_cache": cache})


def test_neutral_feature_arguments_are_accepted(call: dict[str, Any]) -> None:
    neutral = {"window_left": -1, "logits_soft_cap": None, "k_scale": 1.0, "v_scale": None}
    assert torch.equal(
        tritonattn.paged_attention(**call), tritonattn.paged_attention(**call, **neutral)
    )


def test_values_are_checked_on_request(
    either: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRITONATTN_VALIDATE=1 reads what otherwise stays on the device."""
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    tritonattn.paged_attention(**either)
    too_long = torch.tensor([19, 10**6], **INT32)
    refused(either, ValueError, "seq_lens exceeds its row of the table", seq_lens=too_long)
    refused(either, ValueError, "negative length", seq_lens=torch.tensor([-1, 3], **INT32))
    refused(either, ValueError, "max_q_len is 4, a request has 10", max_q_len=4)
    refused(either, ValueError, "max_kv_len is 20, a request has 21", max_kv_len=20)
    high = torch.tensor([0, 1, 99], **INT32)
    refused(either, ValueError, r"qo_indptr spans \[0, 99\], q has 13 rows", qo_indptr=high)
    falling = torch.tensor([0, 5, 1], **INT32)
    refused(either, ValueError, "qo_indptr must not decrease", qo_indptr=falling)
    ids = "indices" if "indices" in either else "block_table"
    pages = either["kv_cache"].size(0)
    refused(
        either, ValueError, f"the cache has pages 0 to {pages - 1}", **{ids: either[ids] + pages}
    )


def test_plan_needs_the_page_size() -> None:
    inputs = make_inputs(AttentionCase((1,), (9,), 4, 2, 16))
    with pytest.raises(ValueError, match="needs page_size or kv_cache"):
        tritonattn.plan_attention(**inputs.metadata())


def test_a_call_without_metadata_or_plan() -> None:
    inputs = make_inputs(AttentionCase((1,), (9,), 4, 2, 16))
    with pytest.raises(TypeError, match="needs qo_indptr and seq_lens, or a plan"):
        tritonattn.paged_attention(inputs.q, inputs.kv_cache)


def test_explain_says_what_auto_is(call: dict[str, Any]) -> None:
    explanation = tritonattn.explain(**call)
    assert explanation.backend == "triton"
    assert "auto is triton" in explanation.reason
    assert "triton: accepts" in str(explanation)
    assert explanation.verdicts["flashinfer"] != "accepts"  # CPU tensors
    chosen = tritonattn.explain(**call, backend="reference", out=None, sm_scale=1.0)
    assert (chosen.backend, chosen.reason) == ("reference", "chosen by the backend argument")


def test_plan_and_backend_arguments_of_the_wrong_kind(call: dict[str, Any]) -> None:
    refused(call, TypeError, "plan must be from plan_attention, got str", plan="x")
    refused(call, TypeError, "backend must be a str, got list", backend=["triton"])
    refused(call, TypeError, "window_left must be a number, got str", window_left="3")
    refused(call, TypeError, "sm_scale must be a float or None, got str", sm_scale="a")
    out = torch.ones(1, 4, 16, dtype=torch.bfloat16).expand(13, 4, 16)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        tritonattn.paged_attention(**call, out=out)
    metadata = {k: v for k, v in call.items() if k not in ("q", "kv_cache", "kv_layout")}
    with pytest.raises(ValueError, match="backend must be one of"):
        tritonattn.plan_attention(**metadata, page_size=16, backend="zzz")
    with pytest.raises(TypeError, match="page_size must be an int, got str"):
        tritonattn.plan_attention(**metadata, page_size="4")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_one_byte_caches_that_are_not_fp8(call: dict[str, Any], dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"cache must have q's dtype .* got torch\."):
        tritonattn.paged_attention(**{**call, "kv_cache": call["kv_cache"].to(dtype)})


def test_bounds_may_be_numpy_integers(call: dict[str, Any]) -> None:
    expected = tritonattn.paged_attention(**call)
    bounded = tritonattn.paged_attention(**call, max_q_len=np.int32(10), max_kv_len=np.int64(21))
    assert torch.equal(bounded, expected)


def test_the_profile_run_is_checked_and_explained(call: dict[str, Any]) -> None:
    profile = {**call, "kv_cache": None}
    with pytest.raises(ValueError, match="backend must be one of"):
        tritonattn.paged_attention(**profile, backend="zzz")
    with pytest.raises(TypeError, match="q must be float16"):
        tritonattn.paged_attention(**{**profile, "q": call["q"].double()})
    explanation = tritonattn.explain(**profile)
    assert explanation.backend is None
    assert "profiling run" in explanation.reason
    with pytest.raises(TypeError, match="paged_attention has no argument foo"):
        tritonattn.explain(**call, foo=1)


def test_a_plan_refuses_another_table(either: dict[str, Any]) -> None:
    """Layer groups of a hybrid model have the same lengths and other pages."""
    metadata = {k: v for k, v in either.items() if k not in ("q", "kv_cache", "kv_layout")}
    plan = tritonattn.plan_attention(**metadata, page_size=16, max_q_len=10)
    expected = tritonattn.paged_attention(**either)
    assert torch.equal(tritonattn.paged_attention(**either, plan=plan), expected)
    for name in set(metadata) - {"causal"}:
        refused(either, ValueError, f"{name} is not what the plan", plan=plan, **{
            name: metadata[name].clone()
        })  # fmt: skip
    refused(either, ValueError, "max_q_len is not what the plan", plan=plan, max_q_len=9)
    refused(either, ValueError, "seq_lens is not what", plan=plan, seq_lens=either["seq_lens"][:1])


def test_a_plan_remembers_its_backend(call: dict[str, Any]) -> None:
    metadata = {k: v for k, v in call.items() if k not in ("q", "kv_cache", "kv_layout")}
    plan = tritonattn.plan_attention(**metadata, page_size=16, backend="reference")
    assert tritonattn.explain(**call, plan=plan).backend == "reference"


def test_plan_attention_checks_values_on_request(
    call: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    call["seq_lens"][1] = 10**6
    with pytest.raises(ValueError, match="seq_lens exceeds its row"):
        tritonattn.plan_attention(**{k: v for k, v in call.items() if k != "kv_layout"})
