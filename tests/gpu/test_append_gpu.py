"""Appends on a GPU, bit for bit: in graphs whose slots and tables change, beside FlashInfer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tritonattn import block_ops, page

pytestmark = pytest.mark.gpu

PAGES, PAGE, HEADS, DIM = 40, 16, 8, 128


def random(*shape: int, seed: int = 0) -> Tensor:
    """Draw random bytes as bf16: every bit pattern, NaNs too."""
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = (*shape[:-1], 2 * shape[-1])
    raw = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8, device="cuda")
    return raw.view(torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [1, 8, 80])
def test_append_to_any_slots(heads: int, kv_layout: str) -> None:
    """A fused projection's slices, a padded mapping; 80 heads are more than a block has threads."""
    n = 300
    inner = (PAGE, heads) if kv_layout == "NHD" else (heads, PAGE)
    cache = random(PAGES, 2, *inner, DIM)
    _, key, value = random(n, 3 * heads, DIM, seed=1).split(heads, dim=1)
    slots = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(2))[:n].cuda()
    slots[7::5] = -1
    for dtype in (torch.int64, torch.int32):
        expected = bits(cache).clone()
        by_token = expected if kv_layout == "NHD" else expected.transpose(2, 3)
        live = slots[slots >= 0]
        by_token[live // PAGE, 0, live % PAGE] = bits(key)[slots >= 0]
        by_token[live // PAGE, 1, live % PAGE] = bits(value)[slots >= 0]
        block_ops.reshape_and_cache(key, value, cache, slots.to(dtype), kv_layout=kv_layout)
        assert torch.equal(bits(cache), expected)
        cache, slots = random(PAGES, 2, *inner, DIM, seed=4), slots.flip(0)


def test_graph_of_reshape_and_cache_follows_its_slots() -> None:
    """FI 919: capacity 24, the rest of the batch padded with -1."""
    cache = random(PAGES, 2, PAGE, HEADS, DIM)
    key, value = (random(24, HEADS, DIM, seed=seed) for seed in (1, 2))
    slots = torch.full((24,), -1, dtype=torch.int64, device="cuda")
    block_ops.reshape_and_cache(key, value, cache, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_ops.reshape_and_cache(key, value, cache, slots)
    for seed, n in enumerate((24, 5, 0, 1)):
        live = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(seed))[:n]
        key.copy_(random(24, HEADS, DIM, seed=10 + seed))
        slots.fill_(-1)
        slots[:n] = live.cuda()
        expected = bits(cache).clone()
        expected[live // PAGE, 0, live % PAGE] = bits(key)[:n]
        expected[live // PAGE, 1, live % PAGE] = bits(value)[:n]
        graph.replay()
        assert torch.equal(bits(cache), expected)


def append_inputs(seed: int, total: int) -> dict[str, Tensor]:
    """Return two requests that grow: their table, how much is new, and the tokens."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randint(0, total // 2 + 1, (2,), generator=generator)
    lengths = new + torch.randint(0, 60, (2,), generator=generator)
    last = torch.where(lengths > 0, (lengths - 1) % PAGE + 1, 0)
    order = torch.randperm(PAGES, generator=generator)
    return {
        "append_indptr": torch.tensor([0, int(new[0]), int(new.sum())]).int().cuda(),
        "seq_lens": lengths.int().cuda(),
        "kv_indices": order[:20].int().cuda(),
        "kv_indptr": torch.tensor([0, 10, 20]).int().cuda(),
        "kv_last_page_len": last.int().cuda(),
    }


def test_graph_of_append_follows_its_table() -> None:
    """Rows, positions and the append itself in one graph; lengths and table change in place."""
    total, cache = 24, random(PAGES, 2, PAGE, HEADS, DIM)
    key, value = (random(total, HEADS, DIM, seed=seed) for seed in (1, 2))
    names = ("append_indptr", "seq_lens", "kv_indices", "kv_indptr", "kv_last_page_len")
    static = {name: append_inputs(0, total)[name].clone() for name in names}

    def step() -> None:
        rows = page.get_batch_indices_positions(static["append_indptr"], static["seq_lens"], total)
        page.append_paged_kv_cache(key, value, *rows, cache, *(static[n] for n in names[2:]))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        inputs = append_inputs(seed, total)
        for name in names:
            static[name].copy_(inputs[name])
        expected = bits(cache).clone()
        indptr, lengths = inputs["append_indptr"].tolist(), inputs["seq_lens"].tolist()
        for b in range(2):
            for row in range(indptr[b], indptr[b + 1]):
                position = row + lengths[b] - indptr[b + 1]
                at = int(inputs["kv_indices"][10 * b + position // PAGE])
                expected[at, 0, position % PAGE] = bits(key)[row]
                expected[at, 1, position % PAGE] = bits(value)[row]
        graph.replay()
        assert torch.equal(bits(cache), expected)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append_equals_flashinfer(kv_layout: str) -> None:
    theirs = pytest.importorskip("flashinfer.page", reason="FlashInfer is not installed")
    inputs = append_inputs(3, 24)
    nnz = int(inputs["append_indptr"][-1])
    rows = page.get_batch_indices_positions(inputs["append_indptr"], inputs["seq_lens"], nnz)
    their_rows = theirs.get_batch_indices_positions(
        inputs["append_indptr"], inputs["seq_lens"], nnz
    )
    assert all(torch.equal(a, b) for a, b in zip(rows, their_rows, strict=True))
    inner = (PAGE, HEADS) if kv_layout == "NHD" else (HEADS, PAGE)
    ours = random(PAGES, 2, *inner, DIM)
    other = ours.clone()
    key, value = (random(nnz, HEADS, DIM, seed=seed) for seed in (1, 2))
    table = [inputs[n] for n in ("kv_indices", "kv_indptr", "kv_last_page_len")]
    page.append_paged_kv_cache(key, value, *rows, ours, *table, kv_layout)
    theirs.append_paged_kv_cache(key, value, *rows, other, *table, kv_layout)
    assert torch.equal(bits(ours), bits(other))
