"""The FlashInfer backend without FlashInfer: a stand-in with its checks and known faults."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tritonattn.backends import AttentionCall, UnsupportedError, flashinfer
from tritonattn.cases import AttentionCase, AttentionInputs, make_inputs, reference_results
from tritonattn.checks import make_page_table
from tritonattn.layout import PagedKVCache, PageTable
from tritonattn.plan import AttentionPlan
from tritonattn.reference import attention as reference
from tritonattn.spec import AttentionSpec

SENTINEL = 7.0
FLASHINFER_EMPTY_LSE = -5e4


@dataclass
class StandInWrapper:
    """Both wrappers of flashinfer-python 0.6.13, as far as the backend uses them."""

    workspace: torch.Tensor
    kv_layout: str = "NHD"
    use_cuda_graph: bool = False
    use_tensor_cores: bool = False
    kind: str = "decode"
    planned: dict[str, Any] = field(default_factory=dict)

    def plan(self, *tensors: Any, **options: Any) -> None:
        if self.kind == "decode":
            qo_indptr = torch.arange(tensors[2].numel() + 1, dtype=torch.int32)
        else:
            qo_indptr, *tensors = tensors
            assert set(options) == {"causal", "q_data_type", "kv_data_type", "sm_scale"}
        indptr, indices, last_page_len, *_, page_size = tensors
        assert all(t.dtype == torch.int32 for t in (qo_indptr, indptr, indices, last_page_len))
        assert indptr[0] == qo_indptr[0] == 0
        assert indptr[-1] == indices.numel()
        assert qo_indptr.numel() == indptr.numel() == last_page_len.numel() + 1
        pages = indptr[1:] - indptr[:-1]
        assert ((last_page_len >= (pages > 0)) & (last_page_len <= page_size)).all()
        assert ((pages > 0) | (last_page_len == 0)).all(), "host and device lengths would differ"
        table = PageTable.csr(indptr, indices, last_page_len, page_size, from_last_page_len=True)
        self.planned = {"qo_indptr": qo_indptr, "table": table, **options}

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> None:
        k, v = paged_kv_cache
        assert k.stride() == v.stride()
        assert out.is_contiguous()
        assert return_lse == (lse is not None)
        qo_indptr, table = self.planned["qo_indptr"], self.planned["table"]
        assert q.size(0) == out.size(0) == qo_indptr[-1]
        right = torch.empty(q.shape[:2])
        reference.paged_attention(
            q,
            PagedKVCache.of(paged_kv_cache, self.kv_layout),
            table,
            qo_indptr,
            out,
            right,
            causal=self.planned.get("causal", False),
            sm_scale=self.planned["sm_scale"] * q_scale,
            lse_base="log2",
        )
        empty = right == -math.inf
        out[empty] = math.nan
        if lse is not None:
            assert lse.is_contiguous()
            lse.copy_(right.masked_fill(empty, FLASHINFER_EMPTY_LSE))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandInWrapper]:
    """Stand in for FlashInfer; return the wrappers that the backend makes."""
    wrappers: list[StandInWrapper] = []

    def maker(kind: str) -> Any:
        def make(*arguments: Any, **options: Any) -> StandInWrapper:
            wrappers.append(StandInWrapper(*arguments, kind=kind, **options))
            return wrappers[-1]

        return make

    module = SimpleNamespace(
        __version__="0.6.13",
        BatchDecodeWithPagedKVCacheWrapper=maker("decode"),
        BatchPrefillWithPagedKVCacheWrapper=maker("prefill"),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    flashinfer._workspace.cache_clear()
    return wrappers


def make_call(inputs: AttentionInputs, **changes: Any) -> tuple[AttentionCall, AttentionPlan]:
    """Describe a call with sentinel-filled results."""
    cache = PagedKVCache.of(inputs.kv_cache, inputs.kv_layout)
    tables = {"block_table": None, "indptr": None, "indices": None, **inputs.table}
    table = make_page_table(inputs.seq_lens, page_size=cache.page_size, **tables)
    plan = AttentionPlan(
        inputs.qo_indptr, table, causal=inputs.causal, max_q_len=None, max_kv_len=None
    )
    call = AttentionCall(
        spec=plan.spec(inputs.q, cache, ()),
        q=inputs.q,
        cache=cache,
        table=table,
        qo_indptr=inputs.qo_indptr,
        out=torch.full_like(inputs.q, SENTINEL),
        lse=torch.full(inputs.q.shape[:2], SENTINEL),
        sm_scale=cache.head_dim_qk**-0.5,
        lse_base="log2",
    )
    return replace(call, **changes), plan


def run(call: AttentionCall) -> None:
    state = flashinfer.BACKEND.plan(call.spec, call.table, call.qo_indptr, None)
    flashinfer.BACKEND.run(call, state)


def check(inputs: AttentionInputs, **changes: Any) -> AttentionCall:
    """Assert right results in the rows of requests and untouched rows elsewhere."""
    call, _ = make_call(inputs, **changes)
    run(call)
    begin, end = int(inputs.qo_indptr[0]), int(inputs.qo_indptr[-1])
    out, lse = reference_results(inputs)
    torch.testing.assert_close(call.out[begin:end], out[begin:end].to(call.out.dtype))
    assert call.lse is not None
    if call.lse_base == "e":
        lse = lse * math.log(2.0)
    torch.testing.assert_close(call.lse[begin:end], lse[begin:end].float())
    for result in (call.out, call.lse):
        assert (result[:begin] == SENTINEL).all()
        assert (result[end:] == SENTINEL).all()
    return call


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
    ("heads", "tensor_cores"), [(8, False), (6, False), (10, True), (14, True), (32, True)]
)
def test_group_sizes_of_the_decode_kernel(
    made: list[StandInWrapper], heads: int, tensor_cores: bool
) -> None:
    """Groups 5, 7 and 16 are refused by FlashInfer's decode kernel without tensor cores."""
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


SPEC = AttentionSpec(
    device=torch.device("cuda:0"), q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64, page_size=16, batch_size=2,
    total_q=2, max_q_len=1, max_kv_len=99, is_csr=True, causal=True,
)  # fmt: skip


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
    real = flashinfer.importlib.import_module

    def fail(name: str, *arguments: Any) -> Any:
        if name == "flashinfer":
            raise error
        return real(name, *arguments)

    monkeypatch.setattr(flashinfer.importlib, "import_module", fail)
    reason = flashinfer.BACKEND.refusal(SPEC)
    assert reason is not None
    assert f"cannot be imported ({type(error).__name__}: {error})" in reason
