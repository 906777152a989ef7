"""Paged attention in fp64, one request and one head group at a time: the oracle of this project.

Written to be read. It gathers the live keys of a request and nothing else, so whatever stands in
other pages or slots cannot matter, and computes softmax(q k^T * sm_scale) v in plain torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tritonattn.layout import PagedKVCache, PageTable

# Rows of a request are taken as many at a time as have so many logits: a long prompt's would not
# fit into memory.
MAX_LOGITS = 1 << 28


def gather(pages: Tensor, page_ids: Tensor, kv_len: int) -> Tensor:
    """Return the first `kv_len` tokens of `pages [num_pages, page_size, Hkv, D]`."""
    page_size = pages.size(1)
    used = page_ids[: -(-kv_len // page_size)].long()
    return pages[used].flatten(0, 1)[:kv_len]


def visible(q_len: int, kv_len: int, causal: bool, device: torch.device) -> Tensor:
    """Return the bool mask `[q_len, kv_len]`: query i stands at position kv_len - q_len + i."""
    position = torch.arange(q_len, device=device)[:, None] + (kv_len - q_len)
    key = torch.arange(kv_len, device=device)[None, :]
    return key <= position if causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    sm_scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend one request.

    Parameters
    ----------
    q : Tensor, shape [q_len, num_qo_heads, head_dim_qk]
    k, v : Tensor, shape [kv_len, num_kv_heads, head_dim]
    mask : Tensor, shape [q_len, kv_len], bool
        True where the key takes part.
    sm_scale : float
    dtype : torch.dtype
        Of weights and output. Below float64 this is no oracle but what a kernel with fp32 sums
        does: a second implementation, whose error is the measure of ours.

    Returns
    -------
    out : Tensor, shape [q_len, num_qo_heads, head_dim_vo], `dtype`
        0 where a row sees no key.
    lse : Tensor, shape [q_len, num_qo_heads], float32 or wider
        Natural log; -inf where a row sees no key.
    """
    wide = torch.promote_types(dtype, torch.float32)
    group = q.size(1) // k.size(1)
    k = k.to(wide).repeat_interleave(group, dim=1)
    v = v.to(dtype).repeat_interleave(group, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.to(wide), k) * sm_scale
    logits = logits.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.unsqueeze(-1)).masked_fill(~mask, 0.0)
    return torch.einsum("hqk,khd->qhd", weights.to(dtype), v), lse.transpose(0, 1)


def paged_attention(
    q: Tensor,
    cache: PagedKVCache,
    table: PageTable,
    qo_indptr: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    causal: bool,
    sm_scale: float,
    lse_base: str,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Write `out` and `lse` of every row that belongs to a request; leave the others untouched."""
    ends = qo_indptr.tolist()
    for request, kv_len in enumerate(table.kv_lens().tolist()):
        rows = slice(max(ends[request], 0), min(ends[request + 1], q.size(0)))
        if rows.stop <= rows.start:
            continue
        page_ids = table.row(request)
        k, v = (gather(pages, page_ids, kv_len) for pages in (cache.k, cache.v))
        mask = visible(rows.stop - rows.start, kv_len, causal, q.device)
        step = max(1, MAX_LOGITS // max(1, q.size(1) * kv_len))
        for first in range(rows.start, rows.stop, step):
            chunk = slice(first, min(first + step, rows.stop))
            seen = mask[first - rows.start : chunk.stop - rows.start]
            chunk_out, chunk_lse = attention(q[chunk], k, v, seen, sm_scale, dtype)
            out[chunk] = chunk_out.to(out.dtype)
            if lse is not None:
                unit = 1.0 if lse_base == "e" else math.log2(math.e)
                lse[chunk] = (chunk_lse * unit).to(lse.dtype)
