"""Decode over a paged cache: FlashInfer's classes, with the arguments and defaults of its 0.6.13.

Accepted and without effect, since they choose among FlashInfer's kernels: `backend` of its names,
`use_tensor_cores`, `non_blocking`, `fixed_split_size`, `disable_split_kv`, `enable_pdl`,
`skip_softmax_threshold_scale_factor` (results stay exact), `seq_lens` and `block_tables` (the facts
of the CSR table again). `backend` also takes "triton", "flashinfer" and "reference".
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

from torch import Tensor

from tritonattn.layout import KVCacheLike
from tritonattn.wrappers.arguments import DType, LayerArguments
from tritonattn.wrappers.base import PagedAttentionWrapper
from tritonattn.wrappers.metadata import RowStarts, StepMetadata

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
]


class BatchDecodeWithPagedKVCacheWrapper(PagedAttentionWrapper):
    """Decode attention: `plan()` once a step, `run()` in every layer.

    Several query tokens a request (`q_len_per_req`) are its last ones, causal among themselves.

    Parameters
    ----------
    float_workspace_buffer : Tensor
        Scratch on the device of the calls, any dtype and contents.
    kv_layout : {"NHD", "HND"}
    use_cuda_graph : bool
        Keep the metadata in the three buffers below, which `plan()` writes in place. Any batch up
        to their capacity is taken; a captured `run()` replays after `plan()` or changes in place.
    use_tensor_cores : bool
        A hint without effect.
    paged_kv_indptr_buffer : Tensor, shape [capacity + 1], int32
    paged_kv_indices_buffer : Tensor, shape [max entries], int32
    paged_kv_last_page_len_buffer : Tensor, shape [capacity], int32
    backend : str
        FlashInfer's names are hints; "triton", "flashinfer" and "reference" choose.
    jit_args : None
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            buffers if use_cuda_graph else None,
            backend,
            jit_args,
        )
        self._use_tensor_cores = use_tensor_cores
        self._q_len = 1
        self._starts = RowStarts(self.device)

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was told."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Plan a step on the device, without waiting for it.

        Parameters
        ----------
        indptr, indices, last_page_len : Tensor, int32
            CSR page table, each on the host or on the device. A request without pages has no keys.
        q_data_type, kv_data_type : torch.dtype or str
            The cache's dtype defaults to q's.

        Raises
        ------
        ValueError, TypeError
            Before anything is written. `UnsupportedError` for semantics that are not supported.
        """
        self._plan_decode(
            StepMetadata(indptr, indices, last_page_len),
            q_len_per_req,
            *_dtypes(q_data_type, kv_data_type, data_type),
            o_data_type=o_data_type,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    begin_forward = plan

    def run(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike | None,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: KVCacheLike | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend one layer.

        Parameters
        ----------
        q : Tensor, shape [batch * q_len_per_req, num_qo_heads, head_dim]
            In graph mode also rows for more requests than planned, up to capacity: they give 0.
        paged_kv_cache : Tensor or (Tensor, Tensor)
            As `paged_attention`, or without the page dimension if page_size is 1. None is a
            profiling run.

        Returns
        -------
        out : Tensor
        lse : Tensor, shape [rows, num_qo_heads], float32
            Base 2; only with `return_lse`.
        """
        self._check_call(q, args, window_left, {"q_scale": q_scale, "kv_cache_sf": kv_cache_sf})
        if q_len_per_req is not None:
            warnings.warn(
                "q_len_per_req of run() is deprecated, give it to plan()",
                DeprecationWarning,
                stacklevel=2,
            )
        return self._attend(
            q,
            paged_kv_cache,
            self._requests(q.size(0), q_len_per_req),
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
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Run with arguments that replace the planned ones; deprecated in FlashInfer."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """Do as `forward` and return the LSE as well; deprecated in FlashInfer."""
        self._replan(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(
            q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
        )

    def _plan_decode(
        self,
        step: StepMetadata,
        q_len: int,
        q_data_type: DType | None,
        kv_data_type: DType | None,
        *,
        head_dim: int,
        copy: bool = True,
        **arguments: Any,
    ) -> None:
        if isinstance(q_len, bool) or not isinstance(q_len, int) or q_len < 1:
            raise ValueError(f"q_len_per_req must be an int of at least 1, got {q_len!r}")
        layers = LayerArguments.of(
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim,
            causal=True,
            **arguments,
        )
        step.check(self.device, layers.page_size)
        requests = step.batch_size if self._buffers is None else self._buffers.capacity
        self._plan(
            step,
            layers,
            rows=requests * q_len,
            max_q_len=q_len,
            qo_indptr=self._starts.get(requests, q_len),
            copy=copy,
        )
        self._q_len = q_len

    def _requests(self, rows: int, q_len: int | None) -> int:
        """Return how many requests the rows of q are for; each has the same number of rows."""
        batch = self._batch_size
        if self._buffers is not None:
            requests, rest = divmod(rows, self._q_len)
            if (
                rest
                or not batch <= requests <= self._buffers.capacity
                or q_len not in (None, self._q_len)
            ):
                raise ValueError(
                    f"q must have {self._q_len} rows for each of {batch} (planned) to "
                    f"{self._buffers.capacity} (capacity) requests, got {rows} rows and "
                    f"q_len_per_req={q_len}"
                )
            return requests
        if q_len is None:
            q_len = max(rows // batch, 1) if batch else 1
        if rows != batch * q_len:
            raise ValueError(
                f"q must have the same number of rows for each of {batch} planned requests, got "
                f"{rows} rows with q_len_per_req={q_len}"
            )
        if q_len != self._q_len:
            self._qo_indptr_buf = self._starts.get(batch, q_len)
            self._q_len = self._max_q_len = q_len
        return batch


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with `use_cuda_graph=True`, its buffers given first.

    Parameters
    ----------
    workspace_buffer : Tensor
    indptr_buffer : Tensor, shape [capacity + 1], int32
    indices_buffer : Tensor, shape [max entries], int32
    last_page_len_buffer : Tensor, shape [capacity], int32
    kv_layout : {"NHD", "HND"}
    use_tensor_cores : bool
        A hint without effect.
    """

    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """Plan a step whose metadata stands in the graph buffers already; they are only padded.

    Without `use_cuda_graph` it does what `plan()` does.
    """
    q_dtype, kv_dtype = _dtypes(q_data_type, kv_data_type, data_type)
    self._plan_decode(
        StepMetadata(indptr, indices, last_page_len),
        1,
        "float16" if q_dtype is None else q_dtype,
        kv_dtype,
        o_data_type=None,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        copy=False,
    )


def _dtypes(
    q_data_type: DType | None, kv_data_type: DType | None, data_type: DType | None
) -> tuple[DType | None, DType | None]:
    """Return the dtypes of q and the cache; the deprecated `data_type` stands in for None."""
    return (
        data_type if q_data_type is None else q_data_type,
        data_type if kv_data_type is None else kv_data_type,
    )
