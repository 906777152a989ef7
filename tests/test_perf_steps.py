"""The tensors of a case, and the check that stands before every time."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.cases import reference_results
from tritonattn.layout import PagedKVCache
from tritonattn.perf import steps
from tritonattn.perf.cases import BLOCK_OPS, BlockCase, StepCase
from tritonattn.perf.steps import BlockStep, Step, make_step
from tritonattn.reference import attention

CPU = torch.device("cpu")
UNEVEN = "3x1xcycle(1,7,16)+1x5x9+1x2x16"


def make(lengths: str = "3x1x24", op: str = "decode", cold: bool = False, **fields: object) -> Step:
    return Step(StepCase(op, "tiny", lengths, **{"page_size": 8} | fields), CPU, cold)  # type: ignore[arg-type]


def oracle(step: Step) -> Tensor:
    return reference_results(step.inputs)[0][: sum(step.q_lens)]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_tables_describe_one_batch(page_size: int, kv_layout: str) -> None:
    step = make(UNEVEN, "mixed", page_size=page_size, kv_layout=kv_layout)
    assert step.q_lens == (1, 1, 1, 5, 2)
    assert step.kv_lens == (1, 8, 15, 9, 16)
    assert step.seq_lens.tolist() == [1, 8, 15, 9, 16]
    assert step.qo_indptr.tolist() == [0, 1, 2, 3, 8, 10]
    pages = [math.ceil(length / page_size) for length in step.kv_lens]
    assert step.indptr.tolist() == [sum(pages[:i]) for i in range(6)]
    assert step.block_table.shape == (5, max(pages))
    assert step.block_table.is_contiguous()
    for i, (used, length) in enumerate(zip(pages, step.kv_lens, strict=True)):
        row = step.indices[int(step.indptr[i]) : int(step.indptr[i + 1])]
        assert step.block_table[i].tolist() == row.tolist() + [-1] * (max(pages) - used)
        assert (used - 1) * page_size + int(step.last_page_len[i]) == length
    assert len(set(step.indices.tolist())) == len(step.indices)
    for table in (step.seq_lens, step.qo_indptr, step.indptr, step.indices, step.last_page_len):
        assert table.dtype == torch.int32
    assert step.block_table.dtype == torch.int32

    (layer,) = step.layers
    inner = (page_size, 2) if kv_layout == "NHD" else (2, page_size)
    assert layer.kv_cache.shape[1:] == (2, *inner, 16)
    assert layer.kv_cache.size(0) > int(step.indices.max())
    assert layer.q.shape == layer.out.shape == (10, 4, 16)
    # Peers may read slots past the end of a request, not act on NaN there.
    assert layer.kv_cache.isfinite().all()


def test_the_tables_lead_to_the_keys_of_the_oracle() -> None:
    # What a provider is given, gathered by hand, is what the step checks against.
    step = make(UNEVEN, "mixed", page_size=8, dtype="fp32")
    layer = step.layers[0]
    rows = []
    for i, (q_len, length) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
        pages = step.indices[int(step.indptr[i]) : int(step.indptr[i + 1])].long()
        k, v = (half.flatten(0, 1)[:length].double() for half in layer.kv_cache[pages].unbind(1))
        q = layer.q[int(step.qo_indptr[i]) : int(step.qo_indptr[i + 1])].double()
        for token in range(q_len):
            seen = length - q_len + token + 1
            for head in range(4):
                logits = k[:seen, head // 2] @ q[token, head] * step.sm_scale
                rows.append(logits.softmax(0) @ v[:seen, head // 2])
    accuracy = step.check(torch.stack(rows).view(10, 4, 16).float())
    assert accuracy.problem is None
    assert accuracy.worst_row < 1e-6


def test_cold_layers_are_apart_in_memory() -> None:
    step = make(cold=True)
    assert len(step.layers) > 1
    addresses = set()
    for layer in step.layers:
        for name in ("q", "kv_cache", "out"):
            tensor, first = getattr(layer, name), getattr(step.layers[0], name)
            assert tensor.shape == first.shape
            assert tensor.stride() == first.stride()
            assert tensor.dtype == first.dtype
            addresses.add(tensor.untyped_storage().data_ptr())
        # One plan and one answer are right for all.
        assert torch.equal(layer.kv_cache, step.layers[0].kv_cache)
        assert torch.equal(layer.q, step.layers[0].q)
    assert len(addresses) == 3 * len(step.layers)
    assert len(make(cold=False).layers) == 1


@pytest.mark.parametrize(
    ("size", "layers"),
    [(1000, 256), (1_000_000, 200), (10_000_000, 20), (49_000_000, 5), (51_000_000, 4), (10**9, 1)],
)
def test_number_of_cold_layers(monkeypatch: pytest.MonkeyPatch, size: int, layers: int) -> None:
    properties = SimpleNamespace(L2_cache_size=50_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert steps._cold_layers(size, torch.device("cuda")) == layers


def test_poison_takes_every_output() -> None:
    step = make(cold=True)
    for layer in step.layers:
        layer.out.zero_()
    step.poison()
    assert all(layer.out.isnan().all() for layer in step.layers)
    assert all(layer.q.isfinite().all() for layer in step.layers)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("lengths", ["3x1x24", UNEVEN, "1x1x1"])
def test_the_rounded_oracle_is_right(lengths: str, dtype: str) -> None:
    step = make(lengths, "mixed", dtype=dtype)
    accuracy = step.check(oracle(step).to(step.dtype))
    assert accuracy.problem is None
    step_of_dtype = torch.finfo(step.dtype).eps
    assert 0 <= accuracy.rms_rel <= accuracy.worst_row <= 0.5 * step_of_dtype
    assert accuracy.step <= max(step_of_dtype, 1e-6)


def test_parts_and_flat_rows_are_as_good() -> None:
    step = make(UNEVEN, "mixed")
    right = oracle(step).to(step.dtype)
    assert step.check([right[:3], right[3:]]).problem is None
    assert step.check((right,)).problem is None
    assert step.check([right.view(10, 64)]).problem is None
    assert step.check([right[3:], right[:3]]).problem is not None


def negated(row: Tensor) -> Tensor:
    return -row


def scaled(row: Tensor) -> Tensor:
    return row * 1.05


def without_an_element(row: Tensor) -> Tensor:
    return row * (torch.arange(row.numel()).reshape(row.shape) != int(row.abs().argmax()))


@pytest.mark.parametrize(
    "spoil",
    [torch.zeros_like, negated, scaled, without_an_element, lambda row: row + math.nan],
    ids=["zero", "negated", "scaled", "an element", "nan"],
)
@pytest.mark.parametrize("at", [(0, 0), (511, 3), (200, 1)])
def test_one_wrong_row_among_many(spoil: Callable[[Tensor], Tensor], at: tuple[int, int]) -> None:
    step = make("64x8x24", "prefill")
    rows = oracle(step).to(step.dtype)
    assert rows.shape == (512, 4, 16)
    rows[at] = spoil(rows[at])
    problem = step.check(rows).problem
    assert problem is not None
    assert "the worst row is off by" in problem


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_no_number(bad: float) -> None:
    step = make("64x8x24", "prefill")
    rows = oracle(step).to(step.dtype)
    rows[300, 2, 5] = bad
    assert step.check(rows).problem is not None


def test_outputs_that_were_never_written() -> None:
    step = make()
    step.poison()
    assert step.check(step.layers[0].out).problem is not None


@pytest.mark.parametrize(
    ("first", "second"), [((1, 0), (1, 1)), ((3, 2), (4, 2)), ((0, 3), (9, 0))]
)
def test_two_swapped_rows(first: tuple[int, int], second: tuple[int, int]) -> None:
    step = make(UNEVEN, "mixed")
    rows = oracle(step).to(step.dtype)
    rows[first], rows[second] = rows[second].clone(), rows[first].clone()
    assert step.check(rows).problem is not None


@pytest.mark.parametrize("length", [2, 24, 128, 400])
@pytest.mark.parametrize("lost", ["first", "last"])
def test_a_missing_key_in_one_row(length: int, lost: str) -> None:
    step = make(f"16x1x{length}", page_size=16)
    inputs = step.inputs
    rows = oracle(step).to(step.dtype)
    cache = PagedKVCache.of(inputs.kv_cache, "NHD")
    k, v = (attention.gather(half, step.block_table[5], length) for half in (cache.k, cache.v))
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, 0 if lost == "first" else -1] = False
    out, _ = attention.attention(inputs.q[5:6].double(), k, v, mask, step.sm_scale)
    rows[5] = out[0].to(step.dtype)
    assert step.check(rows).problem is not None


def test_a_key_that_every_row_lacks() -> None:
    """With many keys no single row stands out; all of them together do."""
    length = 4096
    step = make(f"32x1x{length}", page_size=16)
    inputs = step.inputs
    cache = PagedKVCache.of(inputs.kv_cache, "NHD")
    rows = []
    for i in range(32):
        row = step.block_table[i]
        k, v = (attention.gather(half, row, length) for half in (cache.k, cache.v))
        mask = torch.ones(1, length, dtype=torch.bool)
        mask[0, -1] = False
        q = inputs.q[i : i + 1].double()
        rows.append(attention.attention(q, k, v, mask, step.sm_scale)[0])
    accuracy = step.check(torch.cat(rows).to(step.dtype))
    assert accuracy.rms_rel > 0.75 * accuracy.step
    assert accuracy.problem is not None
    assert step.check(oracle(step).to(step.dtype)).problem is None


@pytest.mark.parametrize(
    ("rms", "worst"), [(0.8, 1.4), (0.7, 1.6), (math.nan, 0.3), (0.3, math.nan)]
)
def test_both_bounds_count(rms: float, worst: float) -> None:
    assert steps.Accuracy(rms, worst, 1.0).problem is not None
    assert steps.Accuracy(0.7, 1.4, 1.0).problem is None


def test_a_mask_that_is_one_key_off() -> None:
    step = make("2x16x64", "prefill")
    late = make("2x16x64", "prefill", causal=False)
    assert torch.equal(step.layers[0].q, late.layers[0].q)
    assert step.check(oracle(late).to(step.dtype)).problem is not None
    # Of bottom-right and top-left, the first is meant.
    inputs = step.inputs
    cache = PagedKVCache.of(inputs.kv_cache, "NHD")
    top_left = []
    for i in range(2):
        k, v = (attention.gather(half, step.block_table[i], 64) for half in (cache.k, cache.v))
        mask = torch.ones(16, 64, dtype=torch.bool).tril()
        q = inputs.q[16 * i : 16 * i + 16].double()
        top_left.append(attention.attention(q, k, v, mask, step.sm_scale)[0])
    assert step.check(torch.cat(top_left).to(step.dtype)).problem is not None


def test_features_that_the_oracle_lacks() -> None:
    # A peer that applies the window would be called wrong, one that does not, right.
    for fields in ({"window_left": 7}, {"logits_soft_cap": 30.0}):
        with pytest.raises(UnsupportedError, match=r"the oracle has no (w7|cap30\.0) yet"):
            make(**fields)


def test_the_oracle_of_a_long_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = oracle(make(UNEVEN + "+1x13x29", "mixed"))
    for logits in (1, 4 * 29 * 5, 4 * 29 * 13 - 1):
        monkeypatch.setattr(attention, "MAX_LOGITS", logits)
        chunked = oracle(make(UNEVEN + "+1x13x29", "mixed"))
        assert torch.allclose(chunked, whole, rtol=1e-14, atol=1e-15)
        assert torch.isfinite(chunked).all()


def block_step(what: str = "swap_blocks", **fields: object) -> BlockStep:
    return BlockStep(BlockCase(what, "tiny", 2, 5, 12, 8, **fields), CPU)  # type: ignore[arg-type]


def move(step: BlockStep) -> None:
    for layer in step.layers:
        for source, target in zip(layer.sources, layer.targets, strict=True):
            for a, b in step.src_to_dst.tolist():
                target[b] = source[a]


@pytest.mark.parametrize("what", BLOCK_OPS)
def test_pages_of_a_block_step(what: str) -> None:
    step = block_step(what)
    source, target = step.src_to_dst.unbind(1)
    assert step.src_to_dst.shape == (5, 2)
    assert len(set(source.tolist())) == len(set(target.tolist())) == 5
    assert set(source.tolist()) | set(target.tolist()) <= set(range(12))
    same = what == "copy_blocks"
    assert (step.layers[0].sources is step.layers[0].targets) == same
    if same:
        # Otherwise the order of the moves would matter.
        assert not set(source.tolist()) & set(target.tolist())
    assert torch.equal(step.on_device, step.src_to_dst)
    assert step.check(None).problem is not None, "nothing is moved yet"
    step.poison()
    assert all(s[source].isfinite().all() for s in step.layers[0].sources)
    move(step)
    accuracy = step.check(None)
    assert accuracy.problem is None
    assert (accuracy.rms_rel, accuracy.worst_row) == (0, 0)


@pytest.mark.parametrize("what", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize(("layer", "pair"), [(0, 0), (1, 4)])
def test_a_page_that_was_not_moved(what: str, layer: int, pair: int) -> None:
    step = block_step(what)
    move(step)
    kept = step.layers[0].targets[layer][step.src_to_dst[pair, 1]].clone()
    step.poison()
    move(step)
    assert step.check(None).problem is None
    target = step.layers[0].targets[layer]
    target[step.src_to_dst[pair, 1], 1, 7, 1, 15] += 1
    assert step.check(None).problem is not None
    target[step.src_to_dst[pair, 1]] = kept
    assert step.check(None).problem is None
    target[step.src_to_dst[pair, 1]] = math.nan
    assert step.check(None).problem is not None


def test_two_pages_in_each_other_s_place() -> None:
    step = block_step()
    move(step)
    target, (a, b) = step.layers[0].targets[1], step.src_to_dst[:2, 1].tolist()
    target[a], target[b] = target[b].clone(), target[a].clone()
    assert step.check(None).problem is not None


def test_two_tensors_that_are_to_be_equal() -> None:
    step = block_step()
    data = torch.arange(6.0)
    assert step.check([data, data.clone()]).problem is None
    assert step.check([data, data + torch.eye(6)[3]]).problem is not None


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_make_step(kv_layout: str) -> None:
    step = make_step(StepCase("decode", "tiny", "1x1x9", 8, kv_layout), CPU, cold=True)
    assert isinstance(step, Step)
    blocks = make_step(BlockCase("swap_blocks", "tiny", 1, 1, 2, 8, kv_layout), CPU, cold=True)
    assert isinstance(blocks, BlockStep)
    inner = (8, 2) if kv_layout == "NHD" else (2, 8)
    assert blocks.layers[0].sources[0].shape == (2, 2, *inner, 16)
