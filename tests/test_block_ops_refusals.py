"""What block ops refuse: before any launch, naming the argument, with the caches untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn import block_checks, block_ops

SHAPE = (6, 2, 4, 2, 8)


def cache(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def mapping(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def test_vllm_15603_pages_on_the_second_dimension_are_refused() -> None:
    wrong = torch.zeros(2, 5, 4, 2, 8)
    message = r"\[num_pages, 2, page_size, num_kv_heads, head_dim\].*\(2, 5, 4, 2, 8\)"
    with pytest.raises(ValueError, match=message):
        block_ops.copy_blocks([wrong], mapping((0, 1)))
    with pytest.raises(ValueError, match="dst_kv_cache: .*" + message):
        block_ops.swap_blocks(torch.zeros(5, 2, 4, 2, 8), wrong, mapping((0, 1)))
    with pytest.raises(ValueError, match=message):
        block_ops.gather_blocks(wrong, torch.tensor([0]))
    with pytest.raises(ValueError, match=message):
        block_ops.zero_blocks([wrong], torch.tensor([0]))


def test_vllm_30692_page_sizes_that_differ_are_refused() -> None:
    src, dst = cache(shape=(3, 2, 64, 2, 8)), cache(shape=(12, 2, 16, 2, 8))
    before = dst.clone()
    message = "src_kv_cache and dst_kv_cache must agree in page_size"
    with pytest.raises(ValueError, match=message + r".*\(64, 2, 8, 8\) and \(16, 2, 8, 8\)"):
        block_ops.swap_blocks(src, dst, mapping((0, 0)))
    assert torch.equal(dst, before)


def test_swap_refuses_another_dtype() -> None:
    dst = torch.full(SHAPE, 7.0, dtype=torch.float16)
    with pytest.raises(TypeError, match=r"one dtype, got torch\.bfloat16 and torch\.float16"):
        block_ops.swap_blocks(cache(), dst, mapping((0, 0)))
    assert (dst == 7).all()


BAD_MAPPINGS: dict[str, tuple[Any, type[Exception], str]] = {
    "source-too-large": (mapping((0, 1), (6, 2)), ValueError, "source page 6, allowed are 0 to 5"),
    "target-too-large": (mapping((0, 1), (2, 6)), ValueError, "target page 6, allowed are 0 to 5"),
    "negative-source": (mapping((0, 1), (-1, 2)), ValueError, "source page -1"),
    "negative-target": (mapping((0, 1), (2, -1)), ValueError, "target page -1"),
    "duplicate-target": (mapping((0, 2), (1, 3), (4, 2)), ValueError, "once, got page 2 again"),
    "int32": (mapping((0, 1)).int(), TypeError, "must be int64, got torch.int32"),
    "list": ([(0, 1)], TypeError, "must be a torch.Tensor, got list"),
    "one-dimension": (torch.tensor([0, 1]), ValueError, r"be \[n, 2\] .*got shape \(2,\)"),
    "three-columns": (torch.zeros(2, 3).long(), ValueError, r"got shape \(2, 3\)"),
    "other-device": (mapping((0, 1)).to("meta"), ValueError, "must be on cpu, got meta"),
}


@pytest.mark.parametrize("case", BAD_MAPPINGS)
@pytest.mark.parametrize("op", ["copy", "swap"])
def test_vllm_46345_bad_mappings_are_refused(case: str, op: str) -> None:
    """Also vLLM 50443: out of range, wrong dtype or shape, duplicate targets."""
    pairs, error, message = BAD_MAPPINGS[case]
    src, dst = cache(1), cache(2)
    before = src.clone(), dst.clone()
    call, caches = {
        "copy": (block_ops.copy_blocks, ([src, dst],)),
        "swap": (block_ops.swap_blocks, (src, dst)),
    }[op]
    with pytest.raises(error, match=f"src_to_dst.*{message}"):
        call(*caches, pairs)
    assert torch.equal(src, before[0])
    assert torch.equal(dst, before[1])


@pytest.mark.parametrize("pairs", [[(0, 1), (1, 2)], [(1, 2), (0, 1)], [(0, 1), (1, 0)], [(3, 3)]])
def test_vllm_46345_chained_targets_are_refused(pairs: list[tuple[int, int]]) -> None:
    """Copies have no order, so a page cannot be source and target, nor be copied onto itself."""
    pool = cache()
    before = pool.clone()
    with pytest.raises(ValueError, match="as source and as target"):
        block_ops.copy_blocks([pool], mapping(*pairs))
    with pytest.raises(ValueError, match="as source and as target"):
        block_ops.swap_blocks(pool, pool.unbind(1), mapping(*pairs))
    assert torch.equal(pool, before)


def test_a_chain_through_two_views_of_one_pool_is_refused() -> None:
    """Page 1 of the pool is page 0 of a view that begins there: two ids, one page."""
    pool = cache()
    before = pool.clone()
    with pytest.raises(ValueError, match="as source and as target of one cache, got page 0"):
        block_ops.swap_blocks(pool, pool[1:], mapping((4, 2), (1, 4), (2, 0)))
    assert torch.equal(pool, before)


def test_layers_of_a_swap_share_one_launch() -> None:
    """What one layer reads no other may write, and no two may write the same memory."""
    a, b, target = cache(1), cache(2), cache(3)
    before = a.clone(), b.clone(), target.clone()
    both = "src_to_dst must not name a page as source and as target of one cache, got page "
    twice = "dst_kv_cache must give each target page of each layer memory of its own, got page "
    for sources, targets, pairs, message in (
        ([a, b], [b, a], ((0, 0),), both + "0 of layer [01] as both"),
        ([a, b], [target, a], ((1, 3), (3, 5)), both + "3 of layer 1 as both"),
        ([a, a], [(b[:, 0], target[:, 1]), target], ((2, 4),), twice + "4 of layer 0 and page 4"),
        ([(a[:, 0], a[:, 1])], [(a[:, 1], a[:, 0])], ((2, 2),), both + "2 of layer 0"),
        ([a, b], [target, target], ((4, 1),), twice + "1 of layer 0 and page 1 of layer 1"),
        ([a, b], [target[:-1], target[1:]], ((4, 1), (5, 2)), twice + "2 of layer 0 and page 1 of"),
    ):
        with pytest.raises(ValueError, match=message):
            block_ops.swap_blocks(sources, targets, mapping(*pairs))
    assert all(map(torch.equal, (a, b, target), before))


@pytest.mark.parametrize("hnd", [False, True])
def test_pages_that_overlap_in_part_are_refused(hnd: bool) -> None:
    """Tokens 0 to 3 and 2 to 5 of the pages of one pool: no address begins two pages."""
    pool = cache(shape=(6, 2, 2, 8, 8) if hnd else (6, 2, 8, 2, 8))
    before = pool.clone()
    tokens = 3 if hnd else 2
    first, second, last = (pool.narrow(tokens, at, 4) for at in (0, 2, 4))
    with pytest.raises(ValueError, match="as source and as target of one cache, got page 1"):
        block_ops.swap_blocks(first, second, mapping((0, 3), (1, 1)))
    with pytest.raises(ValueError, match="page 1 of layer 0 and page 1 of layer 1 in the same"):
        block_ops.swap_blocks([cache(1, first.shape)] * 2, [first, second], mapping((0, 1)))
    assert torch.equal(pool, before)
    block_ops.swap_blocks(first, second, mapping((0, 3)))
    block_ops.swap_blocks([first, first], [last, cache(2, first.shape)], mapping((0, 0), (1, 1)))
    assert torch.equal(second[3], before.narrow(tokens, 0, 4)[0])
    assert torch.equal(last[:2], before.narrow(tokens, 0, 4)[:2])


@pytest.mark.parametrize("dim", range(5))
def test_layers_of_one_pool_are_swapped(dim: int) -> None:
    """Wherever the layer stands in the pool, and though all pages of all layers interleave."""
    shape = list(SHAPE)
    shape.insert(dim, 3)
    source, target = cache(1, tuple(shape)), cache(2, tuple(shape))
    expected = target.clone().movedim(dim, 0)
    expected[:, [1, 0, 5]] = source.movedim(dim, 0)[:, [1, 4, 5]]
    pairs = mapping((1, 1), (4, 0), (5, 5))
    block_ops.swap_blocks(list(source.unbind(dim)), list(target.unbind(dim)), pairs)
    assert torch.equal(target.movedim(dim, 0), expected)
    within = list(target.unbind(dim))
    block_ops.swap_blocks(within, within[::-1], mapping((1, 2), (0, 3)))
    expected[:, [2, 3]] = expected.flip(0)[:, [1, 0]]
    assert torch.equal(target.movedim(dim, 0), expected)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([0, 6]), ValueError, "page 6, allowed are 0 to 5"),
        (torch.tensor([-1]), ValueError, "page -1"),
        (torch.tensor([0.0]), TypeError, "int32 or int64, got torch.float32"),
        (torch.tensor([[0]]), ValueError, r"one dimension, got shape \(1, 1\)"),
        (torch.tensor([0], device="meta"), ValueError, "must be on cpu, got meta"),
        ([0], TypeError, "must be a torch.Tensor, got list"),
    ],
)
def test_bad_block_ids_are_refused(ids: Any, error: type[Exception], message: str) -> None:
    pool, out = cache(), torch.full((1, *SHAPE[1:]), 7.0, dtype=torch.bfloat16)
    before = pool.clone()
    with pytest.raises(error, match=f"block_ids.*{message}"):
        block_ops.zero_blocks([pool], ids)
    with pytest.raises(error, match=f"block_ids.*{message}"):
        block_ops.gather_blocks(pool, ids, out=out)
    assert torch.equal(pool, before)
    assert (out == 7).all()


OTHER_PAGES, META = torch.zeros(7, *SHAPE[1:]), torch.zeros(SHAPE, device="meta")


@pytest.mark.parametrize(
    ("caches", "error", "message"),
    [
        (torch.zeros(SHAPE), TypeError, r"list of caches.*for one cache pass \[kv_cache\]"),
        (tuple(torch.zeros(SHAPE).unbind(1)), ValueError, r"one layer pass \[\(k, v\)\]"),
        (list(torch.zeros(SHAPE).unbind(1)), ValueError, r"one layer pass \[\(k, v\)\]"),
        ([], ValueError, "at least one cache, got none"),
        ([torch.zeros(SHAPE), OTHER_PAGES], ValueError, r"\(7, 4, 2, 8, 8\) and \(6, 4, 2, 8, 8\)"),
        ([torch.zeros(SHAPE), cache()], TypeError, "one dtype, got torch.bfloat16 and torch.float"),
        ([torch.zeros(SHAPE), META], ValueError, r"kv_caches\[1\] must be on a CUDA.*got meta"),
        ([torch.zeros(6, 2, 4, 2, 16)[..., ::2]], ValueError, r"kv_caches\[0\].*stride 1, got 2"),
        ([torch.zeros(6, 2, 0, 2, 8)], ValueError, r"at least one token.*got \(0, 2, 8, 8\)"),
        ([{}], TypeError, r"kv_caches\[0\].*got dict"),
    ],
)
def test_bad_lists_of_caches_are_refused(caches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        block_ops.copy_blocks(caches, mapping((0, 1)))
    with pytest.raises(error, match=message):
        block_ops.zero_blocks(caches, torch.tensor([0]))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((3, *SHAPE[1:]), torch.bfloat16, ValueError, "a page for each of 2 block_ids, got 3"),
        ((2, *SHAPE[1:]), torch.float32, TypeError, "one dtype, got torch.float32"),
        ((2, 2, 4, 2, 4), torch.bfloat16, ValueError, "out and kv_cache must agree in page_size"),
        ((2, 4, 2, 8), torch.bfloat16, ValueError, r"out: kv_cache must be \[num_pages, 2"),
    ],
)
def test_gather_refuses_a_target_that_does_not_fit(
    shape: tuple[int, ...], dtype: torch.dtype, error: type[Exception], message: str
) -> None:
    out = torch.full(shape, 7.0, dtype=dtype)
    with pytest.raises(error, match=message):
        block_ops.gather_blocks(cache(), torch.tensor([0, 1]), out=out)
    assert (out == 7).all()


def test_gather_refuses_another_form_and_its_own_memory() -> None:
    pool, ids = cache(), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="out must be a combined tensor as kv_cache is, got tuple"):
        block_ops.gather_blocks(pool, ids, out=tuple(cache(1)[:2].unbind(1)))
    with pytest.raises(TypeError, match=r"out must be a \(k, v\) tuple as kv_cache is, got Tensor"):
        block_ops.gather_blocks(pool.unbind(1), ids, out=cache(1)[:2])
    with pytest.raises(ValueError, match="out must not share its memory with kv_cache"):
        block_ops.gather_blocks(pool, ids, out=pool[2:4])


def test_values_on_the_device_are_checked_on_request() -> None:
    """`TRITONATTN_VALIDATE=1` lets padding pass; what else is out of range or chained is not."""
    padded = mapping((-1, 9), (1, -1), (0, 5))
    block_checks.check_mapping(padded, 6, 6, one_pool=True, padded=True)
    for bad in ((6, 1), (1, 6), (5, 1), (1, 5)):
        pairs = torch.cat((padded, mapping(bad)))
        with pytest.raises(ValueError, match="src_to_dst"):
            block_checks.check_mapping(pairs, 6, 6, one_pool=True, padded=True)
    block_checks.check_padded_ids(torch.tensor([-7, 5]), 6)
    with pytest.raises(ValueError, match="page 6, allowed are 0 to 5"):
        block_checks.check_padded_ids(torch.tensor([-7, 6]), 6)
