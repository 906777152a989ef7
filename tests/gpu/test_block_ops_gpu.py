"""Block ops on a GPU, bit for bit: streams, graphs, host memory, pools past 2^32 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn import block_ops, page
from tritonattn.layout import PagedKVCache

pytestmark = pytest.mark.gpu

PAGES, PAGE, HEADS, DIM = 40, 16, 8, 128
LONG = 200_000_000  # cycles of a sleeping kernel: about 0.1 s

# name -> (shape of the buffer, how the cache lies in it)
STORAGES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "combined": ((PAGES, 2, PAGE, HEADS, DIM), lambda b: b),
    "unbound": ((PAGES, 2, PAGE, HEADS, DIM), lambda b: b.unbind(1)),
    "padded": ((PAGES, 2, PAGE + 1, HEADS, DIM), lambda b: b[:, :, :PAGE]),
    "padded_dim": ((PAGES, 2, PAGE, HEADS, DIM + 1), lambda b: b[..., :DIM]),
    "cross_layer": ((PAGES, 3, 2, PAGE, HEADS, DIM), lambda b: b[:, 1]),
    "interleaved": ((PAGES, PAGE, HEADS, 2, DIM), lambda b: b.permute(0, 3, 1, 2, 4)),
    "heads_outside": ((HEADS, PAGES, 2, PAGE, DIM), lambda b: b.permute(1, 2, 3, 0, 4)),
    "padded_heads": (
        (PAGES, 2, PAGE, HEADS + 1, DIM + 8),
        lambda b: b[..., :HEADS, :DIM],
    ),
    "odd": ((PAGES, 2, 3, 5, 7), lambda b: b),
}


def random(
    *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0
) -> Tensor:
    """Draw random bytes: every bit pattern of the dtype, its NaNs too."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
    raw = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8, device=device)
    return raw.view(dtype)


def layer(seed: int = 0, pages: int = PAGES, device: str = "cuda") -> Tensor:
    return random(pages, 2, PAGE, HEADS, DIM, seed=seed, device=device)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(bits(actual), bits(expected))


def mapping(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def random_mapping(src_pages: int, dst_pages: int, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    src = torch.randperm(src_pages, generator=generator)[:n]
    return torch.stack((src, torch.randperm(dst_pages, generator=generator)[:n]), 1)


def chainless(pages: int, n: int, seed: int = 0) -> Tensor:
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    return torch.stack((order[:n], order[-n:]), 1)


def copied(cache: Tensor, pairs: Tensor) -> Tensor:
    expected = bits(cache).clone()
    src, dst = pairs.to(cache.device).unbind(1)
    expected[dst] = expected[src]
    return expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_all_ops_follow_strides(storage: str, dtype: torch.dtype) -> None:
    shape, view = STORAGES[storage]
    base, other = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    expected, expected_other = base.clone(), other.clone()
    pairs = chainless(PAGES, 15)
    src, dst = pairs.cuda().unbind(1)
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]

    def sides(buffer: Tensor) -> list[Tensor]:
        views = PagedKVCache.of(view(buffer))
        return [views.k.view(as_int), views.v.view(as_int)]

    block_ops.copy_blocks([view(base)], pairs)
    for side in sides(expected):
        side[dst] = side[src]
    assert same(base, expected)
    block_ops.swap_blocks(view(base), view(other), pairs)
    for target, source in zip(sides(expected_other), sides(base), strict=True):
        target[dst] = source[src]
    assert same(base, expected)
    assert same(other, expected_other)
    got = PagedKVCache.of(block_ops.gather_blocks(view(base), pairs[:, 0]))
    for mine, side in zip((got.k, got.v), sides(base), strict=True):
        assert torch.equal(mine.view(as_int), side[src])
    block_ops.zero_blocks([view(base)], pairs[:7, 1])
    for side in sides(expected):
        side[dst[:7]] = 0
    assert same(base, expected)


def test_vllm_17362_all_layers_and_a_bitwise_repeat() -> None:
    layers = [layer(seed, pages=200) for seed in range(32)]
    pairs = chainless(200, 90)
    expected = [copied(cache, pairs) for cache in layers]
    for _ in range(2):
        block_ops.copy_blocks(layers, pairs)
        for cache, now in zip(layers, expected, strict=True):
            assert torch.equal(bits(cache), now)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first-use-in-the-capture"])
def test_graph_of_copy_blocks_follows_its_mapping(warm: bool) -> None:
    """Warm-up on one stream, capture on another; without one the graph writes its own addresses."""
    block_ops.copy_blocks([layer()], mapping((0, 1)))  # compiles
    layers, others = [layer(seed) for seed in range(5)], [layer(9)]
    pairs = torch.full((12, 2), -1, dtype=torch.int64, device="cuda")
    if warm:
        with torch.cuda.stream(torch.cuda.Stream()):
            block_ops.copy_blocks(layers, pairs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_ops.copy_blocks(layers, pairs)
        block_ops.copy_blocks(others, pairs)
    for seed, n in enumerate((12, 3, 0, 7)):
        live = chainless(PAGES, n, seed) if n else mapping()
        expected = [copied(cache, live) for cache in (*layers, *others)]
        pairs.fill_(-1)
        pairs[:n] = live.cuda()
        graph.replay()
        for cache, now in zip((*layers, *others), expected, strict=True):
            assert torch.equal(bits(cache), now)


def test_graph_of_gather_and_zero() -> None:
    caches, ids = [layer(1), layer(2)], torch.zeros(6, dtype=torch.int32, device="cuda")
    out = layer(pages=6, seed=3)
    block_ops.gather_blocks(caches[0], ids, out=out)
    block_ops.zero_blocks(caches, torch.full_like(ids, -1))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_ops.gather_blocks(caches[0], ids, out=out)
        block_ops.zero_blocks(caches, ids)
    live = torch.tensor([7, 30, 2, -1, PAGES, -1], device="cuda")
    expected, expected_out = [bits(cache).clone() for cache in caches], bits(out).clone()
    expected_out[:3], expected_out[3:] = expected[0][live[:3]], 0
    for now in expected:
        now[live[:3]] = 0
    ids.copy_(live)
    graph.replay()
    assert torch.equal(bits(out), expected_out)
    for cache, now in zip(caches, expected, strict=True):
        assert torch.equal(bits(cache), now)


def test_host_data_in_a_capture_is_refused() -> None:
    cache, other, pairs = layer(), layer(1), mapping((0, 1))
    block_ops.copy_blocks([cache], pairs)
    calls = [
        lambda: block_ops.copy_blocks([cache], pairs),
        lambda: block_ops.swap_blocks(cache, other, pairs),
        lambda: block_ops.gather_blocks(cache, pairs[:, 0]),
        lambda: block_ops.zero_blocks([cache], pairs[:, 0]),
    ]
    for call in calls:
        torch.cuda.synchronize()
        with (
            pytest.raises(ValueError, match="on the CPU cannot be captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    before = cache.clone()
    block_ops.copy_blocks([cache], mapping((2, 3)))
    assert torch.equal(bits(cache), copied(before, mapping((2, 3))))


@pytest.mark.parametrize("power", [31, 32])
def test_fi_3130_big_pools(power: int) -> None:
    """Pools of more than 2^31 and 2^32 elements, of which the last pages are used."""
    size = 2 * PAGE * HEADS * DIM
    first = (1 << power) // size
    cache = torch.empty(first + 3, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    assert cache.numel() > 1 << power
    cache[:2], cache[first:] = layer(5, 2), layer(6, 3)
    low, old = cache[:2].clone(), cache[first:].clone()
    block_ops.copy_blocks([cache], mapping((first, first + 2)))
    assert same(cache[first:], old[[0, 1, 0]])
    small = layer(7, 2)
    block_ops.swap_blocks(cache, small, mapping((first + 1, 0)))
    block_ops.swap_blocks(small, cache, mapping((1, first + 2)))
    assert same(small[0], old[1])
    assert same(cache[first + 2], small[1])
    assert same(block_ops.gather_blocks(cache, torch.tensor([first + 1])), old[1:2])
    block_ops.zero_blocks([cache], torch.tensor([first]))
    key, value = (random(2, HEADS, DIM, seed=seed) for seed in (1, 2))
    slots = torch.tensor([(first + 1) * PAGE + 3, -1], device="cuda")
    block_ops.reshape_and_cache(key, value, cache, slots)
    ints = {"dtype": torch.int32, "device": "cuda"}
    rows = torch.tensor([-1, 0], **ints), torch.tensor([0, 4], **ints)
    table = ([first + 1], [0, 1], [5])
    page.append_paged_kv_cache(key, value, *rows, cache, *(torch.tensor(t, **ints) for t in table))
    expected = bits(old[[0, 1, 0]])
    expected[0], expected[2] = 0, bits(small)[1]
    expected[1, :, 3:5] = torch.stack((bits(key), bits(value)))
    assert torch.equal(bits(cache[first:]), expected)
    assert same(cache[:2], low)


@pytest.mark.parametrize("storage", ["combined", "padded_dim", "interleaved", "odd"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_swap_with_host_memory(storage: str, pinned: bool) -> None:
    """Out to another pool size, back to other pages; strided host views, words of any size."""
    shape, view = STORAGES[storage]
    base = random(*shape, seed=1)
    host = random(*shape, seed=2, device="cpu")
    host = host.pin_memory() if pinned else host
    out, back = random_mapping(PAGES, PAGES, 30, 1), random_mapping(PAGES, PAGES, 25, 2)

    def moved(src: Tensor, dst: Tensor, pairs: Tensor) -> Tensor:
        result = dst.cpu().clone()
        sources = PagedKVCache.of(view(src.cpu()))
        targets = PagedKVCache.of(view(result))
        for source, target in ((sources.k, targets.k), (sources.v, targets.v)):
            target.view(torch.int16)[pairs[:, 1]] = source.view(torch.int16)[pairs[:, 0]]
        return result

    expected = moved(base, host, out)
    block_ops.swap_blocks(view(base), view(host), out)
    torch.cuda.synchronize()
    assert same(host, expected)
    expected = moved(host, base, back)
    block_ops.swap_blocks(view(host), view(base), back)
    assert same(base.cpu(), expected)


def test_swap_of_many_pages_with_pinned_memory() -> None:
    """More tiles than the looping programs, and a host pool of another size."""
    cache, host = layer(1, 600), layer(2, 700, "cpu").pin_memory()
    pairs = random_mapping(600, 700, 500)
    expected = bits(host).clone()
    expected[pairs[:, 1]] = bits(cache.cpu())[pairs[:, 0]]
    block_ops.swap_blocks(cache, host, pairs)
    torch.cuda.synchronize()
    assert torch.equal(bits(host), expected)
    cache.zero_()
    block_ops.swap_blocks(host, cache, pairs.flip(1))
    assert torch.equal(bits(cache.cpu())[pairs[:, 0]], expected[pairs[:, 1]])


def test_calls_do_not_wait_and_keep_stream_order() -> None:
    """On a busy side stream: nothing synchronizes, and reads and writes keep their order."""
    cache, other, fresh = layer(1), layer(2), layer(3)
    host = layer(4, device="cpu").pin_memory()
    pairs = random_mapping(PAGES, PAGES, 20)
    for pool in (cache, other):
        block_ops.copy_blocks([pool], mapping((0, 1)))
        block_ops.zero_blocks([pool], torch.tensor([2]))
        block_ops.gather_blocks(pool, torch.tensor([2]))
    for src, dst in ((cache, other), (cache, host), (host, other)):
        block_ops.swap_blocks(src, dst, mapping((0, 0)))
    torch.cuda.synchronize()
    expected = bits(other).clone()
    expected[pairs[:, 1].cuda()] = bits(fresh)[pairs[:, 0].cuda()]
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            cache.copy_(fresh)
            block_ops.swap_blocks(cache, other, pairs)
            seen = other.clone()
            block_ops.copy_blocks([other], mapping((0, 1)))
            block_ops.swap_blocks(cache, host, pairs)
            block_ops.zero_blocks([cache], torch.tensor([5]))
            block_ops.gather_blocks(other, torch.tensor([5]))
            assert not stream.query(), "the calls waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    assert torch.equal(bits(seen), expected)
    assert torch.equal(bits(host)[pairs[:, 1]], bits(fresh.cpu())[pairs[:, 0]])


def test_vllm_23737_mappings_rewritten_while_in_flight() -> None:
    """One host tensor, rewritten after each call, while the device has not begun to read any."""
    cache, expected = layer(1), layer(1)
    pairs, steps = mapping((0, 0)), 60
    block_ops.copy_blocks([cache], mapping((2, 3)))
    block_ops.copy_blocks([expected], mapping((2, 3)))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    for i in range(steps):
        pairs[0, 0], pairs[0, 1] = i % PAGES, (i * 7 + 1) % PAGES
        if pairs[0, 0] != pairs[0, 1]:
            block_ops.copy_blocks([cache], pairs)
        pairs.fill_(-9)
    as_bytes = bits(expected)
    for i in range(steps):
        as_bytes[(i * 7 + 1) % PAGES] = as_bytes[i % PAGES]
    assert torch.equal(bits(cache), as_bytes)


def test_values_on_the_device_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, bad = layer(), mapping((0, PAGES)).cuda()
    before = cache.clone()
    block_ops.copy_blocks([cache], bad)
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match=f"target page {PAGES}"):
        block_ops.copy_blocks([cache], bad)
    for call in (block_ops.gather_blocks, lambda c, ids: block_ops.zero_blocks([c], ids)):
        with pytest.raises(ValueError, match=f"page {PAGES}"):
            call(cache, bad[:, 1])
    slots = torch.tensor([PAGES * PAGE], device="cuda")
    with pytest.raises(ValueError, match="slot_mapping names slot"):
        block_ops.reshape_and_cache(random(1, HEADS, DIM), random(1, HEADS, DIM), cache, slots)
    assert same(cache, before)


def test_devices_that_differ_are_refused() -> None:
    cpu = torch.zeros(PAGES, 2, PAGE, HEADS, DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"one device, got cpu \(layer 1\) and cuda:0 \(layer 0\)"):
        block_ops.copy_blocks([layer(), cpu], mapping((0, 1)))
    with pytest.raises(ValueError, match="src_to_dst must be on cpu, got cuda:0"):
        block_ops.swap_blocks(layer(), cpu, mapping((0, 1)).cuda())
    tokens = random(1, HEADS, DIM)
    with pytest.raises(ValueError, match="slot_mapping must be on cuda:0, got cpu"):
        block_ops.reshape_and_cache(tokens, tokens, layer(), torch.tensor([0]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_between_two_gpus() -> None:
    """Device 0 is current throughout; the second's work goes to the second."""
    first, second = layer(1), layer(2, device="cuda:1")
    pairs = random_mapping(PAGES, PAGES, 20)
    expected = bits(second.cpu()).clone()
    expected[pairs[:, 1]] = bits(first.cpu())[pairs[:, 0]]
    block_ops.swap_blocks(first, second, pairs)
    assert torch.equal(bits(second.cpu()), expected)
    inside = chainless(PAGES, 10)
    block_ops.copy_blocks([second], inside)
    assert torch.equal(bits(second.cpu()), copied(expected, inside))
    host = layer(4, device="cpu").pin_memory()
    block_ops.swap_blocks(second, host, mapping((0, 0)))
    torch.cuda.synchronize(1)
    assert torch.equal(bits(host)[0], bits(second.cpu())[0])
