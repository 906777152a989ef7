"""Paged attention and KV-cache block operations as Triton kernels over FlashInfer's cache layout.

`attention` the functional API, `decode`, `prefill` and `cascade` FlashInfer's modules, `block_ops`
and `page` cache bytes, `merge` attention states, `diff` comparison of numbers. Below them: `layout`
(cache and page table), `spec` and `checks`, `plan`, `dispatch`, `backends`, `reference` (torch
twins), and `kernels`.
"""

import logging

from tritonattn import cascade, decode, page, prefill
from tritonattn.attention import explain, paged_attention, plan_attention
from tritonattn.block_ops import (
    copy_blocks,
    gather_blocks,
    reshape_and_cache,
    swap_blocks,
    zero_blocks,
)
from tritonattn.buffers import PipelineBuffers
from tritonattn.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from tritonattn.diff import DiffReport, compare
from tritonattn.dispatch import load_policy, use_backend
from tritonattn.merge import merge_state, merge_state_in_place, merge_states
from tritonattn.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from tritonattn.prefill import BatchPrefillWithPagedKVCacheWrapper

__version__ = "0.1.0"

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "DiffReport",
    "PipelineBuffers",
    "append_paged_kv_cache",
    "cascade",
    "compare",
    "copy_blocks",
    "decode",
    "explain",
    "fast_decode_plan",
    "gather_blocks",
    "get_batch_indices_positions",
    "get_seq_lens",
    "load_policy",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "page",
    "paged_attention",
    "plan_attention",
    "prefill",
    "reshape_and_cache",
    "swap_blocks",
    "use_backend",
    "zero_blocks",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
