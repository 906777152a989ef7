"""Wrappers with `use_cuda_graph=True` on CPU tensors: fixed buffers, any batch they can hold.

A CPU cannot capture, but `run()` reads nothing but the buffers, as a replay does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn.cases import AttentionCase, AttentionInputs, make_inputs
from tritonattn.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from tritonattn.kernels import plan as plan_op
from tritonattn.prefill import BatchPrefillWithPagedKVCacheWrapper

HEADS = (4, 2, 16, 4)
CAPACITY = 8
MAX_ENTRIES = 64
GARBAGE = 9


def make(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> AttentionInputs:
    return make_inputs(AttentionCase(q_lens, kv_lens, 4, 2, 16, page_size=4, dtype=torch.float16))


def buffer(entries: int) -> torch.Tensor:
    return torch.full((entries,), GARBAGE, dtype=torch.int32)


def buffers(capacity: int = CAPACITY) -> list[torch.Tensor]:
    """Return indptr, indices and last_page_len."""
    return [buffer(capacity + 1), buffer(MAX_ENTRIES), buffer(capacity)]


def decode_wrapper(fixed: list[torch.Tensor]) -> CUDAGraphBatchDecodeWithPagedKVCacheWrapper:
    scratch = torch.full((1 << 14,), 0xFF, dtype=torch.uint8)
    return CUDAGraphBatchDecodeWithPagedKVCacheWrapper(scratch, *fixed)


def prefill_wrapper(fixed: list[torch.Tensor]) -> BatchPrefillWithPagedKVCacheWrapper:
    """Make one; `fixed` begins with qo_indptr."""
    scratch = torch.full((1 << 14,), 0xFF, dtype=torch.uint8)
    return BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", True, *fixed)


def padded(q: torch.Tensor, rows: int) -> torch.Tensor:
    """Return q with NaN rows up to `rows`: as a graph for more requests sees it."""
    return torch.cat((q, q.new_full((rows - q.size(0), *q.shape[1:]), math.nan)))


def check(wrapper: Any, inputs: AttentionInputs, rows: int) -> None:
    """Run with q of `rows` rows; assert results, and 0 and -inf in the padding."""
    end = int(inputs.qo_indptr[-1])
    q = padded(inputs.q[:end], rows)
    out, lse = wrapper.run(q, inputs.kv_cache, return_lse=True)
    call = {**inputs.arguments(), "q": inputs.q[:end], "backend": "reference", "return_lse": True}
    expected, expected_lse = tritonattn.paged_attention(**call)
    torch.testing.assert_close(out[:end], expected, rtol=0, atol=4e-3)
    torch.testing.assert_close(lse[:end], expected_lse, rtol=1e-5, atol=1e-4)
    assert (out[end:] == 0).all()
    assert (lse[end:] == -math.inf).all()


STEPS = [(5, 0, 17, 4, 9), (3,) * 8, (40, 1), (), (16, 16, 16)]


def test_decode_takes_any_batch_up_to_capacity() -> None:
    """FlashInfer demands the one batch size of the buffers; here it may grow and shrink."""
    fixed = buffers()
    addresses = [tensor.data_ptr() for tensor in fixed]
    wrapper = decode_wrapper(fixed)
    assert wrapper.is_cuda_graph_enabled
    for kv_lens in STEPS + STEPS[::-1]:
        inputs = make((1,) * len(kv_lens), kv_lens)
        indptr, indices, last_page_len = inputs.last_page_table()
        wrapper.plan(indptr, indices, last_page_len, *HEADS)
        batch = len(kv_lens)
        assert torch.equal(fixed[0][: batch + 1], indptr)
        assert (fixed[0][batch:] == indptr[-1]).all()
        assert torch.equal(fixed[1][: indices.numel()], indices)
        assert torch.equal(fixed[2][:batch], last_page_len)
        assert (fixed[2][batch:] == 0).all()
        for requests in sorted({batch, min(batch + 1, CAPACITY), CAPACITY}):
            check(wrapper, inputs, requests)
    assert [tensor.data_ptr() for tensor in fixed] == addresses


def test_vllm_6708_batch_sizes_share_the_buffers_of_a_stage() -> None:
    """The bug of vLLM 6708: all sizes of a stage have wrappers on views of one set of buffers.

    Two stages are used in turn, sizes from the largest to the smallest and back; a batch of 5 runs
    in the graph of 8.
    """
    sizes = (8, 4, 2, 1)
    stages = [buffers() for _ in range(2)]
    wrappers = {
        (stage, size): decode_wrapper([fixed[0][: size + 1], fixed[1], fixed[2][:size]])
        for stage, fixed in enumerate(stages)
        for size in sizes
    }
    lengths = (5, 9, 1, 17, 4, 8, 2, 3, 6)
    for size in sizes + sizes[::-1]:
        for stage in (0, 1):
            inputs = make((1,) * size, lengths[stage : stage + size])
            wrapper = wrappers[stage, size]
            wrapper.plan(*inputs.last_page_table(), *HEADS)
            check(wrapper, inputs, size)
    for stage in (1, 0):
        inputs = make((1,) * 5, lengths[:5])
        wrappers[stage, 8].plan(*inputs.last_page_table(), *HEADS)
        check(wrappers[stage, 8], inputs, 8)
    assert all(fixed[0].numel() == CAPACITY + 1 for fixed in stages)


def test_changes_in_place_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run() launches the device planner, which reads what stands in the buffers."""
    launches: list[int] = []
    launch = plan_op.plan
    monkeypatch.setattr(
        plan_op, "plan", lambda spec, *rest: (launches.append(spec.batch_size), launch(spec, *rest))
    )
    fixed = buffers(4)
    wrapper = decode_wrapper(fixed)
    wrapper.plan(*make((1,) * 4, (1,) * 4).last_page_table(), *HEADS)
    assert launches == []
    for kv_lens in ((5, 0, 17, 4), (1, 2, 3, 40)):
        inputs = make((1,) * 4, kv_lens)
        for target, source in zip(fixed, inputs.last_page_table(), strict=True):
            target[: source.numel()] = source
        check(wrapper, inputs, 4)
    assert launches == [4, 4]


def test_several_query_tokens() -> None:
    wrapper = decode_wrapper(buffers())
    for q_len in (2, 3, 1):
        inputs = make((q_len,) * 3, (5, q_len, 17))
        wrapper.plan(*inputs.last_page_table(), *HEADS, q_len_per_req=q_len)
        check(wrapper, inputs, 3 * q_len)
        check(wrapper, inputs, 7 * q_len)


def test_fast_decode_plan_copies_nothing_but_pads() -> None:
    """As SGLang uses it: the buffers are filled by the engine, `begin_forward` is replaced."""
    fixed = buffers()
    wrapper = decode_wrapper(fixed)
    wrapper.begin_forward = functools.partial(fast_decode_plan, wrapper)
    inputs = make((1,) * 5, (5, 0, 17, 4, 9))
    table = inputs.last_page_table()
    for target, source in zip((wrapper._paged_kv_indptr_buf, *fixed[1:]), table, strict=True):
        target[: source.numel()] = source
    views = (fixed[0][:6], wrapper._paged_kv_indices_buf, fixed[2][:5])
    wrapper.begin_forward(
        *views, *HEADS, q_data_type=torch.float16, global_override_indptr_cpu=None
    )
    check(wrapper, inputs, 8)
    before = [tensor.clone() for tensor in fixed]
    other = make((1,) * 5, (1,) * 5).last_page_table()
    wrapper.begin_forward(*other, *HEADS, data_type="float16")
    assert all(torch.equal(a, b) for a, b in zip(fixed, before, strict=True))
    check(wrapper, inputs, 5)


def test_fi_726_prefill_with_zero_length_requests() -> None:
    """FI 726: capacity 24, a few requests of 5 queries at group 5, the rest padded with kv 0."""
    capacity = 24
    fixed = [buffer(capacity + 1), *buffers(capacity)]
    wrapper = prefill_wrapper(fixed)
    for live in (6, 24, 0, 3):
        kv_lens = tuple(5 + 3 * i % 9 for i in range(live)) if live < 24 else (5, 0) * 12
        case = AttentionCase((5,) * live, kv_lens, 10, 2, 16, page_size=16, dtype=torch.float16)
        inputs = make_inputs(case)
        wrapper.plan(inputs.qo_indptr, *inputs.last_page_table(), 10, 2, 16, 16, causal=True)
        assert (fixed[0][live:] == 5 * live).all()
        for rows in (5 * live, 5 * capacity):
            check(wrapper, inputs, rows)


def test_prefill_takes_any_batch_and_changes_in_place() -> None:
    fixed = [buffer(CAPACITY + 1), *buffers()]
    addresses = [tensor.data_ptr() for tensor in fixed]
    wrapper = prefill_wrapper(fixed)
    steps = [((12, 1, 0, 3), (20, 9, 0, 2)), ((1,) * 8, (5,) * 8), ((30,), (33,)), ((), ())]
    for q_lens, kv_lens in steps + steps[::-1]:
        inputs = make(q_lens, kv_lens)
        arguments = {"causal": True, "max_token_per_sequence": 1, "max_sequence_kv": 1}
        wrapper.plan(inputs.qo_indptr, *inputs.last_page_table(), *HEADS, **arguments)
        check(wrapper, inputs, 40)
    inputs = make((7,) * 3, (9, 8, 7))
    for target, source in zip(fixed, (inputs.qo_indptr, *inputs.last_page_table()), strict=True):
        target[: source.numel()] = source
    fixed[0][4:] = fixed[0][3]
    fixed[1][4:] = fixed[1][3]
    check(wrapper, inputs, 21)
    assert [tensor.data_ptr() for tensor in fixed] == addresses


TABLE = make((1,) * 3, (5, 0, 17)).last_page_table()


@pytest.mark.parametrize(
    ("match", "table"),
    [
        ("batch size must be at most 2, .* got 3", TABLE),
        ("indices must have at most 4 entries, .* got 5",
         (torch.tensor([0, 5, 5]).int(), torch.arange(5).int(), TABLE[2][:2])),
        ("indptr must not decrease, request 1 spans .3, 2.",
         (torch.tensor([0, 3, 2]).int(), torch.arange(3).int(), TABLE[2][:2])),
        ("last_page_len must be from 0 to page_size = 4, request 0 has 5",
         (torch.tensor([0, 1, 2]).int(), torch.arange(2).int(), torch.tensor([5, 1]).int())),
        (r"indptr must have batch \+ 1 = 3 entries .* got 2",
         (torch.tensor([0, 1]).int(), torch.arange(2).int(), torch.tensor([1, 1]).int())),
    ],
    ids=["batch", "entries", "decreasing", "last_page_len", "length"],
)  # fmt: skip
def test_a_refused_plan_leaves_the_buffers_and_the_step(
    match: str, table: tuple[torch.Tensor, ...]
) -> None:
    fixed = [buffer(3), buffer(4), buffer(2)]
    wrapper = decode_wrapper(fixed)
    inputs = make((1, 1), (5, 6))
    wrapper.plan(*inputs.last_page_table(), *HEADS)
    before = [tensor.clone() for tensor in fixed]
    with pytest.raises(ValueError, match=match):
        wrapper.plan(*table, *HEADS)
    assert all(torch.equal(a, b) for a, b in zip(fixed, before, strict=True))
    check(wrapper, inputs, 2)


def test_rows_that_fit_no_graph() -> None:
    wrapper = decode_wrapper(buffers())
    inputs = make((2,) * 3, (5, 2, 17))
    wrapper.plan(*inputs.last_page_table(), *HEADS, q_len_per_req=2)
    for rows in (4, 7, 18):
        with pytest.raises(ValueError, match=rf"2 rows for each of 3 .* to 8 .* got {rows} rows"):
            wrapper.run(padded(inputs.q[:0], rows), inputs.kv_cache)
    wrapper = prefill_wrapper([buffer(CAPACITY + 1), *buffers()])
    wrapper.plan(inputs.qo_indptr, *inputs.last_page_table(), *HEADS)
    with pytest.raises(ValueError, match=r"at least qo_indptr\[-1\] = 6 rows, got 5"):
        wrapper.run(inputs.q[:5], inputs.kv_cache)


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "paged_kv_indices_buffer must be a torch.Tensor .* got None",
         {"indices": None}),
        (ValueError, r"indptr_buffer must have batch \+ 1 = 9 entries .* got 8",
         {"indptr": buffer(8)}),
        (TypeError, "paged_kv_last_page_len_buffer must be int32",
         {"last_page_len": torch.ones(8)}),
        (ValueError, "must be on cpu, got meta", {"indices": buffer(4).to("meta")}),
        (TypeError, "paged_kv_indptr_buffer must be a torch.Tensor, got list", {"indptr": [0, 1]}),
    ],
)  # fmt: skip
def test_refused_buffers(error: type[Exception], match: str, change: dict[str, Any]) -> None:
    given = dict(zip(("indptr", "indices", "last_page_len"), buffers(), strict=True)) | change
    arguments = {f"paged_kv_{name}_buffer": value for name, value in given.items()}
    with pytest.raises(error, match=match):
        BatchDecodeWithPagedKVCacheWrapper(torch.empty(64), use_cuda_graph=True, **arguments)
