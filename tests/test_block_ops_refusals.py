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
