"""The page-table kernels against their torch twins, and both against tables built by hand."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonattn.kernels import page_table as kernels
from tritonattn.reference import page_table as twins

SENTINEL = 7777
# Padding names this slot; a table made of it would be seen.
GARBAGE = 1 << 40
BOTH = pytest.mark.parametrize("ops", [kernels, twins], ids=["kernel", "twin"])


def slots_of(rows: list[list[int]], lengths: list[int], page_size: int) -> list[int]:
    """Return the slots of all keys, request by request, as an engine lists them."""
    return [
        row[i // page_size] * page_size + i % page_size
        for row, length in zip(rows, lengths, strict=True)
        for i in range(length)
    ]


def cumulative(lengths: list[int], padding: int = 0) -> Tensor:
    ends = torch.tensor([0, *lengths, *[0] * padding])
    return ends.cumsum(0).int()


def slots_to_pages(
    ops: ModuleType, slots: list[int], cu: Tensor, width: int, page_size: int
) -> tuple[Tensor, Tensor]:
    table = torch.full((cu.numel() - 1, width), SENTINEL, dtype=torch.int32)
    seq_lens = torch.full((cu.numel() - 1,), SENTINEL, dtype=torch.int32)
    ops.slots_to_pages(torch.tensor(slots), cu, table, seq_lens, page_size=page_size)
    return table, seq_lens


@BOTH
def test_slots_to_pages(ops: ModuleType) -> None:
    """Lengths around a page, and none; two padded requests and padded slots."""
    rows, lengths = [[5], [2], [9, 4], []], [3, 4, 5, 0]
    slots = slots_of(rows, lengths, 4) + [GARBAGE] * 6
    table, seq_lens = slots_to_pages(ops, slots, cumulative(lengths, padding=2), 3, 4)
    expected = [[5, -1, -1], [2, -1, -1], [9, 4, -1], [-1] * 3, [-1] * 3, [-1] * 3]
    assert table.tolist() == expected
    assert seq_lens.tolist() == [3, 4, 5, 0, 0, 0]


@BOTH
def test_a_row_shorter_than_its_request_is_cut(ops: ModuleType) -> None:
    slots = slots_of([[1, 2, 3]], [11], 4)
    table, seq_lens = slots_to_pages(ops, slots, cumulative([11]), 2, 4)
    assert table.tolist() == [[1, 2]]
    assert seq_lens.tolist() == [11]


def test_slots_that_are_missing_are_not_read() -> None:
    """A cumulative length beyond the slots given: the kernel stops at their end."""
    slots = torch.tensor([*range(8), GARBAGE])[:8]
    table = torch.empty(1, 4, dtype=torch.int32)
    kernels.slots_to_pages(
        slots, cumulative([16]), table, torch.empty(1, dtype=torch.int32), page_size=4
    )
    assert table.tolist() == [[0, 1, -1, -1]]


@BOTH
def test_a_negative_slot_is_no_page(ops: ModuleType) -> None:
    """Of any size, not only -1: it gives -1, where dividing it gives page 0, or another page."""
    slots = [20, 21, 22, 23, -1, -1, -1, -1, 8, -9, -1, -1, -1]
    table, seq_lens = slots_to_pages(ops, slots, cumulative([9, 4]), 3, 4)
    assert table.tolist() == [[5, -1, 2], [-1, -1, -1]]
    assert seq_lens.tolist() == [9, 4]


@BOTH
def test_last_slots(ops: ModuleType) -> None:
    """Lengths 1, a page, one more, none; the last row is not read; q has two rows more."""
    block_table = torch.tensor([[3, -1, -1], [8, -1, -1], [2, 6, -1], [-(1 << 20)] * 3]).int()
    seq_lens = torch.full((4,), SENTINEL, dtype=torch.int32)
    slot_mapping = torch.full((6,), SENTINEL)
    cu = cumulative([1, 4, 5, 0])
    ops.last_slots(block_table, cu, seq_lens, slot_mapping, page_size=4)
    assert slot_mapping.tolist() == [12, 35, 24, -1, -1, -1]
    assert seq_lens.tolist() == [1, 4, 5, 0]


@BOTH
def test_last_slots_of_a_strided_table_and_beyond_it(ops: ModuleType) -> None:
    """A request longer than its row, and a page of -1, write nothing."""
    tables = torch.tensor([[[3, 4], [5, -1], [6, 7]]] * 2).int()[:, :, :2]
    tables[0] = -5
    wide = torch.full((3, 4), SENTINEL, dtype=torch.int32)
    wide[:, :2] = tables[1]
    slot_mapping = torch.full((3,), SENTINEL)
    cu = cumulative([9, 5, 8])
    ops.last_slots(wide[:, :2], cu, torch.empty(3, dtype=torch.int32), slot_mapping, page_size=4)
    assert slot_mapping.tolist() == [-1, -1, 31]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, int]:
    """Draw page rows, lengths, page size and padded requests."""
    page_size = draw(st.sampled_from([1, 3, 4, 16]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    pages = [-(-length // page_size) for length in lengths]
    ids = draw(st.permutations(range(sum(pages) + 2)))
    rows = [[ids.pop() for _ in range(n)] for n in pages]
    return rows, lengths, page_size, draw(st.integers(0, 3))


@settings(max_examples=25, deadline=None)
@given(step=steps())
def test_kernels_equal_their_twins(step: tuple[list[list[int]], list[int], int, int]) -> None:
    """Both forms lead to the rows that they were made from, and to the slot of the last key."""
    rows, lengths, page_size, padding = step
    cu = cumulative(lengths, padding)
    slots = [*slots_of(rows, lengths, page_size), GARBAGE]
    width = max(1, *map(len, rows))
    table, seq_lens = slots_to_pages(kernels, slots, cu, width, page_size)
    twin_table, twin_lens = slots_to_pages(twins, slots, cu, width, page_size)
    assert torch.equal(table, twin_table)
    assert torch.equal(seq_lens, twin_lens)
    for row, pages in zip(rows, table.tolist(), strict=False):
        assert pages == row + [-1] * (width - len(row))

    last = [torch.full((len(cu),), SENTINEL) for _ in range(2)]
    for ops, out in zip((kernels, twins), last, strict=True):
        ops.last_slots(table, cu, torch.empty_like(seq_lens), out, page_size=page_size)
    assert torch.equal(*last)
    ends = [slots[end - 1] if n else -1 for end, n in zip(cu[1:].tolist(), lengths, strict=False)]
    assert last[0].tolist() == ends + [-1] * (padding + 1)
