"""What FlashInfer's plan/run classes have in common: a step planned once, run by every layer.

*Memory.* Partial states lie in the caller's workspace, whose contents never matter; wrappers that
share it take turns in stream order. The work lists of a planned step are memory of their own, so
another wrapper's `plan()` does not touch them.

*CUDA graphs.* `plan()` writes the fixed buffers in place; `run()` launches the device planner
itself, so a replay plans from what stands in the buffers then. A decode graph captured for g
requests reads views of the first g entries and serves any batch up to g; a prefill graph reads all
entries. Requests past the planned batch are padded to no queries or no keys: their rows give 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tritonattn import dispatch
from tritonattn.attention import paged_attention
from tritonattn.backends import BACKENDS, UnsupportedError, Workspace, get_backend
from tritonattn.layout import KVCacheLike, PageTable, check_layout
from tritonattn.plan import AttentionPlan
from tritonattn.spec import AttentionSpec, requested_features
from tritonattn.staging import is_capturing, to_device
from tritonattn.wrappers.arguments import (
    LayerArguments,
    check_kv_dtype,
    check_position_encoding,
    expand_page_dim,
)
from tritonattn.wrappers.metadata import GraphBuffers, StepMetadata

# FlashInfer's names: which of its kernels to use is a hint that means nothing here.
FLASHINFER_BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen", "cute-dsl")

_ALIGNMENT = 256  # bytes
_SHORT_QUERY = 8  # tokens; the queries with the largest partial states


class PagedAttentionWrapper:
    """Base of the decode and prefill wrappers."""

    # FlashInfer's names, which engines read: tensors of the planned step, or the graph buffers.
    _paged_kv_indptr_buf: Tensor | None = None
    _paged_kv_indices_buf: Tensor | None = None
    _paged_kv_last_page_len_buf: Tensor | None = None
    _qo_indptr_buf: Tensor | None = None

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        buffers: dict[str, Tensor | None] | None,  # of the graph, by argument name
        backend: str,
        jit_args: Any,
    ) -> None:
        check_layout(kv_layout)
        if backend not in (*FLASHINFER_BACKENDS, *BACKENDS):
            raise ValueError(
                f"backend must be one of {BACKENDS}, or of FlashInfer's {FLASHINFER_BACKENDS}, got "
                f"{backend!r}"
            )
        if jit_args is not None:
            raise UnsupportedError(
                "jit_args: custom attention variants are not supported, pass None"
            )
        self._set_workspace(float_workspace_buffer)
        self._kv_layout = kv_layout
        self._backend = backend
        self._dispatch = backend if backend in BACKENDS else "auto"
        self._buffers = None if buffers is None else GraphBuffers.of(self.device, **buffers)
        self._fixed_batch_size = 0 if self._buffers is None else self._buffers.capacity
        if self._buffers is not None:
            self._bind(self._buffers)
        self._layers: LayerArguments | None = None
        self._batch_size = 0
        self._max_q_len: int | None = None
        self._max_kv_len: int | None = None
        self._step: tuple[int, AttentionPlan] | None = None  # rows of q, the plan that layers share

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the step's metadata lives in fixed buffers."""
        return self._buffers is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None
    ) -> None:
        """Use another workspace on the same device; `int_workspace_buffer` is not needed here."""
        if float_workspace_buffer.device != self.device:
            raise ValueError(
                f"float_workspace_buffer must be on {self.device}, got "
                f"{float_workspace_buffer.device}"
            )
        self._set_workspace(float_workspace_buffer)
        self._step = None

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer."""

    def _set_workspace(self, buffer: Tensor) -> None:
        if not isinstance(buffer, Tensor):
            raise TypeError(
                f"float_workspace_buffer must be a torch.Tensor, got {type(buffer).__name__}"
            )
        if not buffer.is_contiguous():
            raise ValueError("float_workspace_buffer must be contiguous")
        raw = buffer.view(-1).view(torch.uint8)
        self._float_workspace_buffer = buffer
        # The work lists of a planned step are read by all its layers: they stay apart.
        self._workspace = Workspace(call=raw[-raw.data_ptr() % _ALIGNMENT :])
        self.device = buffer.device

    def _bind(self, tensors: GraphBuffers) -> None:
        self._paged_kv_indptr_buf = tensors.indptr
        self._paged_kv_indices_buf = tensors.indices
        self._paged_kv_last_page_len_buf = tensors.last_page_len
        self._qo_indptr_buf = tensors.qo_indptr

    def _plan(
        self,
        step: StepMetadata,
        layers: LayerArguments,
        *,
        rows: int | None,
        max_q_len: int | None,
        max_kv_len: int | None = None,
        qo_indptr: Tensor | None = None,
        copy: bool = True,
    ) -> None:
        """Take over a checked step, and plan it if its shape is known; raise before any write.

        `rows` is the number of rows of q, None if only the device knows. `qo_indptr` stands in for
        the step's.
        """
        spec = self._spec(step, layers, rows, max_q_len, max_kv_len)
        backend = dispatch.choose(spec, self._dispatch)
        self._check_scratch(spec, backend, max_q_len)
        if self._buffers is not None:
            self._buffers.check_room(step)
            self._write_buffers(step, copy)
        else:
            starts = step.qo_indptr if qo_indptr is None else qo_indptr
            assert starts is not None
            given = [step.indptr, step.indices, step.last_page_len, starts]
            self._bind(GraphBuffers(*to_device(given, self.device)))
        if qo_indptr is not None:
            self._qo_indptr_buf = qo_indptr
        self._layers, self._batch_size = layers, step.batch_size
        self._max_q_len, self._max_kv_len = max_q_len, max_kv_len
        self._step = None
        if self._buffers is None and rows and step.batch_size:
            plan = self._attention_plan(step.batch_size)
            plan.state(spec, backend)
            self._step = (rows, plan)

    def _write_buffers(self, step: StepMetadata, copy: bool) -> None:
        assert self._buffers is not None
        if copy:
            self._buffers.write(step)
        else:
            self._buffers.pad(step.batch_size)

    def _spec(
        self,
        step: StepMetadata,
        layers: LayerArguments,
        rows: int | None,
        max_q_len: int | None,
        max_kv_len: int | None,
    ) -> AttentionSpec:
        """Describe the layers' calls: what `AttentionPlan.spec` will make of them."""
        batch_size, indices = step.batch_size, step.indices
        if self._buffers is not None:
            batch_size, indices = self._buffers.capacity, self._buffers.indices
        total_q = batch_size if rows is None else rows
        capacity = indices.numel() * layers.page_size
        return AttentionSpec(
            device=self.device,
            q_dtype=layers.q_dtype,
            kv_dtype=layers.kv_dtype,
            num_qo_heads=layers.num_qo_heads,
            num_kv_heads=layers.num_kv_heads,
            head_dim_qk=layers.head_dim_qk,
            head_dim_vo=layers.head_dim_vo,
            page_size=layers.page_size,
            batch_size=batch_size,
            total_q=total_q,
            max_q_len=total_q if max_q_len is None else min(max_q_len, total_q),
            max_kv_len=capacity if max_kv_len is None else max_kv_len,
            is_csr=True,
            causal=layers.causal,
            features=requested_features(kv_dtype=layers.kv_dtype, **layers.masks()),
        )

    def _check_scratch(self, spec: AttentionSpec, backend: str, max_q_len: int | None) -> None:
        """Refuse a workspace that is too small, also for lengths that only the device knows."""
        bound = spec
        if max_q_len is None:
            total_q = max(spec.total_q, _SHORT_QUERY * spec.batch_size)
            bound = replace(spec, total_q=total_q, max_q_len=total_q)
        self._workspace.check(spec, get_backend(backend).workspace_bytes(bound))

    def _attention_plan(self, requests: int) -> AttentionPlan:
        """Describe the step to `paged_attention`; the device planner runs with its first layer."""
        layers = self._layers
        assert layers is not None
        assert self._paged_kv_indptr_buf is not None
        assert self._paged_kv_indices_buf is not None
        assert self._paged_kv_last_page_len_buf is not None
        assert self._qo_indptr_buf is not None
        table = PageTable.csr(
            self._paged_kv_indptr_buf[: requests + 1],
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf[:requests],
            layers.page_size,
            from_last_page_len=True,
        )
        return AttentionPlan(
            self._qo_indptr_buf[: requests + 1],
            table,
            causal=layers.causal,
            max_q_len=self._max_q_len,
            max_kv_len=0 if table.width == 0 else self._max_kv_len,
            workspace=self._workspace,
        )

    def _step_plan(self, requests: int, rows: int) -> AttentionPlan:
        """Return the plan for a call, shared between layers unless a graph must plan for itself."""
        if self._buffers is not None or is_capturing(self.device):
            return self._attention_plan(requests)
        if self._step is None or self._step[0] != rows:
            self._step = (rows, self._attention_plan(requests))
        return self._step[1]

    def _replan(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        causal: bool | None = None,
    ) -> None:
        """Change what `plan()` fixed, for all later calls, as FlashInfer's `forward` does."""
        check_position_encoding(pos_encoding_mode)
        layers = self._planned()
        if causal is not None and causal != layers.causal:
            self._step = None
        self._layers = replace(
            layers,
            causal=layers.causal if causal is None else causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
        )

    def _planned(self) -> LayerArguments:
        if self._layers is None:
            raise RuntimeError("plan() must be called before run()")
        return self._layers

    def _check_call(
        self, q: Tensor, args: tuple[Any, ...], window_left: int | None, neutral: dict[str, Any]
    ) -> None:
        """Check a call against its plan, and that arguments that are not supported are neutral."""
        layers = self._planned()
        if args:
            raise UnsupportedError(
                "positional arguments after paged_kv_cache belong to custom kernels, which are "
                f"not supported, got {len(args)}"
            )
        if not isinstance(q, Tensor) or q.dim() != 3:
            got = tuple(q.shape) if isinstance(q, Tensor) else type(q).__name__
            raise ValueError(f"q must be a tensor [rows, num_qo_heads, head_dim], got {got}")
        planned = (layers.num_qo_heads, layers.head_dim_qk)
        if tuple(q.shape[1:]) != planned:
            raise ValueError(
                f"q must have the planned heads and head_dim {planned}, got {tuple(q.shape[1:])}"
            )
        if q.dtype != layers.q_dtype:
            raise ValueError(f"q must have the planned q_data_type {layers.q_dtype}, got {q.dtype}")
        if window_left is not None and window_left != layers.window_left:
            raise ValueError(
                f"window_left must be the planned {layers.window_left}, got {window_left}"
            )
        for name, value in neutral.items():
            if value is not None and (isinstance(value, Tensor) or value != 1.0):
                raise UnsupportedError(f"{name} is not supported yet, leave it out")

    def _attend(
        self,
        q: Tensor,
        paged_kv_cache: KVCacheLike | None,
        requests: int,
        *,
        out: Tensor | None,
        lse: Tensor | None,
        **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run a checked call; `options` go to `paged_attention` as they are."""
        layers = self._planned()
        if paged_kv_cache is None:
            if out is None:
                out = q.new_empty((*q.shape[:2], layers.head_dim_vo))
            return paged_attention(q, None, out=out, lse=lse, return_lse=options["return_lse"])
        cache = expand_page_dim(paged_kv_cache, self._kv_layout)
        check_kv_dtype(cache, layers.kv_dtype)
        return paged_attention(
            q,
            cache,
            num_kv_heads=layers.num_kv_heads,
            page_size=layers.page_size,
            kv_layout=self._kv_layout,
            causal=layers.causal,
            sm_scale=layers.sm_scale,
            out=out,
            lse=lse,
            plan=self._step_plan(requests, q.size(0)),
            backend=self._dispatch,
            **layers.masks(),
            **options,
        )
