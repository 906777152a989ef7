"""Checks of a call's arguments, before any launch; none of them reads a device value.

The exception is `check_values`, which `TRITONATTN_VALIDATE=1` switches on.
"""

from __future__ import annotations

import numbers
import operator

import torch
from torch import Tensor

from tritonattn.layout import PagedKVCache, PageTable, check_index_tensor
from tritonattn.spec import AttentionSpec, check_dtypes, check_head_dim, check_heads


def check_q(q: Tensor) -> None:
    """Check what can be said of q alone."""
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    if q.dim() != 3:
        raise ValueError(f"q must be [total_q, num_qo_heads, head_dim], got shape {tuple(q.shape)}")
    if q.size(2) > 1 and q.stride(2) != 1:
        raise ValueError(f"the last dimension of q must have stride 1, got {q.stride(2)}")


def check_geometry(q: Tensor, cache: PagedKVCache, table: PageTable) -> None:
    """Check that q, the cache and the metadata belong together."""
    for name, device in (("kv_cache", cache.device), ("the metadata", table.device)):
        if device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {device}")
    check_dtypes(q.dtype, cache.dtype)
    check_heads(q.size(1), cache.num_kv_heads)
    check_head_dim("head_dim of q", q.size(2))
    check_head_dim("head_dim of v", cache.head_dim_vo)
    if q.size(2) != cache.head_dim_qk:
        raise ValueError(
            f"q and k must have one head_dim, got {q.size(2)} and {cache.head_dim_qk}; "
            f"is kv_layout={cache.kv_layout!r} the cache's layout?"
        )
    if cache.page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {cache.page_size}")
    if table.page_size != cache.page_size:
        raise ValueError(
            f"the plan was made for page_size {table.page_size}, the cache has {cache.page_size}"
        )


def check_stated(cache: PagedKVCache, num_kv_heads: int | None, page_size: int | None) -> None:
    """Check what the caller states of the cache against the cache."""
    stated = (
        ("num_kv_heads", num_kv_heads, cache.num_kv_heads),
        ("page_size", page_size, cache.page_size),
    )
    for name, value, actual in stated:
        if value is not None and value != actual:
            raise ValueError(
                f"{name}={value} disagrees with the cache, which has {actual} as {cache.kv_layout}"
            )


def make_page_table(
    seq_lens: Tensor,
    block_table: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    page_size: int,
) -> PageTable:
    """Make the table from exactly one of its two forms."""
    check_index_tensor("seq_lens", seq_lens, getattr(seq_lens, "device", torch.device("cpu")))
    if (indptr is None) != (indices is None):
        raise ValueError("indptr and indices go together, got only one of them")
    if (block_table is None) == (indptr is None):
        given = "both" if indptr is not None else "neither"
        raise ValueError(f"exactly one of block_table and (indptr, indices) is needed, got {given}")
    if block_table is not None:
        return PageTable.dense(block_table, seq_lens, page_size)
    assert indptr is not None
    assert indices is not None
    return PageTable.csr(indptr, indices, seq_lens, page_size)


def check_qo_indptr(qo_indptr: Tensor, table: PageTable) -> None:
    """Check that qo_indptr names as many requests as the table."""
    check_index_tensor("qo_indptr", qo_indptr, table.device)
    if qo_indptr.numel() != table.batch_size + 1:
        raise ValueError(
            f"qo_indptr must have batch + 1 = {table.batch_size + 1} entries (seq_lens names "
            f"{table.batch_size} requests), got {qo_indptr.numel()}"
        )


def as_bound(name: str, bound: int | None) -> int | None:
    """Return an upper bound given on the host as an int; numpy's integers are accepted."""
    if bound is None:
        return None
    if isinstance(bound, bool) or not hasattr(bound, "__index__"):
        raise TypeError(f"{name} must be an int or None, got {type(bound).__name__}")
    bound = operator.index(bound)
    if bound < 0:
        raise ValueError(f"{name} must be at least 0, got {bound}")
    return bound


def as_scale(name: str, scale: object, default: float) -> float:
    """Return a factor given on the host as a float."""
    if scale is None:
        return default
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"{name} must be a float or None, got {type(scale).__name__}")
    return float(scale)


def check_has_pages(table: PageTable, total_q: int, max_kv_len: int | None) -> None:
    """Refuse queries over a table without room for a key, unless `max_kv_len=0` says so."""
    if total_q and table.batch_size and table.width == 0 and max_kv_len != 0:
        what = "indices has no entries" if table.is_csr else "block_table has no columns"
        raise ValueError(
            f"{what}, but there are {total_q} query tokens and a cache: pass max_kv_len=0 if no "
            "request has keys, or kv_cache=None for a profiling run"
        )


def make_results(
    q: Tensor, head_dim_vo: int, out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Check given outputs; make the missing ones, with 0 and -inf where no request writes."""
    shape = (q.size(0), q.size(1), head_dim_vo)
    if out is None:
        out = q.new_zeros(shape)
    else:
        _check_result("out", out, shape, q.dtype, q.device)
        if out.stride(2) != 1:
            raise ValueError(f"the last dimension of out must have stride 1, got {out.stride(2)}")
        if any(out.stride(i) == 0 and out.size(i) > 1 for i in (0, 1)):
            raise ValueError(f"out must not overlap itself, got strides {out.stride()}")
    if lse is not None:
        _check_result("lse", lse, shape[:2], torch.float32, q.device)
    elif return_lse:
        lse = torch.full(shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    return out, lse


def _check_result(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(tensor).__name__}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_values(
    spec: AttentionSpec, qo_indptr: Tensor, table: PageTable, cache: PagedKVCache
) -> None:
    """Check lengths and page ids where they live; reads them on the host."""
    ends = qo_indptr.long().cpu()
    lengths = ends[1:] - ends[:-1]
    if ends.numel() and (int(ends[0]) < 0 or int(ends[-1]) > spec.total_q):
        raise ValueError(
            f"qo_indptr spans [{int(ends[0])}, {int(ends[-1])}], q has {spec.total_q} rows"
        )
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"qo_indptr must not decrease, got {qo_indptr.tolist()}")
    if lengths.numel() and int(lengths.max()) > spec.max_q_len:
        raise ValueError(f"max_q_len is {spec.max_q_len}, a request has {int(lengths.max())}")
    # Requests without queries are padding: engines leave anything in their lengths.
    table.check_values(cache.num_pages, live=lengths > 0)
    longest = (
        int(table.kv_lens().where(lengths.to(table.device) > 0, 0).amax()) if len(lengths) else 0
    )
    if longest > spec.max_kv_len:
        raise ValueError(f"max_kv_len is {spec.max_kv_len}, a request has {longest} keys")
