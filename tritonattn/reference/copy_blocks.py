"""Torch twin of `kernels/copy_blocks.py`: same arguments, in loops over pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritonattn.layout import PagedKVCache


def copy_blocks(
    sources: Sequence[PagedKVCache],
    targets: Sequence[PagedKVCache],
    src_ids: Tensor,
    dst_ids: Tensor | None,
) -> None:
    """Copy pages of each source cache into its target; pairs outside their pools are skipped.

    Without `dst_ids` the i-th source page goes to page i, and one outside the pool gives zeros.
    """
    ids = src_ids.tolist()
    for i, src in enumerate(ids):
        dst = i if dst_ids is None else int(dst_ids[i])
        exists = src in range(sources[0].num_pages)
        if dst not in range(targets[0].num_pages) or not (exists or dst_ids is None):
            continue
        for source, target in zip(sources, targets, strict=True):
            target.k[dst] = source.k[src] if exists else 0
            target.v[dst] = source.v[src] if exists else 0
