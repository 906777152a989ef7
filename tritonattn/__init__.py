"""Paged attention and KV-cache block operations as Triton kernels over FlashInfer's cache layout.

`attention` the functional API, `wrappers` FlashInfer-shaped classes, `block_ops` and `page` cache bytes,
`merge` attention states, `diff` comparison of numbers. Below them: `layout` (cache and page table), `spec` and
`checks`, `plan`, `dispatch`, `backends`, `reference` (torch twins), and `kernels`.
"""

import logging

from tritonattn.attention import explain, paged_attention, plan_attention

__version__ = "0.1.0"

__all__ = [
    "explain",
    "paged_attention",
    "plan_attention",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
