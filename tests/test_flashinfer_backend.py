"""The FlashInfer backend without FlashInfer: right results, refusals, versions."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.flashinfer_stand_in import (
    SENTINEL,
    SPEC,
    StandInWrapper,
    check,
    made,
    make_call,
    run,
)
from tritonattn.backends import UnsupportedError, flashinfer, flashinfer_package
from tritonattn.cases import AttentionCase, make_inputs, reference_results
from tritonattn.reference import attention as reference

__all__ = ["made"]


@pytest.mark.parametrize("table", ["dense", "csr"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", ["combined", "padded", "cross_layer", "interleaved"])
def test_tables_and_layouts(
    made: list[StandInWrapper], table: Any, kv_layout: Any, storage: Any
) -> None:
    fields = {"page_size": 4, "table": table, "kv_layout": kv_layout, "storage": storage}
    check(make_inputs(AttentionCase((3, 1, 5), (9, 33, 5), **fields)))
    check(make_inputs(AttentionCase((1, 1, 1), (9, 33, 5), **fields)))
    assert [wrapper.kind for wrapper in made] == ["prefill", "decode"]


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_see_no_key_are_repaired(made: list[StandInWrapper], causal: bool) -> None:
    """FI 353, 4401, 4452: requests without keys, and more queries than keys under a causal mask."""
    check(make_inputs(AttentionCase((1, 9, 4, 0, 2), (0, 5, 0, 7, 30), page_size=4, causal=causal)))
    check(make_inputs(AttentionCase((1, 1, 1), (0, 5, 0), page_size=4, causal=causal)))
    check(make_inputs(AttentionCase((1, 1), (0, 0), page_size=4, causal=causal)))


def test_requests_without_queries_are_left_out(made: list[StandInWrapper]) -> None:
    """Padding with garbage lengths and page ids never reaches it; the rest is a decode batch."""
    inputs = make_inputs(AttentionCase((0, 1, 1, 0), (3, 5, 9, 2), page_size=4))
    inputs.seq_lens[0], inputs.seq_lens[3] = -5, 2**31 - 1
    inputs.table["block_table"][3] = 12345
    clean = replace(inputs, seq_lens=torch.tensor([0, 5, 9, 0], dtype=torch.int32))
    call, _ = make_call(inputs)
    run(call)
    assert made[0].kind == "decode"
    assert made[0].planned["table"].batch_size == 2
    torch.testing.assert_close(call.out[:2], reference_results(clean)[0][:2].to(call.out.dtype))
    nothing = make_inputs(AttentionCase((0, 0), (3, 5), page_size=4))
    check(nothing)
    assert len(made) == 1


def test_surplus_pages_and_lengths_beyond_the_table(made: list[StandInWrapper]) -> None:
    inputs = make_inputs(AttentionCase((2, 5), (8, 12), page_size=4, table="csr"))
    check(inputs)
    assert made[0].planned["table"].page_ids.numel() == 5
    inputs.seq_lens[1] = 1000  # its row has a surplus page, which is poisoned
    inputs.table["indptr"][-1] -= 1
    call, _ = make_call(inputs)
    run(call)
    expected = reference_results(replace(inputs, seq_lens=torch.tensor([8, 12], dtype=torch.int32)))
    torch.testing.assert_close(call.out[:7], expected[0][:7].to(call.out.dtype))


def test_first_row_is_not_the_first_of_q(made: list[StandInWrapper]) -> None:
    inputs = make_inputs(AttentionCase((2, 5, 3), (8, 12, 3), page_size=4))
    table = {"block_table": inputs.table["block_table"][1:]}
    check(
        replace(inputs, qo_indptr=inputs.qo_indptr[1:], seq_lens=inputs.seq_lens[1:], table=table)
    )


def test_lse_base_scale_and_strided_results(made: list[StandInWrapper]) -> None:
    inputs = make_inputs(AttentionCase((2, 5, 1), (8, 12, 0), page_size=4))
    check(inputs, lse_base="e")
    wide = torch.full((inputs.q.size(0), 8, 96), SENTINEL, dtype=inputs.q.dtype)
    head_major = torch.full((8, inputs.q.size(0)), SENTINEL)
    check(inputs, out=wide[..., 16:80], lse=head_major.T, lse_base="e")
    assert (wide[..., :16] == SENTINEL).all()
    call, _ = make_call(inputs, lse=None, sm_scale=0.5)
    run(call)
    other = torch.full_like(call.out, SENTINEL)
    reference.paged_attention(
        call.q, call.cache, call.table, call.qo_indptr, other, None,
        causal=True, sm_scale=0.5, lse_base="log2",
    )  # fmt: skip
    torch.testing.assert_close(call.out, other)


@pytest.mark.parametrize(
    ("heads", "tensor_cores"), [(2, False), (8, True), (6, True), (10, True), (32, True)]
)
def test_tensor_cores_for_groups(
    made: list[StandInWrapper], heads: int, tensor_cores: bool
) -> None:
    check(make_inputs(AttentionCase((1, 1), (8, 12), heads, 2, page_size=4)))
    assert made[0].use_tensor_cores == tensor_cores


def test_unequal_strides_of_k_and_v(made: list[StandInWrapper]) -> None:
    inputs = make_inputs(AttentionCase((2, 5), (8, 12), page_size=4, storage="tuple"))
    k, v = inputs.kv_cache
    wide = torch.zeros(*v.shape[:3], 80, dtype=v.dtype)[..., :64].copy_(v)
    call, _ = make_call(replace(inputs, kv_cache=(k, wide)))
    with pytest.raises(UnsupportedError, match="equal strides of k and v"):
        run(call)
    assert (call.out == SENTINEL).all()


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("needs CUDA tensors, got device cpu", {"device": torch.device("cpu")}),
        ("takes float16 and bfloat16, got float32", {"q_dtype": torch.float32}),
        ("head_dim (64, 128, 256) only, got 80", {"head_dim_qk": 80, "head_dim_vo": 80}),
        ("head_dim (64, 128, 256) only, got 192", {"head_dim_qk": 192, "head_dim_vo": 192}),
        ("one head_dim for q, k and v, got 192 and 128", {"head_dim_qk": 192, "head_dim_vo": 128}),
        ("does not support window_left, sinks yet", {"features": ("window_left", "sinks")}),
    ],
)
def test_refusals(made: list[StandInWrapper], match: str, changes: dict[str, Any]) -> None:
    assert flashinfer.BACKEND.refusal(SPEC) is None
    reason = flashinfer.BACKEND.refusal(replace(SPEC, **changes))
    assert reason is not None
    assert match in reason


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("0.6.13", True), ("0.6.18", True), ("0.7.4", True), ("0.5.3", False), ("0.8.0", False)],
)
def test_versions(made: list[StandInWrapper], version: str, accepted: bool) -> None:
    sys.modules["flashinfer"].__version__ = version  # type: ignore[attr-defined]
    reason = flashinfer.BACKEND.refusal(SPEC)
    assert reason == (
        None if accepted else f"flashinfer-python must be 0.6.x or 0.7.x, got {version}"
    )


@pytest.mark.parametrize("error", [ImportError("no such thing"), RuntimeError("no nvcc")])
def test_flashinfer_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Absent or broken: a refusal with the reason, not an error."""
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    real = flashinfer_package.importlib.import_module

    def fail(name: str, *arguments: Any) -> Any:
        if name == "flashinfer":
            raise error
        return real(name, *arguments)

    monkeypatch.setattr(flashinfer_package.importlib, "import_module", fail)
    reason = flashinfer.BACKEND.refusal(SPEC)
    assert reason is not None
    assert f"cannot be imported ({type(error).__name__}: {error})" in reason
