"""Operations on whole pages of KV caches, and `reshape_and_cache`.

A cache is a combined tensor with the page as dimension 0 and K/V (size 2) as dimension 1, or a `(k,
v)` tuple; any strides, any dtype. Anything else is refused. All checks come before any launch: a
refused call changes nothing.

On CPU tensors the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`), otherwise plain torch
does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from tritonattn import block_checks as checks
from tritonattn.implementations import implementation
from tritonattn.layout import KVCacheLike, PagedKVCache
from tritonattn.staging import values_are_checked


def copy_blocks(kv_caches: Sequence[KVCacheLike], src_to_dst: Tensor) -> None:
    """Copy pages within the cache of every layer, all layers in one launch.

    Parameters
    ----------
    kv_caches : list or tuple of caches, one a layer
        Equal in shape, dtype and device; strides may differ (a launch for each distinct page
        shape).
    src_to_dst : Tensor, shape [n, 2], int64
        Pairs of source and target page. On the CPU they are checked: ids within the pool, each
        target once, no page both source and target (not even of the same pair: copies have no
        order). On the caches' device they are not checked unless `TRITONATTN_VALIDATE=1`, pairs
        with an id outside the pool are skipped (pad with -1), and the call can be captured in a
        CUDA graph. n may be 0.

    Notes
    -----
    Asynchronous, on the current stream. The first call for a set of caches makes a table of their
    addresses, which synchronizes once. Make that call before a capture: a graph captured without it
    writes a table of its own at each replay, one small launch a plane.

    Raises
    ------
    ValueError, TypeError
        Before any launch, with all caches untouched.
    """
    caches = checks.layers_of(kv_caches)
    device, num_pages = caches[0].device, caches[0].num_pages
    checks.check_mapping_form(src_to_dst, (torch.device("cpu"), device))
    if src_to_dst.device.type == "cpu":
        checks.check_mapping(src_to_dst, num_pages, num_pages, one_pool=True)
    elif values_are_checked(device):
        checks.check_mapping(src_to_dst.cpu(), num_pages, num_pages, one_pool=True, padded=True)
    if src_to_dst.size(0):
        src_ids, dst_ids = _to_device("src_to_dst", src_to_dst, device).unbind(1)
        implementation("copy_blocks", device).copy_blocks(caches, caches, src_ids, dst_ids)


def swap_blocks(
    src_kv_cache: KVCacheLike | list[Tensor] | list[tuple[Tensor, Tensor]],
    dst_kv_cache: KVCacheLike | list[Tensor] | list[tuple[Tensor, Tensor]],
    src_to_dst: Tensor,
) -> None:
    """Copy pages of one cache into another, on any pair of devices; the source is not changed.

    Parameters
    ----------
    src_kv_cache, dst_kv_cache : a cache, or a list of caches, one a layer
        Equal in shape but for the number of pages, and in dtype. Strides and form may differ. They
        may be one cache: then no page may be both source and target. Lists share one launch, so
        that this holds for all layers, and no two may have a target in the same memory.
    src_to_dst : Tensor, shape [n, 2], int64, on the CPU
        Pairs of source and target page: ids within their pools, each target once. n may be 0.

    Notes
    -----
    Between caches on one GPU, and between a GPU and pinned host memory, the call is asynchronous on
    the current stream: one kernel does it, which reads or writes pinned memory in place. The caller
    waits for the stream before the host uses a pinned target, and keeps a pinned source as it is,
    and alive, until then. Between two GPUs pages travel as one contiguous transfer a layer,
    asynchronous and ordered on both current streams. With pageable host memory they do too, and the
    call returns when the host's side of it is done. The first call for a set of lists makes a table
    of their addresses, which synchronizes once. Not for CUDA graphs.

    Raises
    ------
    ValueError, TypeError
        Before any launch, with both caches untouched.
    """
    sources, targets = checks.swapped(src_kv_cache, dst_kv_cache)
    src, dst = sources[0], targets[0]
    checks.check_mapping_form(src_to_dst, (torch.device("cpu"),))
    checks.check_mapping(src_to_dst, src.num_pages, dst.num_pages, one_pool=False)
    _check_overlap(sources, targets, src_to_dst)
    for device in (src.device, dst.device):
        checks.check_not_capturing("src_to_dst", device)
    if src_to_dst.size(0) == 0:
        return
    gpu = dst.device if src.device.type == "cpu" else src.device
    if src.device == dst.device or _host_is_pinned((*sources, *targets)):
        src_ids, dst_ids = _to_device("src_to_dst", src_to_dst, gpu).unbind(1)
        implementation("copy_blocks", gpu).copy_blocks(sources, targets, src_ids, dst_ids)
    else:
        for source, target in zip(sources, targets, strict=True):
            _swap_staged(source, target, src_to_dst)


def gather_blocks(
    kv_cache: KVCacheLike, block_ids: Tensor, out: KVCacheLike | None = None
) -> KVCacheLike:
    """Copy pages of a cache, in the order of `block_ids`, side by side.

    Parameters
    ----------
    kv_cache : a cache
    block_ids : Tensor, shape [n], int32 or int64
        On the CPU (checked) or on the cache's device (not checked unless `TRITONATTN_VALIDATE=1`;
        an id outside the pool gives a page of zeros). Ids may repeat; n may be 0.
    out : a cache of n pages, optional
        Same form (combined or tuple), dtype and device, in other memory; any strides.

    Returns
    -------
    out : Tensor, shape [n, 2, ...], or a tuple of two, [n, ...] each
        In the cache's form and layout; contiguous unless `out` was given.

    Notes
    -----
    Asynchronous, on the current stream. With ids on the device the call can be captured in a CUDA
    graph.
    """
    cache = checks.cache_of("kv_cache", kv_cache)
    checks.check_block_ids(block_ids, cache)
    if values_are_checked(cache.device):
        checks.check_padded_ids(block_ids, cache.num_pages)
    if out is None:
        out = _empty_pages(kv_cache, block_ids.size(0))
    else:
        _check_out(kv_cache, cache, out, block_ids.size(0))
    if block_ids.size(0):
        ids = _to_device("block_ids", block_ids, cache.device)
        implementation("copy_blocks", cache.device).copy_blocks(
            [cache], [PagedKVCache.of(out)], ids, None
        )
    return out


def zero_blocks(kv_caches: Sequence[KVCacheLike], block_ids: Tensor) -> None:
    """Fill pages with zero bytes in the cache of every layer, all layers in one launch.

    Parameters
    ----------
    kv_caches : list or tuple of caches, one a layer
        As for `copy_blocks`.
    block_ids : Tensor, shape [n], int32 or int64
        On the CPU (checked) or on the caches' device (not checked unless `TRITONATTN_VALIDATE=1`;
        ids outside the pool are skipped). Ids may repeat; n may be 0.

    Notes
    -----
    As for `copy_blocks`.
    """
    caches = checks.layers_of(kv_caches)
    device = caches[0].device
    checks.check_block_ids(block_ids, caches[0])
    if values_are_checked(device):
        checks.check_padded_ids(block_ids, caches[0].num_pages)
    if block_ids.size(0):
        ids = _to_device("block_ids", block_ids, device)
        implementation("zero_blocks", device).zero_blocks(caches, ids)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: KVCacheLike,
    slot_mapping: Tensor,
    *,
    kv_layout: str = "NHD",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots.

    Parameters
    ----------
    key : Tensor, shape [rows, num_kv_heads, head_dim_qk]
        The cache's dtype; any strides with a last stride of 1 (a slice of a fused projection).
        There may be more rows than slots: those past `slot_mapping` are padding.
    value : Tensor, shape [rows, num_kv_heads, head_dim_vo]
    kv_cache : a cache
    slot_mapping : Tensor, shape [num_tokens], int32 or int64, contiguous
        Token i goes to slot page * page_size + offset; negative slots are skipped, as are those
        outside the pool (refused with `TRITONATTN_VALIDATE=1`). num_tokens may be 0.
    kv_layout : "NHD" or "HND"
    k_scale, v_scale : None
        For quantised caches; not supported yet.

    Notes
    -----
    Asynchronous, on the current stream; can be captured in a CUDA graph.

    Raises
    ------
    ValueError, TypeError
        Before any launch, with the cache untouched. A dtype other than the cache's is a
        `TypeError`.
    """
    cache = checks.cache_of("kv_cache", kv_cache, kv_layout)
    checks.refuse_scales(k_scale=k_scale, v_scale=v_scale)
    checks.check_index("slot_mapping", slot_mapping, cache.device)
    num_tokens = slot_mapping.size(0)
    checks.check_tokens(("key", "value"), key, value, cache, "slot_mapping", num_tokens)
    if values_are_checked(cache.device):
        checks.check_slots(slot_mapping, cache.num_pages * cache.page_size)
    if num_tokens:
        implementation("append", cache.device).append_to_slots(key, value, cache, slot_mapping)


def _to_device(name: str, ids: Tensor, device: torch.device) -> Tensor:
    """Bring ids to the device without waiting; torch guards the reuse of the pinned copy."""
    if ids.device == device:
        return ids
    checks.check_not_capturing(name, device)
    return ids.contiguous().pin_memory().to(device, non_blocking=True)


def _host_is_pinned(caches: Sequence[PagedKVCache]) -> bool:
    """Return whether some caches are on the host, and all of these in pinned memory."""
    on_host = [cache for cache in caches if cache.device.type == "cpu"]
    return bool(on_host) and all(c.k.is_pinned() and c.v.is_pinned() for c in on_host)


def _check_overlap(
    sources: Sequence[PagedKVCache], targets: Sequence[PagedKVCache], src_to_dst: Tensor
) -> None:
    """Refuse memory that is target twice, or source and target: all layers share one launch.

    Only storages that several caches lie in are looked at, which is seldom: K and V of one cache
    never meet. There a page stands for its first dense run of bytes. That is all of it in most
    layouts; in the others, overlaps that spare the first run are not seen.
    """
    if src_to_dst.size(0) == 0:
        return
    read, written = _by_storage(sources), _by_storage(targets)
    for storage, views in written.items():
        if storage in read:
            _check_storage(read[storage], views, src_to_dst)
        elif views[0][0] != views[-1][0]:
            _check_storage([], views, src_to_dst)


# (layer, its K or its V)
_Plane: TypeAlias = tuple[int, Tensor]


def _by_storage(caches: Sequence[PagedKVCache]) -> dict[int, list[_Plane]]:
    planes: dict[int, list[_Plane]] = {}
    for layer, cache in enumerate(caches):
        for view in (cache.k, cache.v):
            planes.setdefault(view.untyped_storage().data_ptr(), []).append((layer, view))
    return planes


def _check_storage(read: list[_Plane], written: list[_Plane], src_to_dst: Tensor) -> None:
    """Compare the pages of planes in one storage, as ranges of addresses."""
    begins, ends = _page_ranges(written, src_to_dst[:, 1])
    begins, order = begins.sort()
    ends = ends[order]

    def place(i: int | Tensor) -> str:
        plane, pair = divmod(int(order[i]), src_to_dst.size(0))
        return f"page {int(src_to_dst[pair, 1])} of layer {written[plane][0]}"

    twice = (begins[1:] < ends[:-1]).nonzero()
    if twice.numel():
        at = int(twice[0])
        raise ValueError(
            "dst_kv_cache must give each target page of each layer memory of its own, got "
            f"{place(at)} and {place(at + 1)} in the same memory"
        )
    if not read:
        return
    # The targets are disjoint by now: a source meets one if it meets the first that ends after it.
    src_begins, src_ends = _page_ranges(read, src_to_dst[:, 0])
    first = torch.searchsorted(ends, src_begins, right=True).clamp(max=ends.numel() - 1)
    chained = (begins[first] < src_ends) & (ends[first] > src_begins)
    if chained.any():
        at = int(first[chained][0])
        raise ValueError(
            "src_to_dst must not name a page as source and as target of one cache, got "
            f"{place(at)} as both; layers are copied at once, so this goes for all their memory"
        )


def _page_ranges(planes: list[_Plane], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return where pages begin and where their first dense runs end, `[planes * ids]` each."""
    views = [view for _, view in planes]
    rows = torch.tensor(
        [[view.data_ptr(), view.stride(0) * view.element_size(), _run(view)] for view in views]
    )
    base, stride, run = rows.unsqueeze(2).unbind(1)
    begins = base + stride * ids
    return begins.flatten(), (begins + run).flatten()


def _run(view: Tensor) -> int:
    """Return how many bytes from a page's first element on belong to the page."""
    run = 1
    for stride, size in sorted(zip(view.stride()[1:], view.shape[1:], strict=True)):
        if size > 1:
            if stride != run:
                break
            run *= size
    return run * view.element_size()


def _swap_staged(src: PagedKVCache, dst: PagedKVCache, src_to_dst: Tensor) -> None:
    """Gather on the source's device, transfer once, scatter on the target's."""
    src_ids, dst_ids = src_to_dst.unbind(1)
    order = torch.arange(src_to_dst.size(0))
    k, v = (view.new_empty((order.numel(), *view.shape[1:])) for view in (src.k, src.v))
    _move(src, PagedKVCache(k, v, src.kv_layout), src_ids, order)
    k, v = k.to(dst.device), v.to(dst.device)
    _move(PagedKVCache(k, v, src.kv_layout), dst, order, dst_ids)


def _move(src: PagedKVCache, dst: PagedKVCache, src_ids: Tensor, dst_ids: Tensor) -> None:
    ids = (_to_device("src_to_dst", side, src.device) for side in (src_ids, dst_ids))
    implementation("copy_blocks", src.device).copy_blocks([src], [dst], *ids)


def _empty_pages(kv_cache: KVCacheLike, n: int) -> KVCacheLike:
    if isinstance(kv_cache, Tensor):
        return kv_cache.new_empty((n, *kv_cache.shape[1:]))
    k, v = kv_cache
    return k.new_empty((n, *k.shape[1:])), v.new_empty((n, *v.shape[1:]))


def _check_out(kv_cache: KVCacheLike, cache: PagedKVCache, out: KVCacheLike, n: int) -> None:
    if isinstance(out, tuple) != isinstance(kv_cache, tuple):
        form = "a (k, v) tuple" if isinstance(kv_cache, tuple) else "a combined tensor"
        raise TypeError(f"out must be {form} as kv_cache is, got {type(out).__name__}")
    target = checks.cache_of("out", out)
    checks.same_pages("out", target, "kv_cache", cache)
    if target.num_pages != n:
        raise ValueError(f"out must have a page for each of {n} block_ids, got {target.num_pages}")
    if target.device != cache.device:
        raise ValueError(f"out must be on kv_cache's device {cache.device}, got {target.device}")
    sources = {view.untyped_storage().data_ptr() for view in (cache.k, cache.v)}
    if n and sources & {view.untyped_storage().data_ptr() for view in (target.k, target.v)}:
        raise ValueError("out must not share its memory with kv_cache")
