"""Attention calls as data, and their inputs: what tests, `tritonattn diff` and the sweeps share.

Inputs are drawn once from a seeded generator, in the dtype of the case. Pages stand in random
order, and all that a kernel must not read (unused pages, slots past a request's end, spare table
entries) is poisoned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tritonattn.checks import make_page_table
from tritonattn.layout import KVCacheLike, PagedKVCache
from tritonattn.reference import attention as reference
from tritonattn.spec import DTYPE_NAMES

STORAGES = ("combined", "tuple", "padded", "cross_layer", "interleaved")
SPARE_PAGES = 3
SPARE_ROWS = 2


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The static facts and lengths of one `paged_attention` call."""

    q_lens: tuple[int, ...]  # tokens
    kv_lens: tuple[int, ...]  # tokens, the new ones included
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int | None = None  # another value needs storage="tuple"
    page_size: int = 16  # tokens
    kv_layout: Literal["NHD", "HND"] = "NHD"
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    table: Literal["dense", "csr"] = "dense"
    storage: Literal["combined", "tuple", "padded", "cross_layer", "interleaved"] = "combined"

    def __str__(self) -> str:
        """Return an id such as `b4-q1-kv97-p16-h32/8-d128-bf16-NHD-dense-combined-causal`."""
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_vo}" if self.head_dim_vo else "")
        return (
            f"b{len(self.q_lens)}-q{max(self.q_lens, default=0)}-kv{max(self.kv_lens, default=0)}"
            f"-p{self.page_size}-h{self.num_qo_heads}/{self.num_kv_heads}-{dims}"
            f"-{DTYPE_NAMES[self.dtype]}-{self.kv_layout}-{self.table}-{self.storage}"
            f"-{'causal' if self.causal else 'full'}"
        )


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The tensors of a case; `arguments()` is what `paged_attention` takes."""

    q: Tensor  # [total_q + SPARE_ROWS, num_qo_heads, head_dim]
    kv_cache: KVCacheLike
    qo_indptr: Tensor  # [batch + 1] int32
    seq_lens: Tensor  # [batch] int32
    table: dict[str, Tensor]  # block_table, or indptr and indices
    kv_layout: str
    causal: bool

    def metadata(self) -> dict[str, Any]:
        """Return the keyword arguments that describe the batch."""
        return {
            "qo_indptr": self.qo_indptr,
            "seq_lens": self.seq_lens,
            "causal": self.causal,
            **self.table,
        }

    def arguments(self) -> dict[str, Any]:
        """Return all arguments of a `paged_attention` call."""
        stated = {"q": self.q, "kv_cache": self.kv_cache, "kv_layout": self.kv_layout}
        return {**stated, **self.metadata()}

    def last_page_table(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return a dense table as FlashInfer's classes take it: indptr, indices, last_page_len."""
        page_size = PagedKVCache.of(self.kv_cache, self.kv_layout).page_size
        pages = (self.seq_lens + page_size - 1) // page_size
        block_table = self.table["block_table"]
        used = torch.arange(block_table.size(1), device=pages.device) < pages[:, None]
        indptr = torch.cat((pages.new_zeros(1), pages.cumsum(0))).int()
        return indptr, block_table[used], self.seq_lens - (pages - 1).clamp(min=0) * page_size

    def unpoisoned(self) -> AttentionInputs:
        """Return the same call with 0 in place of NaN, for peers that read unused slots."""
        cache = self.kv_cache
        if isinstance(cache, tuple):
            return replace(self, kv_cache=(cache[0].nan_to_num(), cache[1].nan_to_num()))
        return replace(self, kv_cache=cache.nan_to_num())


def empty_cache(
    case: AttentionCase, num_pages: int, device: torch.device | str, fill: float = math.nan
) -> KVCacheLike:
    """Allocate a cache of `num_pages` in the case's layout and storage, filled with `fill`."""
    inner = (case.page_size, case.num_kv_heads)
    if case.kv_layout == "HND":
        inner = (case.num_kv_heads, case.page_size)

    def full(*shape: int) -> Tensor:
        return torch.full(shape, fill, dtype=case.dtype, device=device)

    dim = case.head_dim
    if case.storage == "tuple":
        return full(num_pages, *inner, dim), full(num_pages, *inner, case.head_dim_vo or dim)
    if case.storage == "padded":
        return full(num_pages, 2, inner[0] + 1, inner[1], dim)[:, :, : inner[0]]
    if case.storage == "cross_layer":
        return full(num_pages, 3, 2, *inner, dim)[:, 1]
    if case.storage == "interleaved":
        return full(num_pages, *inner, 2, dim).permute(0, 3, 1, 2, 4)
    return full(num_pages, 2, *inner, dim)


def make_inputs(
    case: AttentionCase, device: torch.device | str = "cpu", seed: int = 0
) -> AttentionInputs:
    """Draw the inputs of a case.

    Parameters
    ----------
    case : AttentionCase
    device : torch.device or str
    seed : int

    Returns
    -------
    AttentionInputs
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.to(case.dtype)

    pages = [-(-length // case.page_size) for length in case.kv_lens]
    num_pages = sum(pages) + SPARE_PAGES
    order = torch.randperm(num_pages, generator=generator, device=device).int()
    rows = list(torch.split(order[: sum(pages)], pages))
    spare = order[sum(pages) :]

    kv_cache = empty_cache(case, num_pages, device)
    views = PagedKVCache.of(kv_cache, case.kv_layout)
    for row, length in zip(rows, case.kv_lens, strict=True):
        token = torch.arange(length, device=device)
        at = (row[token // case.page_size].long(), token % case.page_size)
        views.k[at] = randn(length, case.num_kv_heads, case.head_dim)
        views.v[at] = randn(length, case.num_kv_heads, case.head_dim_vo or case.head_dim)

    ends = [0]
    for q_len in case.q_lens:
        ends.append(ends[-1] + q_len)
    q = randn(ends[-1] + SPARE_ROWS, case.num_qo_heads, case.head_dim)
    return AttentionInputs(
        q=q,
        kv_cache=kv_cache,
        qo_indptr=torch.tensor(ends, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(case.kv_lens, dtype=torch.int32, device=device),
        table=_dense(rows, device) if case.table == "dense" else _csr(rows, spare),
        kv_layout=case.kv_layout,
        causal=case.causal,
    )


def reference_results(
    inputs: AttentionInputs, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Compute a call in plain torch.

    Parameters
    ----------
    inputs : AttentionInputs
    dtype : torch.dtype
        float64 gives the oracle, not rounded to q's dtype; q's own dtype gives a second
        implementation where no peer takes a case.

    Returns
    -------
    out : Tensor, shape [total_q, num_qo_heads, head_dim_vo], `dtype`
        Padding rows are 0.
    lse : Tensor, shape [total_q, num_qo_heads], float64 for the oracle, else float32
        Log2 units; padding rows are -inf.
    """
    cache = PagedKVCache.of(inputs.kv_cache, inputs.kv_layout)
    tables = {"block_table": None, "indptr": None, "indices": None, **inputs.table}
    out = inputs.q.new_zeros((*inputs.q.shape[:2], cache.head_dim_vo), dtype=dtype)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    lse = inputs.q.new_full(inputs.q.shape[:2], -math.inf, dtype=lse_dtype)
    reference.paged_attention(
        inputs.q,
        cache,
        make_page_table(inputs.seq_lens, page_size=cache.page_size, **tables),
        inputs.qo_indptr,
        out,
        lse,
        causal=inputs.causal,
        sm_scale=cache.head_dim_qk**-0.5,
        lse_base="log2",
        dtype=dtype,
    )
    return out, lse


def _dense(rows: list[Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Make a table one column wider than any request needs, -1 past a request's pages."""
    width = max((row.numel() for row in rows), default=0) + 1
    block_table = torch.full((len(rows), width), -1, dtype=torch.int32, device=device)
    for request, row in enumerate(rows):
        block_table[request, : row.numel()] = row
    return {"block_table": block_table}


def _csr(rows: list[Tensor], spare: Tensor) -> dict[str, Tensor]:
    """Make a slice of a larger table (indptr[0] != 0), every other row with a surplus page."""
    parts, ends = [spare], [spare.numel()]
    for request, row in enumerate(rows):
        surplus = spare[:1] if request % 2 else spare[:0]
        parts += [row, surplus]
        ends.append(ends[-1] + row.numel() + surplus.numel())
    indptr = torch.tensor(ends, dtype=torch.int32, device=spare.device)
    return {"indptr": indptr, "indices": torch.cat(parts)}
