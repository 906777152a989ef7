"""Block ops against plain indexing, bit for bit: named pages change, and no other byte.

Pools are random bytes, so that a dtype's NaNs are among them and every byte differs from its
neighbours. They run in Triton's interpreter and on the torch twins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn import block_ops, env
from tritonattn.layout import PagedKVCache

PAGE, HEADS, DIM = 4, 2, 8
View = Callable[[Tensor], Any]  # the buffer of a pool -> its cache

# name -> (shape of the buffer for n pages, how the cache lies in it)
STORAGES: dict[str, tuple[Callable[[int], tuple[int, ...]], View]] = {
    "combined": (lambda n: (n, 2, PAGE, HEADS, DIM), lambda b: b),
    "tuple": (lambda n: (2, n, PAGE, HEADS, DIM), lambda b: (b[0], b[1])),
    "unbound": (lambda n: (n, 2, PAGE, HEADS, DIM), lambda b: b.unbind(1)),
    "padded_tokens": (lambda n: (n, 2, PAGE + 1, HEADS, DIM), lambda b: b[:, :, :PAGE]),
    "padded_page": (
        lambda n: (n, 2 * PAGE * HEADS * DIM + 8),
        lambda b: b[:, : 2 * PAGE * HEADS * DIM].unflatten(1, (2, PAGE, HEADS, DIM)),
    ),
    "padded_dim": (lambda n: (n, 2, PAGE, HEADS, DIM + 1), lambda b: b[..., :DIM]),
    "padded_heads": (
        lambda n: (n, 2, PAGE, HEADS + 1, DIM + 1),
        lambda b: b[..., :HEADS, :DIM],
    ),
    "cross_layer": (lambda n: (n, 3, 2, PAGE, HEADS, DIM), lambda b: b[:, 1]),
    "interleaved": (lambda n: (n, PAGE, HEADS, 2, DIM), lambda b: b.permute(0, 3, 1, 2, 4)),
    "k_then_v": (lambda n: (2, n, PAGE, HEADS, DIM), lambda b: b.transpose(0, 1)),
    "heads_outside": (lambda n: (HEADS, n, 2, PAGE, DIM), lambda b: b.permute(1, 2, 3, 0, 4)),
    "value_dim_differs": (
        lambda n: (n, PAGE * HEADS, DIM + 3),
        lambda b: (
            b[..., :DIM].unflatten(1, (PAGE, HEADS)),
            b[..., DIM:].unflatten(1, (PAGE, HEADS)),
        ),
    ),
}


@pytest.fixture(autouse=True, params=["kernels", "twins"] if env.INTERPRET else ["twins"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the kernels in the interpreter and with the torch twins."""
    monkeypatch.setattr(env, "INTERPRET", request.param == "kernels")
    return request.param


def buffer(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def pool(storage: str, n: int = 6, seed: int = 0) -> tuple[Tensor, View]:
    shape, view = STORAGES[storage]
    return buffer(shape(n), seed=seed), view


def same_bytes(actual: Tensor, expected: Tensor) -> bool:
    actual, expected = actual.contiguous(), expected.contiguous()
    return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def pages(cache: Any) -> tuple[Tensor, Tensor]:
    views = PagedKVCache.of(cache)
    return views.k, views.v


def mapping(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


@pytest.mark.parametrize("inner", [(PAGE, HEADS), (HEADS, PAGE)], ids=["NHD", "HND"])
def test_vllm_17362_copy_moves_k_and_v(inner: tuple[int, int]) -> None:
    """4 blocks, copy 1 to 3: K and V of 3 equal 1's in all layers, 0 and 2 keep theirs."""
    layers = [buffer((4, 2, *inner, DIM), seed=i) for i in range(3)]
    before = [layer.clone() for layer in layers]
    block_ops.copy_blocks(layers, mapping((1, 3)))
    for layer, old in zip(layers, before, strict=True):
        assert same_bytes(layer[3, 0], old[1, 0])
        assert same_bytes(layer[3, 1], old[1, 1])
        assert same_bytes(layer[:3], old[:3])


@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_copy_follows_strides(storage: str) -> None:
    """Also aiter 3498: padded, cross-layer, interleaved, unbound; all else in the buffer stays."""
    (first, view), (second, _) = pool(storage, seed=1), pool(storage, seed=2)
    expected = [first.clone(), second.clone()]
    block_ops.copy_blocks([view(first), view(second)], mapping((5, 0), (1, 3), (1, 4)))
    for now in expected:
        for side in pages(view(now)):
            side[[0, 3, 4]] = side[[5, 1, 1]].clone()
    assert same_bytes(first, expected[0])
    assert same_bytes(second, expected[1])


@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_swap_follows_strides(storage: str) -> None:
    """Both ways between any storage and a plain tuple with more pages."""
    (base, view), (other, other_view) = pool(storage), pool("tuple", n=9, seed=3)
    if storage == "value_dim_differs":
        other = buffer((9, PAGE * HEADS, DIM + 3), seed=3)
        other_view = view
    for src, src_view, dst, dst_view in (
        (base, view, other, other_view),
        (other, other_view, base, view),
    ):
        source, expected = src.clone(), dst.clone()
        block_ops.swap_blocks(src_view(src), dst_view(dst), mapping((0, 5), (5, 0), (2, 3)))
        for to, now in zip(pages(dst_view(expected)), pages(src_view(source)), strict=True):
            to[[5, 0, 3]] = now[[0, 5, 2]]
        assert same_bytes(dst, expected)
        assert same_bytes(src, source)


@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_gather_follows_strides(storage: str) -> None:
    base, view = pool(storage)
    before = base.clone()
    cache, ids = view(base), torch.tensor([4, 0, 4], dtype=torch.int32)
    out = block_ops.gather_blocks(cache, ids)
    assert isinstance(out, tuple) == isinstance(cache, tuple)
    for side, wanted in zip(pages(out), pages(cache), strict=True):
        assert same_bytes(side, wanted[ids.long()])
    whole = out if isinstance(out, tuple) else (out,)
    assert all(part.is_contiguous() for part in whole)
    assert same_bytes(base, before)


@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_zero_follows_strides(storage: str) -> None:
    (first, view), (second, _) = pool(storage, seed=1), pool(storage, seed=2)
    expected = [first.clone(), second.clone()]
    block_ops.zero_blocks([view(first), view(second)], torch.tensor([5, 1, 5]))
    for now in expected:
        for side in pages(view(now)):
            side[[1, 5]] = 0
    assert same_bytes(first, expected[0])
    assert same_bytes(second, expected[1])


def test_vllm_40737_degenerate_stride_of_a_single_head() -> None:
    """One KV head whose dimension carries stride 1, as torch leaves it after some reshapes."""
    base = buffer((5, 2, PAGE, 1, DIM))
    cache = base.as_strided(base.shape, (2 * PAGE * DIM, PAGE * DIM, DIM, 1, 1))
    expected = base.clone()
    expected[4] = expected[2]
    expected[0] = 0
    block_ops.copy_blocks([cache], mapping((2, 4)))
    block_ops.zero_blocks([cache], torch.tensor([0]))
    assert same_bytes(base, expected)
    assert same_bytes(block_ops.gather_blocks(cache, torch.tensor([4, 1])), expected[[4, 1]])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
    ],
    ids=str,
)
def test_any_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    """Random bytes: every NaN payload survives. 5 x 3 x 7 elements fit no vector."""
    cache = buffer((4, 2, 5, 3, 7), dtype)
    expected = cache.clone()
    expected.view(torch.uint8)[2] = expected.view(torch.uint8)[1]
    block_ops.copy_blocks([cache], mapping((1, 2)))
    assert same_bytes(cache, expected)
    target = torch.zeros(3, 2, 5, 3, 7, dtype=dtype)
    block_ops.swap_blocks(cache, target, mapping((3, 1)))
    assert same_bytes(target[1], cache[3])
    assert not target[::2].contiguous().view(torch.uint8).any()
    block_ops.zero_blocks([cache], torch.tensor([0]))
    expected.view(torch.uint8)[0] = 0
    assert same_bytes(cache, expected)


@pytest.mark.parametrize("page_size", [1, 272, 544, 1072])
def test_vllm_25811_page_sizes(page_size: int) -> None:
    """Pages that are no multiple of a tile, and pages of one token."""
    cache = buffer((3, 2, page_size, 2, 24))
    expected = cache.clone()
    expected[0] = expected[2]
    block_ops.copy_blocks([cache], mapping((2, 0)))
    assert same_bytes(cache, expected)
    assert same_bytes(block_ops.gather_blocks(cache, torch.tensor([1])), expected[1:2])


def test_vllm_27547_manager_block_of_several_kernel_pages() -> None:
    """A manager's block of 64 tokens is kernel pages 4b..4b+3 of 16 and is copied as those."""
    memory = buffer((3 * 4, 2, 16, HEADS, DIM))
    blocks = memory.unflatten(0, (3, 4))
    expected = blocks.clone()
    expected[2] = expected[0]
    block_ops.copy_blocks([memory], mapping(*[(4 * 0 + i, 4 * 2 + i) for i in range(4)]))
    assert same_bytes(blocks, expected)


def test_swap_within_one_cache_and_between_layers_of_one_pool() -> None:
    cache = pool("combined")[0]
    expected = cache.clone()
    expected[[4, 5]] = expected[[0, 1]]
    block_ops.swap_blocks(cache, cache, mapping((0, 4), (1, 5)))
    assert same_bytes(cache, expected)
    big = buffer((4, 3, 2, PAGE, HEADS, DIM))
    expected = big.clone()
    expected[:3, 2] = expected[1:, 0]
    block_ops.swap_blocks(big[:, 0], big[:, 2], mapping((1, 0), (2, 1), (3, 2)))
    assert same_bytes(big, expected)


def test_nothing_to_do() -> None:
    cache = pool("combined")[0]
    before = cache.clone()
    none = torch.empty(0, 2, dtype=torch.int64)
    block_ops.copy_blocks([cache], none)
    block_ops.swap_blocks(cache, pool("combined", seed=5)[0], none)
    block_ops.zero_blocks([cache], none[:, 0])
    assert block_ops.gather_blocks(cache, none[:, 0]).shape == (0, 2, PAGE, HEADS, DIM)
    assert same_bytes(cache, before)


def test_gather_into_a_given_target() -> None:
    """Strided and larger memory: what is not a page of the target keeps its bytes."""
    cache, _ = pool("combined")
    base, view = pool("padded_tokens", n=2, seed=4)
    expected = base.clone()
    view(expected)[:] = cache[[5, 3]]
    out = view(base)
    assert block_ops.gather_blocks(cache, torch.tensor([5, 3]), out=out) is out
    assert same_bytes(base, expected)


def far_pool(pages_before: int, page_bytes: int) -> Tensor:
    """Return [pages_before + 3, 2, 16, 4, dim] uint8, nearly all of it address space only."""
    dim = page_bytes // (2 * 16 * 4)
    return torch.empty(pages_before + 3, 2, 16, 4, dim, dtype=torch.uint8)


def test_fi_3130_page_offset_past_32_bits() -> None:
    """Also vLLM 50427, 47671, 1486: page 65536 x stride 65536. Untouched memory costs nothing."""
    cache = far_pool(65536, 65536)
    cache[65536:] = buffer((3, *cache.shape[1:]), torch.uint8)
    old = cache[65536:].clone()
    block_ops.copy_blocks([cache], mapping((65536, 65538)))
    assert same_bytes(cache[65538], old[0])
    assert same_bytes(cache[65537], old[1])
    got = block_ops.gather_blocks(cache, torch.tensor([65537]))
    assert same_bytes(got, old[1:2])
    small = torch.zeros(1, *cache.shape[1:], dtype=torch.uint8)
    block_ops.swap_blocks(cache, small, mapping((65538, 0)))
    assert same_bytes(small[0], old[0])
    block_ops.zero_blocks([cache], torch.tensor([65537]))
    assert not cache[65537].any()
    assert same_bytes(cache[65536], old[0])


def test_fi_3130_strides_within_a_page_past_32_bits() -> None:
    """Heads a whole pool apart: offsets within a page, here in words of one byte, need 64 bits."""
    stride, dim = (1 << 32) // 8 + 1, 7
    base = torch.empty(9 * stride, dtype=torch.uint8)
    k = base.as_strided((3, PAGE, 9, dim), (PAGE * dim, dim, stride, 1))
    v = torch.zeros(3, PAGE, 9, dim, dtype=torch.uint8)
    k[:, :] = 7
    last = buffer((PAGE, dim), torch.uint8)
    k[1, :, 8] = last
    block_ops.copy_blocks([(k, v)], mapping((1, 2)))
    assert same_bytes(k[2, :, 8], last)
    assert (k[2, :, :8] == 7).all()
    assert (k[0] == 7).all()


def test_staged_swap_of_pageable_memory() -> None:
    """The route between devices: gather, one transfer, scatter."""
    (base, view), target = pool("padded_tokens"), pool("combined", n=9, seed=3)[0]
    source, expected = base.clone(), target.clone()
    pairs = mapping((0, 7), (5, 0), (2, 3))
    src, dst = PagedKVCache.of(view(base)), PagedKVCache.of(target)
    block_ops._swap_staged(src, dst, pairs)
    expected[[7, 0, 3]] = view(source)[[0, 5, 2]]
    assert same_bytes(target, expected)
    assert same_bytes(base, source)


def test_vllm_23737_the_mapping_may_be_reused_at_once() -> None:
    """The caller's mapping belongs to the caller again when the call returns."""
    cache = pool("combined")[0]
    expected = cache.clone()
    expected[3] = expected[1]
    pairs = mapping((1, 3))
    block_ops.copy_blocks([cache], pairs)
    pairs.fill_(0)
    assert same_bytes(cache, expected)
