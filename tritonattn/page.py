"""Appending to a paged cache, with FlashInfer's names and arguments (`flashinfer.page`)."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonattn import block_checks as checks
from tritonattn.implementations import implementation
from tritonattn.layout import KVCacheLike, PagedKVCache, PageTable
from tritonattn.staging import values_are_checked


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: KVCacheLike,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values of new tokens to their positions in their requests.

    Parameters
    ----------
    append_key : Tensor, shape [nnz, num_kv_heads, head_dim_qk]
        The cache's dtype; any strides with a last stride of 1 (a slice of a fused projection).
    append_value : Tensor, shape [nnz, num_kv_heads, head_dim_vo]
    batch_indices : Tensor, shape [nnz], int32 or int64
        The request of each token; tokens of a negative one are skipped (padding). nnz may be 0.
    positions : Tensor, shape [nnz], int32 or int64
        The position of each token in its request. One beyond the request's pages is skipped
        (refused with `TRITONATTN_VALIDATE=1`).
    paged_kv_cache : a combined cache or a (k, v) tuple
    kv_indices : Tensor, shape [num_indices], int32 or int64
        Page ids of all requests, with pages for the new tokens.
    kv_indptr : Tensor, shape [batch + 1], int32 or int64
        Where each request's ids stand; `kv_indptr[0]` may differ from 0.
    kv_last_page_len : Tensor, shape [batch], int32 or int64
        Tokens in the last page of each request, the new ones included; read with
        `TRITONATTN_VALIDATE=1` only.
    kv_layout : "NHD" or "HND"

    Notes
    -----
    Asynchronous, on the current stream; can be captured in a CUDA graph.

    Raises
    ------
    ValueError, TypeError
        Before any launch, with the cache untouched. A dtype other than the cache's is a
        `TypeError`.
    """
    cache = checks.cache_of("paged_kv_cache", paged_kv_cache, kv_layout)
    index_tensors = {
        "batch_indices": batch_indices,
        "positions": positions,
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
        "kv_last_page_len": kv_last_page_len,
    }
    for name, tensor in index_tensors.items():
        checks.check_index(name, tensor, cache.device)
    nnz, batch_size = batch_indices.size(0), kv_last_page_len.size(0)
    if positions.size(0) != nnz:
        raise ValueError(
            f"batch_indices and positions must have one length, got {nnz} and {positions.size(0)}"
        )
    if kv_indptr.size(0) != batch_size + 1:
        raise ValueError(
            f"kv_indptr must have batch + 1 = {batch_size + 1} entries (kv_last_page_len names "
            f"{batch_size} requests), got {kv_indptr.size(0)}"
        )
    tokens = (append_key, append_value)
    checks.check_tokens(("append_key", "append_value"), *tokens, cache, "batch_indices", nnz)
    if values_are_checked(cache.device):
        _check_places(cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    if nnz:
        append = implementation("append", cache.device).append_to_table
        append(*tokens, cache, batch_indices, positions, kv_indices, kv_indptr)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the request and the position of each new token.

    Parameters
    ----------
    append_indptr : Tensor, shape [batch + 1], int32 or int64
        Row i of the new tokens belongs to the request b with `append_indptr[b] <= i <
        append_indptr[b + 1]`.
    seq_lens : Tensor, shape [batch], int32 or int64
        Length of each request, its new tokens included.
    nnz : int
        Rows to describe; may exceed `append_indptr[-1]` (a capacity).
    batch_indices, positions : Tensor, shape [>= nnz], int32, optional
        Written in place, in full, and returned.

    Returns
    -------
    batch_indices : Tensor, shape [nnz], int32
        -1 for rows of no request.
    positions : Tensor, shape [nnz], int32
        `i + seq_lens[b] - append_indptr[b + 1]` for row i of request b; 0 for rows of no request.

    Notes
    -----
    Nothing is read on the host; can be captured in a CUDA graph.
    """
    device = getattr(append_indptr, "device", torch.device("cpu"))
    checks.check_index("append_indptr", append_indptr, device)
    checks.check_index("seq_lens", seq_lens, device)
    batch_size = seq_lens.size(0)
    if append_indptr.size(0) != batch_size + 1:
        raise ValueError(
            f"append_indptr must have batch + 1 = {batch_size + 1} entries (seq_lens names "
            f"{batch_size} requests), got {append_indptr.size(0)}"
        )
    if nnz < 0:
        raise ValueError(f"nnz must be at least 0, got {nnz}")
    batch_indices = _out("batch_indices", batch_indices, nnz, device)
    positions = _out("positions", positions, nnz, device)

    append_indptr = append_indptr.long()
    rows = torch.arange(max(batch_indices.size(0), positions.size(0)), device=device)
    request = torch.searchsorted(append_indptr, rows, right=True) - 1
    live = (request >= 0) & (request < batch_size) & (rows < nnz)
    shift = torch.cat((seq_lens - append_indptr[1:], append_indptr.new_zeros(1)))
    at = torch.where(live, request, batch_size)
    batch_indices.copy_(torch.where(live, request, -1)[: batch_indices.size(0)])
    positions.copy_(torch.where(live, rows + shift[at], 0)[: positions.size(0)])
    return batch_indices, positions


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Return the length of each request; 0 without pages, whatever `kv_last_page_len` says.

    Parameters
    ----------
    kv_indptr : Tensor, shape [batch + 1], int32 or int64
    kv_last_page_len : Tensor, shape [batch], int32 or int64
    page_size : int

    Returns
    -------
    seq_lens : Tensor, shape [batch], int32
    """
    device = getattr(kv_indptr, "device", torch.device("cpu"))
    checks.check_index("kv_indptr", kv_indptr, device)
    checks.check_index("kv_last_page_len", kv_last_page_len, device)
    if kv_indptr.size(0) != kv_last_page_len.size(0) + 1:
        raise ValueError(
            f"kv_indptr must have batch + 1 = {kv_last_page_len.size(0) + 1} entries "
            f"(kv_last_page_len names {kv_last_page_len.size(0)} requests), got {kv_indptr.size(0)}"
        )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    pages = kv_indptr[1:] - kv_indptr[:-1]
    lengths = (pages - 1) * page_size + kv_last_page_len
    return torch.where(pages > 0, lengths, 0).int()


def _out(name: str, out: Tensor | None, nnz: int, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(nnz, dtype=torch.int32, device=device)
    checks.check_index(name, out, device)
    if out.dtype != torch.int32:
        raise TypeError(f"{name} is written in place and must be int32, got {out.dtype}")
    if out.size(0) < nnz:
        raise ValueError(f"{name} must have at least nnz = {nnz} entries, got {out.size(0)}")
    return out


def _check_places(
    cache: PagedKVCache,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Check the values of the metadata; reads them on the host."""
    lengths = kv_last_page_len.int()
    table = PageTable.csr(
        kv_indptr.int(), kv_indices.int(), lengths, cache.page_size, from_last_page_len=True
    )
    table.check_values(cache.num_pages)
    kv_lens = table.kv_lens().tolist()
    seen: set[tuple[int, int]] = set()
    for request, position in zip(batch_indices.tolist(), positions.tolist(), strict=True):
        if request < 0:
            continue
        if request >= len(kv_lens):
            raise ValueError(
                f"batch_indices names request {request}, allowed are 0 to {len(kv_lens) - 1}"
            )
        if not 0 <= position < kv_lens[request]:
            raise ValueError(
                f"positions names {position} of request {request}, which has "
                f"{kv_lens[request]} tokens"
            )
        if (request, position) in seen:
            raise ValueError(f"position {position} of request {request} is named twice or more")
        seen.add((request, position))
