"""Direct calls of the transformers adapter, as the engine makes them, against fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.engines import transformers as engine
from tritonattn.reference.attention import attention as fp64_attention


class Step:
    """A cache with a history, and the arguments that an engine would pass for a step on it."""

    page_size, num_pages, num_kv_heads, head_dim, num_qo_heads = 4, 12, 2, 16, 6

    def __init__(
        self, past: list[int], new: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.past, self.new, self.dtype = past, new, dtype
        generator = torch.Generator().manual_seed(seed)
        tokens = (self.num_pages + 2) * self.page_size
        shape = (tokens, self.num_kv_heads, self.head_dim)
        # What nobody wrote is NaN: reading it would show.
        caches = [[torch.full(shape, math.nan, dtype=dtype) for _ in range(2)] for _ in range(2)]
        self.cache = SimpleNamespace(
            block_size=self.page_size,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            key_cache=caches[0],
            value_cache=caches[1],
            layer_index_to_group_indices={0: (0, 0), 1: (0, 1)},
            num_sliding_attention_groups=0,
            num_blocks=self.num_pages,
        )
        self.trash = (self.num_pages + 1) * self.page_size
        pages = torch.randperm(self.num_pages, generator=generator).tolist()
        lengths = [p + n for p, n in zip(past, new, strict=True)]
        self.rows = [[pages.pop() for _ in range(-(-n // self.page_size))] for n in lengths]
        slots = [
            [row[i // self.page_size] * self.page_size + i % self.page_size for i in range(length)]
            for row, length in zip(self.rows, lengths, strict=True)
        ]
        total = sum(new)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.k = [[randn(n, *shape[1:]) for n in lengths] for _ in range(2)]  # [layer][request]
        self.v = [[randn(n, *shape[1:]) for n in lengths] for _ in range(2)]
        for layer in range(2):
            for request, kept in enumerate(past):
                at = slots[request][:kept]
                self.cache.key_cache[layer][at] = self.k[layer][request][:kept]
                self.cache.value_cache[layer][at] = self.v[layer][request][:kept]
        self.q = [randn(1, self.num_qo_heads, total, self.head_dim) for _ in range(2)]
        self.kwargs: dict[str, Any] = {
            "cu_seq_lens_q": _cumulative(new),
            "cu_seq_lens_k": _cumulative(lengths),
            "max_seqlen_q": max(new),
            "max_seqlen_k": max(lengths),
            "read_index": [torch.tensor([s for row in slots for s in row])],
            "write_index": [
                torch.tensor([s for row, p in zip(slots, past, strict=True) for s in row[p:]])
            ],
            "block_table": None,
            "scaling": 0.3,
        }

    def new_kv(self, layer: int) -> list[Tensor]:
        """Return the new keys and values as the model passes them, `[1, Hkv, total_q, D]`."""
        parts = []
        for whole in (self.k, self.v):
            rows = torch.cat([x[p:] for x, p in zip(whole[layer], self.past, strict=True)])
            parts.append(rows.transpose(0, 1)[None])
        return parts

    def run(self, layer: int, q: Tensor | None = None, kv: list[Tensor] | None = None) -> Tensor:
        """Call the attention function; return `[total_q, Hq, D]`."""
        module = SimpleNamespace(layer_idx=layer)
        q = self.q[layer] if q is None else q
        out, weights = engine.attention(
            module, q, *(kv or self.new_kv(layer)), None, cache=self.cache, **self.kwargs
        )
        assert weights is None
        assert out.shape == (1, q.size(2), self.num_qo_heads, self.head_dim)
        return out[0]

    def expected(self, layer: int) -> Tensor:
        """Return the fp64 result of a layer, `[total_q, Hq, D]`."""
        rows, begin = [], 0
        q = self.q[layer][0].transpose(0, 1)
        for past, new, k, v in zip(self.past, self.new, self.k[layer], self.v[layer], strict=True):
            mask = torch.arange(past + new)[None] <= torch.arange(past, past + new)[:, None]
            rows.append(fp64_attention(q[begin : begin + new], k, v, mask, 0.3)[0])
            begin += new
        return torch.cat(rows)

    def check(self, layer: int, out: Tensor) -> None:
        """Compare with fp64, and the cache with what should stand in it."""
        expected = self.expected(layer)
        eps = torch.finfo(self.dtype).eps
        bound = (2 * eps + 1e-6) * expected.abs().max().item()
        torch.testing.assert_close(out[: sum(self.new)].double(), expected, rtol=0, atol=bound)
        for pages, whole in ((self.cache.key_cache, self.k), (self.cache.value_cache, self.v)):
            view = pages[layer].view(-1, self.page_size, self.num_kv_heads, self.head_dim)
            for row, kv in zip(self.rows, whole[layer], strict=True):
                assert torch.equal(view[row].flatten(0, 1)[: len(kv)], kv)

    def use_block_table(self) -> None:
        """Turn a decode step into the fast path: a table padded with -1, the indices stale."""
        width = max(map(len, self.rows)) + 1
        table = [row + [-1] * (width - len(row)) for row in self.rows]
        self.kwargs["block_table"] = torch.tensor([table], dtype=torch.int32)
        garbage = torch.full((self.trash,), 1 << 40)
        self.kwargs.update(read_index=[garbage], write_index=[garbage[: sum(self.new)]])
        self.kwargs.update(max_seqlen_q=1, max_seqlen_k=1)

    def pad(self, requests: int, rows: int) -> tuple[Tensor, list[list[Tensor]]]:
        """Pad as for a graph; return the padded q of layer 0 and K/V of both layers."""
        kwargs = self.kwargs
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            end = kwargs[name][-1:]
            kwargs[name] = torch.cat([kwargs[name], end.expand(requests)])
        if kwargs["block_table"] is not None:
            width = kwargs["block_table"].size(2)
            fill = torch.full((1, requests, width), -1, dtype=torch.int32)
            kwargs["block_table"] = torch.cat([kwargs["block_table"], fill], dim=1)
        else:
            kwargs["max_seqlen_q"] += rows
            kwargs["max_seqlen_k"] += 24
            trash = torch.full((rows,), self.trash)
            kwargs["write_index"] = [torch.cat([kwargs["write_index"][0], trash])]
            kwargs["read_index"] = [torch.cat([kwargs["read_index"][0], trash - self.page_size])]
        return _pad_rows(self.q[0], rows), [
            [_pad_rows(x, rows) for x in self.new_kv(layer)] for layer in range(2)
        ]


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    fill = torch.full((1, x.size(1), rows, x.size(3)), math.nan, dtype=x.dtype)
    return torch.cat([x, fill], dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_mixed_step(dtype: torch.dtype) -> None:
    """A decode, a chunk, a fresh prefill and a speculative request in one step, both layers."""
    step = Step([9, 4, 0, 7], [1, 10, 5, 3], dtype)
    for layer in (0, 1):
        step.check(layer, step.run(layer))


def test_fresh_prefills_come_without_read_index() -> None:
    step = Step([0, 0], [9, 4])
    step.kwargs["read_index"] = [torch.empty(0, dtype=torch.int64)]
    step.check(0, step.run(0))


@pytest.mark.parametrize("padding", [0, 3])
def test_block_table_step(padding: int) -> None:
    """Write slots come from the table; requests at the first, last and middle slot of a page."""
    step = Step([4, 3, 8, 0], [1, 1, 1, 1])
    step.use_block_table()
    if not padding:
        step.check(0, step.run(0))
        return
    before = [x.clone() for x in (*step.cache.key_cache, *step.cache.value_cache)]
    q, kv = step.pad(padding, padding)
    out = step.run(0, q, kv[0])
    step.check(0, out)
    assert (out[-padding:] == 0).all()
    # A padded row has no slot: nothing but the four new tokens was written.
    for now, then in zip(
        (step.cache.key_cache[0], step.cache.value_cache[0]), before[::2], strict=True
    ):
        changed = ~((now == then) | (now.isnan() & then.isnan())).flatten(1).all(1)
        assert int(changed.sum()) == 4


def test_padded_step() -> None:
    """Plateaued lengths, NaN in the padded rows, which the write-trash page takes."""
    step = Step([9, 4, 0], [1, 6, 5])
    q, kv = step.pad(requests=2, rows=4)
    out = step.run(0, q, kv[0])
    step.check(0, out)
    assert (out[-4:] == 0).all()
    trash = slice(step.trash, None)
    used = step.cache.key_cache[0][: step.num_pages * step.page_size]
    assert step.cache.key_cache[0][trash].isnan().all()
    assert int((~used.isnan()).flatten(1).all(1).sum()) == 9 + 4 + 1 + 6 + 5


def test_a_plan_does_not_outlive_its_step() -> None:
    """The engine reuses its buffers: the same tensors, with other contents, are another step."""
    first, second = Step([9, 4], [1, 6]), Step([2, 11], [6, 1], seed=1)
    for layer in (0, 1):
        first.check(layer, first.run(layer))
    second.cache.__dict__["_tritonattn_steps"] = first.cache.__dict__["_tritonattn_steps"]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        second.kwargs[name] = first.kwargs[name].copy_(second.kwargs[name])
    for name in ("read_index", "write_index"):
        second.kwargs[name] = [first.kwargs[name][0].copy_(second.kwargs[name][0])]
    for layer in (0, 1):
        second.check(layer, second.run(layer))


def test_a_forward_without_the_first_layer_makes_its_own_plan() -> None:
    first, second = Step([9, 4], [1, 6]), Step([2, 13], [6, 1], seed=1)
    first.run(0)
    second.cache.__dict__["_tritonattn_steps"] = first.cache.__dict__["_tritonattn_steps"]
    second.check(1, second.run(1))


def test_a_plan_serves_the_layers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = engine._make_step
    monkeypatch.setattr(engine, "_make_step", lambda *args: made.append(1) or make(*args))
    step = Step([9, 4], [1, 6])
    for layer in (0, 1, 1):
        step.check(layer, step.run(layer))
    assert len(made) == 1
    step.run(0)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 128),
        ("softcap", 30.0),
        ("s_aux", torch.zeros(6)),
        ("position_bias", torch.zeros(1)),
    ],
)
def test_unsupported_arguments_are_refused(name: str, value: Any) -> None:
    step = Step([4], [1])
    before = step.cache.key_cache[0].clone()
    step.kwargs[name] = value
    with pytest.raises(UnsupportedError, match=f"does not support {name} yet: use 'paged.sdpa'"):
        step.run(0)
    assert torch.equal(step.cache.key_cache[0].nan_to_num(), before.nan_to_num())


def test_neutral_arguments_ask_for_nothing() -> None:
    step = Step([4], [1])
    step.kwargs.update(
        sliding_window=None, softcap=None, s_aux=None, is_causal=True, use_cache=False
    )
    step.check(0, step.run(0))


def test_dropout_mask_and_sliding_groups_are_refused() -> None:
    step = Step([4], [1])
    module, (k, v) = SimpleNamespace(layer_idx=0), step.new_kv(0)
    call = {"cache": step.cache, **step.kwargs}
    with pytest.raises(UnsupportedError, match=r"no dropout, got 0\.1"):
        engine.attention(module, step.q[0], k, v, None, dropout=0.1, **call)
    with pytest.raises(UnsupportedError, match="attention_mask"):
        engine.attention(module, step.q[0], k, v, torch.zeros(1, 1, 1, 5), **call)
    step.cache.num_sliding_attention_groups = 2
    with pytest.raises(UnsupportedError, match=r"sliding window yet, the model has 2 group"):
        engine.attention(module, step.q[0], k, v, None, **call)
