"""Where keys and values live: one type for the cache, one for the page table.

A cache is seen as two strided views `k` and `v`, each `[num_pages, page_size, num_kv_heads,
head_dim]`, whatever the layout it was allocated in: everything below works on these views and their
strides. The layout is stated by the caller, never inferred: with two KV heads NHD and HND have the
same shape.

    combined NHD  [num_pages, 2, page_size, num_kv_heads, head_dim]
    combined HND  [num_pages, 2, num_kv_heads, page_size, head_dim]
    (k, v) tuple  the same without the dimension of size 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

KVCacheLike: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

KV_LAYOUTS = ("NHD", "HND")


def check_layout(kv_layout: str) -> None:
    """Raise `ValueError` unless `kv_layout` names a layout."""
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")


def check_index_tensor(name: str, tensor: Tensor, device: torch.device, ndim: int = 1) -> None:
    """Raise unless `tensor` is int32 metadata of `ndim` dimensions on `device`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.size(-1) > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def kernel_strides(view: Tensor) -> tuple[int, ...]:
    """Return the strides of all but the last dimension, 0 for dimensions of size 1.

    A size-1 dimension may carry any stride (torch leaves it degenerate). Its index is always 0, and
    a stride of 0 keeps the address arithmetic aligned, so that loads stay vectorised.
    """
    pairs = zip(view.stride()[:-1], view.shape[:-1], strict=True)
    return tuple(stride if size != 1 else 0 for stride, size in pairs)


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """A paged cache as two strided views; see the module docstring for the accepted forms."""

    k: Tensor  # [num_pages, page_size, num_kv_heads, head_dim_qk], any strides, last stride 1
    v: Tensor  # [num_pages, page_size, num_kv_heads, head_dim_vo], any strides, last stride 1
    kv_layout: str  # how the caller allocated it

    @classmethod
    def of(cls, kv_cache: KVCacheLike, kv_layout: str = "NHD") -> PagedKVCache:
        """View a combined tensor or a `(k, v)` tuple; refuse anything else."""
        check_layout(kv_layout)
        k, v = _split(kv_cache, kv_layout)
        if kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(kv_cache, tuple):
            _check_pair(k, v)
        for name, view in (("k", k), ("v", v)):
            if view.stride(3) != 1 and view.size(3) > 1:
                raise ValueError(
                    f"the last dimension of the {name} cache must have stride 1, "
                    f"got {view.stride(3)}"
                )
        return cls(k, v, kv_layout)

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.k.size(0)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.size(1)

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.k.size(2)

    @property
    def head_dim_qk(self) -> int:
        """Elements of a key."""
        return self.k.size(3)

    @property
    def head_dim_vo(self) -> int:
        """Elements of a value."""
        return self.v.size(3)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.k.device

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Geometry without strides: pages, page size, KV heads, key and value head dims."""
        return (*self.k.shape, self.v.size(3))


def _split(kv_cache: KVCacheLike, kv_layout: str) -> tuple[Tensor, Tensor]:
    inner = "page_size, num_kv_heads" if kv_layout == "NHD" else "num_kv_heads, page_size"
    if isinstance(kv_cache, tuple):
        if len(kv_cache) != 2 or not all(isinstance(t, Tensor) for t in kv_cache):
            raise TypeError("a kv_cache tuple must be (k, v), two tensors")
        for name, t in zip("kv", kv_cache, strict=True):
            if t.dim() != 4:
                raise ValueError(
                    f"{name} of a kv_cache tuple must be [num_pages, {inner}, head_dim] "
                    f"({kv_layout}), got shape {tuple(t.shape)}"
                )
        return kv_cache
    if not isinstance(kv_cache, Tensor):
        raise TypeError(
            f"kv_cache must be a tensor or a (k, v) tuple, got {type(kv_cache).__name__}"
        )
    if kv_cache.dim() != 5 or kv_cache.size(1) != 2:
        raise ValueError(
            f"kv_cache must be [num_pages, 2, {inner}, head_dim] ({kv_layout}), "
            f"got shape {tuple(kv_cache.shape)}"
        )
    k, v = kv_cache.unbind(1)
    return k, v


def _check_pair(k: Tensor, v: Tensor) -> None:
    """Check what a combined tensor has by itself."""
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "k and v must agree in pages, page size and heads, got "
            f"{tuple(k.shape)} and {tuple(v.shape)} (as [pages, page_size, heads, head_dim])"
        )
    if k.dtype != v.dtype:
        raise TypeError(f"k and v must have one dtype, got {k.dtype} and {v.dtype}")
    if k.device != v.device:
        raise ValueError(f"k and v must be on one device, got {k.device} and {v.device}")


@dataclass(frozen=True, slots=True)
class PageTable:
    """Which pages hold a request's tokens, in order: CSR (FlashInfer) or dense (engines).

    The length of a request comes from `seq_lens` (all keys) or from `last_page_len` (tokens in its
    last page). It never exceeds what the table's row can hold, and a request without pages has
    length 0.
    """

    page_ids: Tensor  # CSR: [num_entries]; dense: [batch, width]; int32, device
    indptr: Tensor | None  # CSR: [batch + 1] int32, device; None for a dense table
    lengths: Tensor  # [batch] int32, device: seq_lens or last_page_len
    page_size: int  # tokens
    from_last_page_len: bool = False

    @classmethod
    def dense(cls, block_table: Tensor, seq_lens: Tensor, page_size: int) -> PageTable:
        """Make a table of `[batch, width]` page ids; spare entries are never read."""
        check_index_tensor("seq_lens", seq_lens, seq_lens.device)
        check_index_tensor("block_table", block_table, seq_lens.device, ndim=2)
        _check_page_size(page_size)
        if block_table.size(0) != seq_lens.numel():
            raise ValueError(
                f"block_table must have one row per request: seq_lens names {seq_lens.numel()} "
                f"requests, block_table has {block_table.size(0)} rows"
            )
        return cls(block_table, None, seq_lens, page_size)

    @classmethod
    def csr(
        cls,
        indptr: Tensor,
        indices: Tensor,
        lengths: Tensor,
        page_size: int,
        *,
        from_last_page_len: bool = False,
    ) -> PageTable:
        """Make a table from `indptr`/`indices`; it may be a slice, with `indptr[0]` not 0."""
        name = "last_page_len" if from_last_page_len else "seq_lens"
        check_index_tensor(name, lengths, lengths.device)
        check_index_tensor("indptr", indptr, lengths.device)
        check_index_tensor("indices", indices, lengths.device)
        _check_page_size(page_size)
        if indptr.numel() != lengths.numel() + 1:
            raise ValueError(
                f"indptr must have batch + 1 = {lengths.numel() + 1} entries ({name} names "
                f"{lengths.numel()} requests), got {indptr.numel()}"
            )
        return cls(indices, indptr, lengths, page_size, from_last_page_len)

    @property
    def is_csr(self) -> bool:
        """Whether the rows are given by `indptr`."""
        return self.indptr is not None

    def addresses(self) -> tuple[int, ...]:
        """Return where its tensors lie."""
        tensors = (self.page_ids, self.indptr, self.lengths)
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)

    @property
    def batch_size(self) -> int:
        """Number of requests."""
        return self.lengths.numel()

    @property
    def device(self) -> torch.device:
        """Device of the metadata."""
        return self.lengths.device

    @property
    def width(self) -> int:
        """Most pages that one request can have: the row width, or all entries of a CSR table."""
        return self.page_ids.size(-1)

    @property
    def max_kv_len(self) -> int:
        """Most tokens that one request can have."""
        return self.width * self.page_size

    def kv_lens(self) -> Tensor:
        """Return `[batch]` int64 lengths, clamped to the table, on the device."""
        if self.indptr is None:
            pages = torch.full_like(self.lengths, self.width, dtype=torch.int64)
        else:
            ends = self.indptr.long().clamp(0, self.width)
            pages = (ends[1:] - ends[:-1]).clamp(min=0)
        if not self.from_last_page_len:
            return torch.minimum(self.lengths.long().clamp(min=0), pages * self.page_size)
        last = self.lengths.long().clamp(0, self.page_size)
        return torch.where(pages > 0, (pages - 1) * self.page_size + last, 0)

    def row(self, request: int) -> Tensor:
        """Return the page ids of one request, surplus ids included (reads `indptr` on the host)."""
        if self.indptr is None:
            return self.page_ids[request]
        begin, end = int(self.indptr[request]), int(self.indptr[request + 1])
        return self.page_ids[max(begin, 0) : max(end, 0)]

    def check_values(self, num_pages: int, live: Tensor | None = None) -> None:
        """Raise `ValueError` where values contradict each other; reads them on the host.

        `live` ([batch] bool, CPU) leaves out padded requests, whose lengths and pages may be
        anything.
        """
        lengths = self.lengths.long().cpu()
        live = torch.ones_like(lengths, dtype=torch.bool) if live is None else live
        if self.indptr is None:
            pages = torch.full_like(lengths, self.width)
        else:
            ends = self.indptr.long().cpu()
            pages = ends[1:] - ends[:-1]
            _refuse(pages < 0, "indptr decreases", pages)
            if ends.numel() and (int(ends[0]) < 0 or int(ends[-1]) > self.width):
                raise ValueError(
                    f"indptr spans [{int(ends[0])}, {int(ends[-1])}], indices has "
                    f"{self.width} entries"
                )
        _refuse((lengths < 0) & live, "negative length", lengths)
        if self.from_last_page_len:
            too_long = (lengths > self.page_size) & (pages > 0)
            _refuse(too_long & live, f"last_page_len > page_size {self.page_size}", lengths)
        else:
            too_long = lengths > pages * self.page_size
            _refuse(too_long & live, "seq_lens exceeds its row of the table", lengths)
        kv_lens = self.kv_lens().tolist()
        for request in live.nonzero().flatten().tolist():
            used = self.row(request)[: -(-kv_lens[request] // self.page_size)]
            if used.numel() and (int(used.min()) < 0 or int(used.max()) >= num_pages):
                raise ValueError(
                    f"request {request} names pages from {int(used.min())} to {int(used.max())}, "
                    f"the cache has pages 0 to {num_pages - 1}"
                )


def _check_page_size(page_size: int) -> None:
    if not isinstance(page_size, int):
        raise TypeError(f"page_size must be an int, got {type(page_size).__name__}")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")


def _refuse(bad: Tensor, what: str, values: Tensor) -> None:
    if bool(bad.any()):
        request = int(bad.nonzero()[0])
        raise ValueError(f"{what}: request {request} has {int(values[request])}")
