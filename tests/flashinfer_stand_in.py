"""A stand-in for flashinfer-python 0.6.13, its checks and known faults, for machines without it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tritonattn.backends import AttentionCall, Workspace, flashinfer, flashinfer_wrappers
from tritonattn.cases import AttentionInputs, reference_results
from tritonattn.checks import make_page_table
from tritonattn.layout import PagedKVCache, PageTable
from tritonattn.plan import AttentionPlan
from tritonattn.reference import attention as reference
from tritonattn.spec import AttentionSpec

SENTINEL = 7.0
FLASHINFER_EMPTY_LSE = -5e4

SPEC = AttentionSpec(
    device=torch.device("cuda:0"), q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64, page_size=16, batch_size=2,
    total_q=2, max_q_len=1, max_kv_len=99, is_csr=True, causal=True,
)  # fmt: skip


@dataclass
class StandInWrapper:
    """Both wrappers of flashinfer-python 0.6.13, as far as the backend uses them."""

    workspace: torch.Tensor
    kv_layout: str = "NHD"
    use_cuda_graph: bool = False
    use_tensor_cores: bool = False
    backend: str = "auto"
    paged_kv_indptr_buffer: torch.Tensor | None = None
    paged_kv_indices_buffer: torch.Tensor | None = None
    paged_kv_last_page_len_buffer: torch.Tensor | None = None
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
        if self.use_cuda_graph:
            indptr, indices, last_page_len = self.keep(indptr, indices, last_page_len)
        pages = indptr[1:] - indptr[:-1]
        assert ((last_page_len >= (pages > 0)) & (last_page_len <= page_size)).all()
        assert ((pages > 0) | (last_page_len == 0)).all(), "host and device lengths would differ"
        table = PageTable.csr(indptr, indices, last_page_len, page_size, from_last_page_len=True)
        self.planned = {"qo_indptr": qo_indptr, "table": table, **options}

    def keep(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """Copy a table into the buffers of graph mode, whose batch size is fixed."""
        buffers = (
            self.paged_kv_indptr_buffer, self.paged_kv_indices_buffer,
            self.paged_kv_last_page_len_buffer,
        )  # fmt: skip
        kept = []
        for buffer, tensor in zip(buffers, given, strict=True):
            assert buffer is not None
            assert buffer.dtype == torch.int32
            kept.append(buffer[: tensor.numel()].copy_(tensor))
        assert kept[0].numel() == buffers[0].numel(), "the batch size should be fixed"
        assert kept[2].numel() == buffers[2].numel(), "the batch size should be fixed"
        return kept

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

        make.plan = StandInWrapper.plan  # type: ignore[attr-defined]
        make.run = StandInWrapper.run  # type: ignore[attr-defined]
        return make

    def xqa(
        q: Any, cache: Any, workspace: Any, table: Any, lengths: Any, most: int, **options: Any
    ):
        """Attend the first pages of each row of a contiguous table."""
        assert table.is_contiguous()
        assert most == table.size(1) * cache[0].size(1)
        assert (options["kv_layout"], options["backend"], options["bmm2_scale"]) == (
            "NHD",
            "xqa",
            1,
        )
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
        reference.paged_attention(
            q, PagedKVCache.of(cache, "NHD"), PageTable.dense(table, lengths, cache[0].size(1)),
            starts, options["out"], None, causal=True, sm_scale=options["bmm1_scale"],
            lse_base="log2",
        )  # fmt: skip

    module = SimpleNamespace(
        __version__="0.6.13",
        BatchDecodeWithPagedKVCacheWrapper=maker("decode"),
        BatchPrefillWithPagedKVCacheWrapper=maker("prefill"),
        decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=xqa),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_wrappers, "WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer_wrappers, "XQA_WORKSPACE_BYTES", 64)
    flashinfer_wrappers._of_stream.cache_clear()
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


def run(call: AttentionCall, kernel: str = "auto") -> None:
    backend = flashinfer.with_kernel(kernel)
    backend.run(call, backend.plan(call.spec, call.table, call.qo_indptr, Workspace()))


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
