"""Prefill over a paged cache: FlashInfer's class, with the arguments and defaults of its 0.6.13.

Accepted and without effect, since they choose among FlashInfer's kernels: `backend` of its names,
`use_fp16_qk_reduction`, `non_blocking`, `fixed_split_size`, `disable_split_kv`, `enable_pdl`,
`skip_softmax_threshold_scale_factor` (results stay exact), `seq_lens`, `seq_lens_q` and
`block_tables` (the facts of the CSR table again). `backend` also takes "triton", "flashinfer" and
"reference".
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.layout import KVCacheLike
from tritonattn.wrappers.arguments import DType, LayerArguments
from tritonattn.wrappers.base import PagedAttentionWrapper
from tritonattn.wrappers.metadata import StepMetadata

__all__ = ["BatchPrefillWithPagedKVCacheWrapper"]


class BatchPrefillWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Attention of varlen queries: `plan()` once a step, `run()` in every layer.

    Parameters
    ----------
    float_workspace_buffer : Tensor
        Scratch on the device of the calls, any dtype and contents.
    kv_layout : {"NHD", "HND"}
    use_cuda_graph : bool
        Keep the metadata in the four buffers below, which `plan()` writes in place. Any batch up to
        their capacity is taken; a captured `run()` replays after `plan()` or changes in place.
    qo_indptr_buf, paged_kv_indptr_buf : Tensor, shape [capacity + 1], int32
    paged_kv_indices_buf : Tensor, shape [max entries], int32
    paged_kv_last_page_len_buf : Tensor, shape [capacity], int32
    custom_mask_buf, mask_indptr_buf : Tensor
        Unused as long as masks are not supported.
    backend : str
        FlashInfer's names are hints; "triton", "flashinfer" and "reference" choose.
    jit_args, jit_kwargs : None
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if backend == "cudnn":
            raise UnsupportedError(
                "backend='cudnn' counts qo_indptr in elements: count in tokens, name another"
            )
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
            "qo_indptr_buf": qo_indptr_buf,
        }
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            buffers if use_cuda_graph else None,
            backend,
            jit_args,
        )
        self._rows: int | None = None  # qo_indptr[-1], if the host knows it

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan a step on the device, without waiting for it.

        With `qo_indptr` on the host the device planner starts here, else with the first `run()`.

        Parameters
        ----------
        qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : Tensor, int32
            Each on the host or on the device. A request without pages has no keys.
        max_token_per_sequence, max_sequence_kv : int, optional
            Upper bounds in tokens; not used in graph mode, where later steps may be longer.
        q_data_type, kv_data_type : torch.dtype or str
            The cache's dtype defaults to q's.

        Raises
        ------
        ValueError, TypeError
            Before anything is written. `UnsupportedError` for semantics that are not supported.
        """
        items = (prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr)
        if any(tensor is not None for tensor in items):
            raise UnsupportedError("multi-item scoring is not supported: leave out its tensors")
        layers = LayerArguments.of(
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=o_data_type,
            pos_encoding_mode=pos_encoding_mode,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_vo=head_dim_qk if head_dim_vo is None else head_dim_vo,
            page_size=page_size,
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            custom_mask=custom_mask if packed_custom_mask is None else packed_custom_mask,
        )
        step = StepMetadata(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr, "paged_kv_"
        )
        self._plan_prefill(step, layers, max_token_per_sequence, max_sequence_kv)

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike | None,
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: KVCacheLike | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend one layer.

        Parameters
        ----------
        q : Tensor, shape [rows, num_qo_heads, head_dim_qk]
            Rows past `qo_indptr[-1]` are padding: 0 in a new `out`, untouched in a given one.
        paged_kv_cache : Tensor or (Tensor, Tensor)
            As `paged_attention`, or without the page dimension if page_size is 1. None is a
            profiling run.

        Returns
        -------
        out : Tensor, shape [rows, num_qo_heads, head_dim_vo]
        lse : Tensor, shape [rows, num_qo_heads], float32
            Base 2; only with `return_lse`.
        """
        self._check_call(q, args, window_left, {"q_scale": q_scale, "kv_cache_sf": kv_cache_sf})
        if self._rows is not None and q.size(0) < self._rows:
            raise ValueError(
                f"q must have at least qo_indptr[-1] = {self._rows} rows, got {q.size(0)}"
            )
        requests = self._batch_size if self._buffers is None else self._buffers.capacity
        return self._attend(
            q,
            paged_kv_cache,
            requests,
            out=out,
            lse=lse,
            return_lse=return_lse,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run with arguments that replace the planned ones; deprecated in FlashInfer."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal=causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Do as `forward` and return the LSE as well; deprecated in FlashInfer."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal=causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def _plan_prefill(
        self,
        step: StepMetadata,
        layers: LayerArguments,
        max_q_len: int | None,
        max_kv_len: int | None,
    ) -> None:
        step.check(self.device, layers.page_size)
        known = step.row_counts()
        rows = None if known is None else known[0]
        if self._buffers is not None:
            # A graph captured now must serve later steps, whose queries and keys may be longer.
            max_q_len = max_kv_len = None
        elif known is not None:
            max_q_len = known[1]
        self._plan(step, layers, rows=rows, max_q_len=max_q_len, max_kv_len=max_kv_len)
        self._rows = rows
