"""FlashInfer's less known paths: XQA, BatchAttention, BatchPOD and cuDNN."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tritonattn.backends.flashinfer import XQA_PAGE_SIZES
from tritonattn.backends.flashinfer_wrappers import XQA_WORKSPACE_BYTES
from tritonattn.perf.providers import PEER, Call, Layer, Prepared, Provider, register
from tritonattn.perf.providers.flashinfer import common_refusal, mask_options, workspace
from tritonattn.perf.steps import Step

POD_WORKSPACE_BYTES = 128 << 20
# Of BatchAttention, for head_dim 128; more need more shared memory than there is.
MAX_BATCH_ATTENTION_KV_HEADS = 10


def _xqa_refusal(step: Step) -> str | None:
    if min(step.q_lens) != max(step.q_lens):
        return "XQA takes one query length for all requests"
    if step.page_size not in XQA_PAGE_SIZES:
        return f"XQA takes page sizes {XQA_PAGE_SIZES}, not {step.page_size}"
    if step.case.features:
        return f"XQA is not set up for {step.case.features} here"
    return common_refusal(step)


def _prepare_xqa(step: Step) -> Prepared:
    import flashinfer

    scratch = workspace(step, XQA_WORKSPACE_BYTES)
    q_len = step.max_q_len
    mask = _lower_triangle(step) if q_len > 1 else None

    def bind(layer: Layer) -> Call:
        return partial(
            flashinfer.decode.trtllm_batch_decode_with_kv_cache,
            layer.q,
            layer.kv_cache,
            scratch,
            step.block_table,
            step.seq_lens,
            step.max_kv_len,
            bmm1_scale=step.sm_scale,
            bmm2_scale=1.0,
            out=layer.out,
            kv_layout=step.kv_layout,
            backend="xqa",
            q_len_per_req=q_len,
            mask=mask,
        )

    return Prepared(bind)


def _lower_triangle(step: Step) -> torch.Tensor:
    """Return the causal mask between a request's queries: one bit a key, rows of 32-bit words."""
    rows = [(2 << i) - 1 for i in range(step.max_q_len)]
    words = -(-step.max_q_len // 32)
    halves = [[(row >> (16 * i)) & 0xFFFF for i in range(2 * words)] for row in rows]
    mask = torch.tensor(halves, dtype=torch.int32).to(torch.uint16)
    return mask.expand(step.batch_size, -1, -1).contiguous().to(step.device)


def _batch_refusal(step: Step) -> str | None:
    if step.head_dim != 128 or step.num_kv_heads > MAX_BATCH_ATTENTION_KV_HEADS:
        return (
            f"BatchAttention takes head_dim 128 and at most {MAX_BATCH_ATTENTION_KV_HEADS} KV "
            f"heads here, not {step.head_dim} and {step.num_kv_heads}"
        )
    if step.case.window_left >= 0:
        return "BatchAttention has no sliding window"
    return common_refusal(step)


def _prepare_batch(step: Step) -> Prepared:
    import flashinfer

    wrapper = flashinfer.BatchAttention(step.kv_layout, str(step.device))
    lse = torch.empty(step.layers[0].q.shape[:2], dtype=torch.float32, device=step.device)
    options: dict[str, Any] = mask_options(step) | {"causal": step.case.causal}
    del options["window_left"]
    dims = (step.num_qo_heads, step.num_kv_heads, step.head_dim, step.head_dim, step.page_size)
    table = (step.qo_indptr, step.indptr, step.indices, step.seq_lens)

    def bind(layer: Layer) -> Call:
        run = partial(wrapper.run, layer.q, layer.kv_cache, out=layer.out, lse=lse)
        return lambda: run()[0]

    return Prepared(bind, partial(wrapper.plan, *table, *dims, **options))


def _pod_refusal(step: Step) -> str | None:
    decodes = sum(length == 1 for length in step.q_lens)
    if not 0 < decodes < step.batch_size or any(length != 1 for length in step.q_lens[:decodes]):
        return "POD takes decodes first and prompts behind them, some of both"
    if step.case.features or not step.case.causal:
        return "POD is set up for plain causal attention here"
    return common_refusal(step)


def _prepare_pod(step: Step) -> Prepared:
    import flashinfer

    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(
        workspace(step, POD_WORKSPACE_BYTES), step.kv_layout
    )
    decodes = sum(length == 1 for length in step.q_lens)
    first_page = int(step.indptr[decodes])
    prompts = (
        step.qo_indptr[decodes:] - decodes,
        step.indptr[decodes:] - first_page,
        step.indices[first_page:],
        step.last_page_len[decodes:],
    )
    tokens = (
        step.qo_indptr[: decodes + 1],
        step.indptr[: decodes + 1],
        step.indices[:first_page],
        step.last_page_len[:decodes],
    )
    heads = (step.num_qo_heads, step.num_kv_heads, step.head_dim, step.page_size)
    dtypes = {"q_data_type": step.dtype, "kv_data_type": step.dtype}

    def bind(layer: Layer) -> Call:
        run = partial(
            wrapper.run, layer.q[decodes:], layer.kv_cache, layer.q[:decodes], layer.kv_cache,
            causal_p=True,
        )  # fmt: skip

        def call() -> list[torch.Tensor]:
            out_prompts, out_decodes = run()
            return [out_decodes, out_prompts]

        return call

    return Prepared(bind, partial(wrapper.plan, *prompts, *tokens, *heads, **dtypes))


def _cudnn_refusal(step: Step) -> str | None:
    if step.kv_layout != "NHD":
        # Its cache of graphs ignores strides: one layout a process.
        return "FlashInfer's cuDNN path keeps graphs of one layout: only NHD is measured"
    if step.case.features:
        return f"FlashInfer's cuDNN path is not set up for {step.case.features} here"
    return common_refusal(step)


def _prepare_cudnn(step: Step) -> Prepared:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(step), "NHD", backend="cudnn"
    )
    plan = partial(
        wrapper.plan,
        # In elements, as no other path has it.
        step.qo_indptr * (step.num_qo_heads * step.head_dim),
        step.indptr,
        step.indices,
        step.last_page_len,
        step.num_qo_heads,
        step.num_kv_heads,
        step.head_dim,
        step.page_size,
        causal=step.case.causal,
        sm_scale=step.sm_scale,
        q_data_type=step.dtype,
        kv_data_type=step.dtype,
        seq_lens=step.seq_lens,
        seq_lens_q=step.qo_indptr.diff(),
        block_tables=step.block_table,
        max_token_per_sequence=step.max_q_len,
        max_sequence_kv=step.max_kv_len,
    )

    def bind(layer: Layer) -> Call:
        # It says NHD and reads HND.
        k, v = (half.transpose(1, 2) for half in layer.kv_cache.unbind(1))
        return partial(wrapper.run, layer.q, (k, v), out=layer.out)

    return Prepared(bind, plan)


register(
    Provider("flashinfer-xqa", PEER, frozenset({"decode", "speculative"}), _prepare_xqa,
             _xqa_refusal)
)  # fmt: skip
register(
    Provider("flashinfer-batch", PEER, frozenset({"decode", "prefill", "mixed", "speculative"}),
             _prepare_batch, _batch_refusal)
)  # fmt: skip
register(Provider("flashinfer-pod", PEER, frozenset({"mixed"}), _prepare_pod, _pod_refusal))
register(Provider("flashinfer-cudnn", PEER, frozenset({"prefill"}), _prepare_cudnn, _cudnn_refusal))
