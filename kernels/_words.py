"""Pages as words: what the kernels that move whole pages share, on the device and on the host.

A page of K or of V is up to two outer dimensions of contiguous runs. Bytes are moved, not numbers,
so runs are taken in the widest words (and vectors of words) that every address allows, whatever the
dtype. Word w of a page stands at

    (row // INNER) * stride_outer + (row % INNER) * stride_inner + w % RUN,   row = w // RUN

NHD and HND, a padded page, a layer of a larger pool and interleaved K and V are all of this form. A
cache of one token a page, or with its heads side by side, is one run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonattn.kernels._config import pow2_ceil

# What one program moves: with 128 threads 16 KiB are eight 16-byte vectors in flight per thread.
_TILE_BYTES = 16384
_MAX_TILE_WORDS = 4096
_VECTOR_BYTES = 16

_WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def page_words(address, page, stride_page, WORD: tl.constexpr, VEC_BYTES: tl.constexpr):
    """Return a page's address as a pointer to words; `address` and `stride_page` in bytes."""
    start = address.to(tl.int64) + page.to(tl.int64) * stride_page
    return tl.multiple_of(start.to(tl.pointer_type(WORD)), VEC_BYTES)


@triton.jit
def word_offsets(
    words,
    stride_outer,
    stride_inner,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    RUN: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return where the words of a page stand, in words from its start; they come VEC at a time."""
    if ROWS == 1:
        offs = words
    else:
        row = words // RUN
        offs_outer = (row // INNER).to(tl.int64) * stride_outer
        offs_inner = (row % INNER).to(tl.int64) * stride_inner
        offs = offs_outer + offs_inner + words % RUN
    return tl.max_contiguous(tl.multiple_of(offs, VEC), VEC)


@dataclass(frozen=True, slots=True)
class PageShape:
    """A page of one or more equally shaped views: `outer x inner` runs of contiguous bytes."""

    outer: int
    inner: int
    run: int  # bytes
    strides: tuple[tuple[int, int, int], ...]  # of each view: page, outer, inner; bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of a page of one view."""
        return self.outer * self.inner * self.run


@dataclass(frozen=True, slots=True)
class Planes:
    """Views that one launch can serve: the same page shape, any addresses."""

    shape: PageShape
    word: int  # bytes
    vector: int  # bytes
    addresses: tuple[tuple[int, ...], ...]  # of each plane: one for each of its views

    @property
    def strides(self) -> list[int]:
        """Of each view, as the kernels take them: page stride (bytes), outer and inner (words)."""
        in_words = [(page, o // self.word, i // self.word) for page, o, i in self.shape.strides]
        return [stride for view in in_words for stride in view]

    @property
    def chunks(self) -> int:
        """Programs for one page."""
        return -(-self.shape.num_bytes // (self.word * self._block))

    @property
    def _block(self) -> int:
        words = min(_TILE_BYTES // self.word, _MAX_TILE_WORDS)
        return min(words, pow2_ceil(self.shape.num_bytes // self.word))

    @property
    def constants(self) -> dict[str, Any]:
        """The constexprs and launch options that all these kernels take."""
        bytes_per_warp = 4 * 32 * _VECTOR_BYTES
        return {
            "ROWS": self.shape.outer * self.shape.inner,
            "INNER": self.shape.inner,
            "RUN": self.shape.run // self.word,
            "CHUNKS": self.chunks,
            "WORD": _WORD_TYPES[self.word],
            "VEC_BYTES": self.vector,
            "VEC": self.vector // self.word,
            "BLOCK": self._block,
            "num_warps": max(1, min(4, self._block * self.word // bytes_per_warp)),
        }


def group_planes(planes: Sequence[tuple[Tensor, ...]]) -> list[Planes]:
    """Group planes by page shape: one group, thus one launch, for the caches of a usual model.

    Parameters
    ----------
    planes : sequence of tuple of Tensor, shape [pages, page_size, num_kv_heads, head_dim]
        A plane is K or V of a cache, or that of a source and that of a target: its views have equal
        shapes but for the number of pages.
    """
    # Few distinct strides stand for many planes; equal page shapes meet after that.
    alike: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    for views in planes:
        alike.setdefault((*(view.stride() for view in views), views[0].size(3)), []).append(views)
    groups: dict[PageShape, list[tuple[int, ...]]] = {}
    for (*strides, _), group in alike.items():
        shapes = tuple(view.shape for view in group[0])
        shape = _page_shape(shapes, tuple(strides), group[0][0].element_size())
        addresses = [tuple(view.data_ptr() for view in views) for views in group]
        groups.setdefault(shape, []).extend(addresses)
    found = []
    for shape, addresses in groups.items():
        steps = [stride for view in shape.strides for stride in view]
        flat = [address for plane in addresses for address in plane]
        vector = math.gcd(_VECTOR_BYTES, shape.run, *steps, *flat)
        found.append(Planes(shape, min(vector, 8), vector, tuple(addresses)))
    return found


@functools.lru_cache(maxsize=4096)
def _page_shape(
    shapes: tuple[tuple[int, ...], ...], strides: tuple[tuple[int, ...], ...], itemsize: int
) -> PageShape:
    """Merge the dimensions of a page from the inside out, where all views agree."""
    shape = shapes[0][1:]
    # A page stride that is never used (one page) must not decide about groups and words.
    strides = tuple(
        view if full[0] > 1 else (0, *view[1:]) for full, view in zip(shapes, strides, strict=True)
    )
    steps_of = [[view[i + 1] * itemsize for view in strides] for i in range(len(shape))]
    *outside, last = [(size, steps) for size, steps in zip(shape, steps_of, strict=True)]
    dims = [dim for dim in (last, *sorted(outside, key=lambda dim: dim[1])) if dim[0] != 1]
    run = itemsize
    rows: list[tuple[int, list[int]]] = []  # innermost first
    for size, steps in dims:
        if not rows and all(step == run for step in steps):
            run *= size
        elif rows and steps == [step * rows[-1][0] for step in rows[-1][1]]:
            rows[-1] = (size * rows[-1][0], rows[-1][1])
        else:
            rows.append((size, steps))
    # The last dimension is contiguous (or has one element), so at most two are left.
    assert len(rows) <= 2, (shape, strides)
    (inner, inner_steps), (outer, outer_steps) = (*rows, *[(1, [0] * len(strides))] * 2)[:2]
    by_view = zip((view[0] * itemsize for view in strides), outer_steps, inner_steps, strict=True)
    return PageShape(outer, inner, run, tuple(by_view))


_TABLES: dict[tuple[torch.device, tuple[tuple[int, ...], ...]], Tensor] = {}


def address_table(addresses: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return the addresses of planes as int64 on the device, plane by plane.

    On a GPU a table is made (8 bytes an entry, with one synchronization) the first time that a set
    of caches is used, and kept for good: it is a pure function of its key, and a captured graph may
    hold its address. If the first time is within a capture, the graph gets a table of its own,
    which each replay writes anew from the launches' own arguments.
    """
    if device.type != "cuda":
        return torch.tensor(addresses, dtype=torch.int64, device=device).flatten()
    table = _TABLES.get((device, addresses))
    if table is None and torch.cuda.is_current_stream_capturing():
        flat = [address for plane in addresses for address in plane]
        table = torch.empty(len(flat), dtype=torch.int64, device=device)
        for entry, address in zip(table, flat, strict=True):
            entry.fill_(address)
    elif table is None:
        table = torch.tensor(addresses, dtype=torch.int64, device=device).flatten()
        _TABLES[(device, addresses)] = table
    return table
