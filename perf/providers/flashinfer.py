"""FlashInfer's wrappers over paged caches: decode on CUDA cores and tensor cores, fa2, fa3."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tritonattn.backends.flashinfer import DECODE_GROUP_SIZES, HEAD_DIMS
from tritonattn.backends.flashinfer_package import import_problem
from tritonattn.perf.providers import (
    ATTENTION_KINDS,
    PEER,
    Call,
    Layer,
    Prepared,
    Provider,
    register,
)
from tritonattn.perf.steps import Step

WORKSPACE_BYTES = 256 << 20


def common_refusal(step: Step) -> str | None:
    """Return why no path of FlashInfer takes a step, or None."""
    if step.device.type != "cuda":
        return "FlashInfer needs CUDA tensors"
    if step.dtype == torch.float32:
        return "FlashInfer takes float16 and bfloat16, not float32"
    if step.head_dim not in HEAD_DIMS:
        return f"FlashInfer is right for head_dim {HEAD_DIMS} only, not {step.head_dim}"
    return import_problem()


def workspace(step: Step, size: int = WORKSPACE_BYTES) -> torch.Tensor:
    """Return zeroed scratch memory of its own for a wrapper."""
    return torch.zeros(size, dtype=torch.uint8, device=step.device)


def mask_options(step: Step) -> dict[str, Any]:
    """Return the options of a plan that say what the mask is, and the dtypes."""
    return {
        "window_left": step.case.window_left,
        "logits_soft_cap": step.case.logits_soft_cap,
        "q_data_type": step.dtype,
        "kv_data_type": step.dtype,
    }


def _heads(step: Step) -> tuple[int, int, int, int]:
    return step.num_qo_heads, step.num_kv_heads, step.head_dim, step.page_size


def _bind(wrapper: Any, layer: Layer) -> Call:
    return partial(wrapper.run, layer.q, layer.kv_cache, out=layer.out)


def _decode_refusal(step: Step) -> str | None:
    group = step.num_qo_heads // step.num_kv_heads
    if group not in DECODE_GROUP_SIZES:
        return f"FlashInfer's CUDA-core decode takes group sizes {DECODE_GROUP_SIZES}, not {group}"
    return common_refusal(step)


def _prepare_decode(step: Step, tensor_cores: bool) -> Prepared:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(step), step.kv_layout, use_tensor_cores=tensor_cores
    )
    table = (step.indptr, step.indices, step.last_page_len)
    plan = partial(wrapper.plan, *table, *_heads(step), **mask_options(step))
    return Prepared(partial(_bind, wrapper), plan)


def _prepare_prefill(step: Step, backend: str) -> Prepared:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(step), step.kv_layout, backend=backend
    )
    table = (step.qo_indptr, step.indptr, step.indices, step.last_page_len)
    options = mask_options(step) | {"causal": step.case.causal}
    plan = partial(wrapper.plan, *table, *_heads(step), **options)
    return Prepared(partial(_bind, wrapper), plan)


def _fa3_refusal(step: Step) -> str | None:
    if step.device.type == "cuda" and torch.cuda.get_device_capability(step.device)[0] != 9:
        return "FlashInfer's fa3 kernels are for compute capability 9"
    return common_refusal(step)


_DECODE = frozenset({"decode"})
# Decode goes through the prefill kernel of fa2 with tensor cores: that is flashinfer-tc.
_QUERIES = ATTENTION_KINDS - _DECODE

register(
    Provider("flashinfer", PEER, _DECODE, partial(_prepare_decode, tensor_cores=False),
             _decode_refusal)
)  # fmt: skip
register(
    Provider("flashinfer-tc", PEER, _DECODE, partial(_prepare_decode, tensor_cores=True),
             common_refusal)
)  # fmt: skip
register(
    Provider("flashinfer-fa2", PEER, _QUERIES, partial(_prepare_prefill, backend="fa2"),
             common_refusal)
)  # fmt: skip
register(
    Provider("flashinfer-fa3", PEER, _QUERIES, partial(_prepare_prefill, backend="fa3"),
             _fa3_refusal)
)  # fmt: skip
