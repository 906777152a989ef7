"""The launchers behind block ops: equal to their twins on anything, one launch, widest words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import block_ops, env
from tritonattn.kernels import copy_blocks as copy_op
from tritonattn.kernels import zero_blocks as zero_op
from tritonattn.kernels._words import group_planes
from tritonattn.layout import PagedKVCache
from tritonattn.reference import copy_blocks as copy_twin
from tritonattn.reference import zero_blocks as zero_twin

interpreted = pytest.mark.skipif(
    not env.INTERPRET, reason="kernels take CPU tensors in the interpreter only"
)
PAGES = 6


def storages(seed: int = 0) -> list[Tensor]:
    """Return caches of one geometry: contiguous, with padded pages, with K and V interleaved."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)

    return [
        draw(PAGES, 2, 3, 2, 8),
        draw(PAGES, 2, 4, 2, 8)[:, :, :3],
        draw(PAGES, 3, 2, 2, 8).permute(0, 3, 1, 2, 4),
    ]


def caches(seed: int = 0) -> list[PagedKVCache]:
    return [PagedKVCache.of(cache) for cache in storages(seed)]


def assert_equal(ours: list[PagedKVCache], theirs: list[PagedKVCache]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.k, other.k)
        assert torch.equal(mine.v, other.v)


# What the public functions refuse on the host can reach a kernel from the device.
ANY_ID = st.sampled_from([*range(PAGES), -1, PAGES, -(1 << 40), 1 << 40])


@interpreted
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_copy_equals_its_twin(data: st.DataObject) -> None:
    """Any sources, targets apart from each other and from the sources, ids outside the pool."""
    order = data.draw(st.permutations(range(PAGES)))
    cut = data.draw(st.integers(0, PAGES))
    outside = [-1, PAGES, 1 << 40]
    pairs = [
        (data.draw(st.sampled_from([*order[:cut], *outside])), dst)
        for dst in [*order[cut:], *data.draw(st.lists(st.sampled_from(outside), max_size=2))]
    ]
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    ours, theirs = caches(), caches()
    if pairs:
        copy_op.copy_blocks(ours, ours, *mapping.unbind(1))
    copy_twin.copy_blocks(theirs, theirs, *mapping.unbind(1))
    assert_equal(ours, theirs)


@interpreted
@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(ANY_ID, min_size=1, max_size=5),
    targets=st.permutations([0, 1, 2, 3, 4, 5, -1, PAGES]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    between=st.permutations([0, 1, 2]),
)
def test_copy_between_caches_equals_its_twin(
    ids: list[int], targets: list[int], dtype: torch.dtype, between: list[int]
) -> None:
    """Any sources, repeated too, between any two storages, with and without target ids."""
    src_ids = torch.tensor([max(min(i, 1 << 30), -(1 << 30)) for i in ids], dtype=dtype)
    dst_ids = torch.tensor(targets[: len(ids)])
    src, dst, gathered = between
    ours, theirs = (caches(1), caches(1))
    for copy, made in ((copy_op.copy_blocks, ours), (copy_twin.copy_blocks, theirs)):
        copy([made[src]], [made[dst]], src_ids, dst_ids)
        copy([made[src]], [made[gathered]], src_ids, None)
    assert_equal(ours, theirs)


@interpreted
@settings(max_examples=15, deadline=None)
@given(ids=st.lists(ANY_ID, min_size=1, max_size=6))
def test_zero_equals_its_twin(ids: list[int]) -> None:
    ours, theirs = caches(), caches()
    zero_op.zero_blocks(ours, torch.tensor(ids))
    zero_twin.zero_blocks(theirs, torch.tensor(ids))
    assert_equal(ours, theirs)


@interpreted
def test_padded_pairs_are_skipped() -> None:
    """A mapping of fixed size, -1 past its end: the copy of a replayed graph."""
    ours, theirs = caches(), caches()
    mapping = torch.tensor([[0, 1], [-1, 2], [3, -1], [-1, -1]])
    copy_op.copy_blocks(ours, ours, *mapping.unbind(1))
    copy_twin.copy_blocks(theirs, theirs, *mapping[:1].unbind(1))
    assert_equal(ours, theirs)


@interpreted
def test_ids_may_be_strided() -> None:
    """A column of a larger table, a transposed mapping."""
    ours, theirs = caches(), caches()
    mapping = torch.tensor([[0, 1], [3, 4]]).T
    assert mapping.stride() == (1, 2)
    copy_op.copy_blocks(ours, ours, *mapping.unbind(1))
    zero_op.zero_blocks(ours, torch.tensor([[2, 0], [5, 0]])[:, 0])
    copy_twin.copy_blocks(theirs, theirs, *mapping.unbind(1))
    zero_twin.zero_blocks(theirs, torch.tensor([2, 5]))
    assert_equal(ours, theirs)


@interpreted
def test_all_layers_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for layers of one page shape, wherever they lie; one more for another shape."""
    grids = []
    kernel = copy_op.copy_blocks_kernel

    class Counting:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(copy_op, "copy_blocks_kernel", Counting())
    plain = [storages(seed)[0] for seed in range(4)]
    block_ops.copy_blocks(plain, torch.tensor([[0, 1], [2, 3]]))
    assert grids == [(4 * 2 * 2,)]  # layers x (K, V) x pairs
    assert all(torch.equal(layer[1], layer[0]) for layer in plain)
    padded = storages()[1]
    block_ops.copy_blocks([*plain, padded], torch.tensor([[0, 4]]))
    assert grids[1:] == [(4 * 2,), (2,)]
    assert torch.equal(padded[4], padded[0])


@pytest.mark.parametrize(
    ("cache", "rows", "run", "word", "vector"),
    [
        (torch.empty(9, 2, 16, 8, 128).bfloat16(), 1, 16 * 8 * 128 * 2, 8, 16),
        (torch.empty(9, 2, 17, 8, 128).bfloat16()[:, :, :16], 1, 16 * 8 * 128 * 2, 8, 16),
        (torch.empty(9, 16, 8, 2, 80).half().permute(0, 3, 1, 2, 4), 16 * 8, 160, 8, 16),
        (torch.empty(9, 2, 16, 8, 20).bfloat16(), 1, 16 * 8 * 40, 8, 16),
        (torch.empty(9, 2, 16, 8, 24).bfloat16()[..., :20], 16 * 8, 40, 8, 8),
        (torch.empty(9, 2, 16, 8, 22).bfloat16()[..., :20], 16 * 8, 40, 4, 4),
        (torch.empty(9, 2, 3, 5, 7).to(torch.uint8), 1, 105, 1, 1),
        (torch.empty(9, 2, 1, 1, 3).float(), 1, 12, 4, 4),
        (torch.empty(64).half().as_strided((1, 2, 4, 1, 8), (1, 32, 8, 1, 1)), 1, 64, 8, 16),
    ],
)  # fmt: skip
def test_pages_are_taken_in_the_widest_words(
    cache: Tensor, rows: int, run: int, word: int, vector: int
) -> None:
    """Contiguous dimensions merge into one run; what allows 16 bytes at a time gets them."""
    view = PagedKVCache.of(cache)
    for planes in group_planes([(view.k,), (view.v,)]):
        assert planes.shape.outer * planes.shape.inner == rows
        assert planes.shape.run == run
        assert (planes.word, planes.vector) == (word, vector)


def test_an_unaligned_address_decides_about_all_words() -> None:
    """One layer that begins 2 bytes off 16: no launch may use vectors that it cannot."""
    aligned = torch.empty(9, 2, 4, 2, 8, dtype=torch.int8)
    shifted = torch.empty(9 * 128 + 16, dtype=torch.int8)
    first = -shifted.data_ptr() % 16 + 2
    shifted = shifted[first : first + 9 * 128].view(9, 2, 4, 2, 8)
    (planes,) = group_planes([(aligned[:, 0],), (shifted[:, 0],)])
    assert (planes.word, planes.vector) == (2, 2)
    assert planes.addresses == ((aligned.data_ptr(),), (shifted.data_ptr(),))
