"""Whole runs of an engine over one call path: what the faults that began this project broke."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tritonattn
from tritonattn import PipelineBuffers


@dataclass(frozen=True)
class Shape:
    """Heads, pages and batch of a run."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_batch: int
    max_pages: int  # of a request
    prompt: int  # tokens, at most


class Engine:
    """As much of an engine as attention sees: a pool of pages, requests, steps."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        pages = shape.max_batch * shape.max_pages + 8
        self.cache = torch.full(
            (pages, 2, shape.page_size, shape.num_kv_heads, shape.head_dim), float("nan"),
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        order = torch.randperm(pages, generator=self.generator)
        self.free = order.tolist()
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.stage = PipelineBuffers.allocate(
            num_stages=2, max_batch_size=shape.max_batch,
            max_num_tokens=shape.max_batch * shape.prompt,
            max_pages_per_request=shape.max_pages, num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, page_size=shape.page_size,
            dtype=torch.bfloat16, device=device,
        ).stage(1)  # fmt: skip

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).bfloat16().to(self.device)

    def profile(self, tokens: int) -> Tensor:
        """Run without a cache, as engines do to measure memory."""
        metadata = {
            "qo_indptr": self.int32([0, tokens]),
            "seq_lens": self.int32([tokens]),
            "block_table": torch.zeros(1, 0, dtype=torch.int32, device=self.device),
        }
        q = self.draw(tokens, self.shape.num_qo_heads, self.shape.head_dim)
        return tritonattn.paged_attention(q, None, **metadata, buffers=self.stage)

    def int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def admit(self, tokens: list[int]) -> list[int]:
        """Add requests that have no tokens yet; return their indices."""
        first = len(self.tables)
        for _ in tokens:
            self.tables.append([])
            self.lengths.append(0)
        return list(range(first, len(self.tables)))

    def step(self, requests: list[int], tokens: list[int]) -> Tensor:
        """Append new tokens of some requests and attend them; check against fp64."""
        shape = self.shape
        slots = [slot for r, n in zip(requests, tokens, strict=True) for slot in self.grow(r, n)]
        total = sum(tokens)
        key, value = (self.draw(total, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        mapping = torch.tensor(slots, device=self.device)
        tritonattn.reshape_and_cache(key, value, self.cache, mapping)
        q = self.draw(total, shape.num_qo_heads, shape.head_dim)
        out = self.attend(q, requests, tokens)
        expected = self.attend(q, requests, tokens, backend="reference")
        torch.testing.assert_close(out.float(), expected.float(), rtol=2e-2, atol=2e-2)
        return out

    def attend(self, q: Tensor, requests: list[int], tokens: list[int], **options: Any) -> Tensor:
        """Update the stage and attend, by the one path of all steps."""
        ends = [0]
        for count in tokens:
            ends.append(ends[-1] + count)
        width = max(len(self.tables[r]) for r in requests)
        rows = [self.tables[r] + [-1] * (width - len(self.tables[r])) for r in requests]
        self.stage.update(
            qo_indptr=torch.tensor(ends, dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[r] for r in requests], dtype=torch.int32),
            block_table=torch.tensor(rows, dtype=torch.int32),
        )
        metadata = self.stage.metadata(len(requests))
        out = tritonattn.paged_attention(q, self.cache, **metadata, buffers=self.stage, **options)
        assert isinstance(out, Tensor)
        return out

    def grow(self, request: int, tokens: int) -> list[int]:
        """Give a request pages for more tokens; return the slots of these."""
        table, page_size = self.tables[request], self.shape.page_size
        slots = []
        for _ in range(tokens):
            at = self.lengths[request]
            if at % page_size == 0:
                table.append(self.free.pop())
            slots.append(table[at // page_size] * page_size + at % page_size)
            self.lengths[request] += 1
        return slots


def profile_prefill_decode(shape: Shape, device: str) -> None:
    """Seed 1: prefill reads the cache; nothing is taken for an empty cache but what says so."""
    engine = Engine(shape, device)
    out = engine.profile(shape.prompt)
    assert (out == 0).all()
    assert out.shape == (shape.prompt, shape.num_qo_heads, shape.head_dim)

    prompts = [1 + 7 * i % shape.prompt for i in range(shape.max_batch)]
    requests = engine.admit(prompts)
    out = engine.step(requests, prompts)
    assert out.abs().sum() > 0

    q = engine.draw(sum(prompts), shape.num_qo_heads, shape.head_dim)
    ends = torch.tensor([0, *prompts]).cumsum(0).int().to(device)
    lengths = engine.int32(engine.lengths)
    step = {"qo_indptr": ends, "seq_lens": lengths, "buffers": engine.stage}
    none = torch.zeros(shape.max_batch, 0, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="block_table has no columns, but there are"):
        tritonattn.paged_attention(q, engine.cache, block_table=none, **step)
    with pytest.raises(ValueError, match=f"batch \\+ 1 = {shape.max_batch + 1} entries .* got 1"):
        tritonattn.paged_attention(
            q, engine.cache, indptr=engine.int32([0]), indices=engine.int32([0]), **step
        )

    for batch in (shape.max_batch, 1, shape.max_batch // 2, shape.max_batch):
        chosen = requests[-batch:]
        engine.step(chosen, [1] * batch)
    # A chunk of a prompt beside decodes, by the same path.
    engine.step(requests[:3], [1, 5, 1])


def block_ops_between_steps(shape: Shape, device: str) -> None:
    """Seed 2: a request is forked, another goes to host memory and back into other pages."""
    engine = Engine(shape, device, seed=1)
    requests = engine.admit([0] * 4)
    engine.step(requests, [shape.prompt, shape.prompt - 1, 5, shape.page_size])

    source = engine.tables[0]
    target = [engine.free.pop() for _ in source]
    tritonattn.copy_blocks([engine.cache], torch.tensor(list(zip(source, target, strict=True))))
    (fork,) = engine.admit([0])
    engine.tables[fork], engine.lengths[fork] = target, engine.lengths[0]
    q = engine.draw(2, shape.num_qo_heads, shape.head_dim)
    q[1] = q[0]
    both = engine.attend(q, [0, fork], [1, 1])
    assert torch.equal(both[0], both[1])

    host = torch.empty((8, *engine.cache.shape[1:]), dtype=engine.cache.dtype)
    if device != "cpu":
        host = host.pin_memory()
    before = engine.attend(q[:1], [1], [1]).clone()
    away = list(enumerate(engine.tables[1]))
    tritonattn.swap_blocks(engine.cache, host, torch.tensor([(page, i) for i, page in away]))
    if device != "cpu":
        torch.cuda.synchronize()
    engine.cache[engine.tables[1]] = float("nan")
    engine.step([0, 2], [1, 1])
    new = [engine.free.pop() for _ in away]
    tritonattn.swap_blocks(host, engine.cache, torch.tensor(list(enumerate(new))))
    engine.tables[1] = new
    assert torch.equal(engine.attend(q[:1], [1], [1]), before)
    # The two that were one go on apart.
    engine.step([0, 1, 2, 3, fork], [1, 1, 1, 1, 1])
    engine.step([fork, 0], [1, 2])
