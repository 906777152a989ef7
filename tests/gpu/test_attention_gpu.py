"""`paged_attention` on a GPU: the grid against fp64 and FlashInfer, and what engines rely on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn.cases import (
    STORAGES,
    AttentionCase,
    AttentionInputs,
    make_inputs,
    reference_results,
)
from tritonattn.diff import compare
from tritonattn.layout import PagedKVCache

pytestmark = pytest.mark.gpu

SENTINEL = 7.0
SHAPES = [(32, 8, 128), (8, 1, 128), (28, 4, 128), (32, 32, 128), (9, 3, 64), (16, 8, 256)]
DECODE = ((1,) * 9, (1, 16, 17, 0, 97, 512, 2048, 5000, 333))
PREFILL = ((37, 127, 1, 0, 577, 16, 200), (54, 127, 97, 5, 577, 1040, 100))


def run(
    inputs: AttentionInputs, backend: str, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run into sentinel-filled outputs; padding rows must keep them."""
    call = {**inputs.arguments(), **arguments}
    q, cache = call["q"], PagedKVCache.of(call["kv_cache"], call["kv_layout"])
    out = torch.full((*q.shape[:2], cache.head_dim_vo), SENTINEL, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], SENTINEL, device=q.device)
    tritonattn.paged_attention(**call, out=out, lse=lse, backend=backend)
    end = int(inputs.qo_indptr[-1])
    assert (out[end:] == SENTINEL).all()
    assert (lse[end:] == SENTINEL).all()
    return out[:end], lse[:end]


def check(
    inputs: AttentionInputs,
    *,
    ours: str = "triton",
    peer: str | None = "flashinfer",
    **arguments: Any,
) -> None:
    """Assert that ours is as near to fp64 as twice the peer's error, and repeats bitwise."""
    out, lse = run(inputs, ours, **arguments)
    end = out.size(0)
    expected, expected_lse = (x[:end] for x in reference_results(inputs))
    if peer is None:
        other, other_lse = (x[:end] for x in reference_results(inputs, inputs.q.dtype))
    else:
        other, other_lse = run(inputs.unpoisoned(), peer, **arguments)
    report = compare(out, other, expected, name="out", qo_indptr=inputs.qo_indptr)
    assert report.passed, str(report)
    report = compare(lse, other_lse, expected_lse, name="lse", lse=True, qo_indptr=inputs.qo_indptr)
    assert report.passed, str(report)
    again, lse_again = run(inputs, ours, **arguments)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def cases(lengths: tuple[tuple[int, ...], tuple[int, ...]], **fields: Any) -> list[AttentionCase]:
    """Return a grid: every shape at every page size, layouts and tables alternating."""
    return [
        AttentionCase(
            *lengths,
            *shape,
            page_size=page_size,
            kv_layout="HND" if (i + j) % 2 else "NHD",
            table="csr" if i % 2 else "dense",
            **fields,
        )
        for i, shape in enumerate(SHAPES)
        for j, page_size in enumerate((1, 8, 16, 64))
    ]


@pytest.mark.parametrize("case", cases(DECODE) + cases(PREFILL), ids=str)
def test_grid_bf16(case: AttentionCase) -> None:
    check(make_inputs(case, "cuda"), max_q_len=max(case.q_lens))


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in cases(DECODE, dtype=torch.float16) + cases(PREFILL, dtype=torch.float16)
        if c.head_dim == 128
    ],
    ids=str,
)
def test_grid_fp16(case: AttentionCase) -> None:
    check(make_inputs(case, "cuda"))


@pytest.mark.parametrize("q_lens", [(37, 5, 127, 1), (1, 1, 1, 1)], ids=["prefill", "decode"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_not_causal(dtype: torch.dtype, q_lens: tuple[int, ...]) -> None:
    case = AttentionCase(q_lens, (54, 300, 127, 97), 32, 8, 128, dtype=dtype, causal=False)
    check(make_inputs(case, "cuda"))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_storage(storage: Any, kv_layout: Any) -> None:
    case = AttentionCase((1, 40, 3), (100, 90, 70), 8, 2, 128, storage=storage, kv_layout=kv_layout)
    check(make_inputs(case, "cuda"), peer=None)


@pytest.mark.parametrize("head_dim", [16, 32, 56, 80, 96, 112, 192, 224, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    case = AttentionCase((1, 40, 3), (100, 90, 70), 8, 2, head_dim, dtype=dtype)
    check(make_inputs(case, "cuda"), peer=None)


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"), [(3, 1), (10, 2), (6, 1), (16, 1), (48, 1), (71, 1)]
)
def test_group_sizes(num_qo_heads: int, num_kv_heads: int) -> None:
    case = AttentionCase((1, 40, 3, 8), (700, 90, 70, 8), num_qo_heads, num_kv_heads, 64)
    check(make_inputs(case, "cuda"), peer=None)


@pytest.mark.parametrize("page_size", [5, 32, 128, 272, 544, 1072])
def test_vllm_25811_page_sizes(page_size: int) -> None:
    case = AttentionCase((1, 40, 3), (1500, 1100, 70), 32, 8, 128, page_size=page_size)
    check(make_inputs(case, "cuda"))


def test_different_value_dim() -> None:
    case = AttentionCase((1, 40, 3), (100, 90, 70), 8, 2, 192, head_dim_vo=128, storage="tuple")
    check(make_inputs(case, "cuda"), peer=None)


@pytest.mark.parametrize("q_len", [2, 3, 5, 8])
def test_speculative(q_len: int) -> None:
    case = AttentionCase((q_len,) * 6, (4096, 5, q_len, 0, 700, 33), 32, 8, 128)
    check(make_inputs(case, "cuda"), max_q_len=q_len)


@pytest.mark.parametrize(
    "case",
    [
        *cases(DECODE),
        *cases(DECODE, dtype=torch.float16)[::3],
        *(AttentionCase((q,) * 6, (4096, 5, q, 0, 700, 33), 32, 8, 128) for q in (2, 5, 8)),
        AttentionCase((1, 40, 3, 8), (700, 90, 70, 8), 48, 1, 64),
        AttentionCase((1, 40, 3), (1500, 1100, 70), 32, 8, 128, page_size=272, causal=False),
        AttentionCase((1,) * 300, tuple(range(300)), 32, 8, 128),
        AttentionCase((1,), (60_000,), 8, 1, 128),
        AttentionCase((1, 3), (3000, 700), 8, 2, 80, dtype=torch.float32),
        AttentionCase((1, 3), (3000, 700), 8, 2, 256, kv_layout="HND"),
    ],
    ids=str,
)
def test_even_shares(case: AttentionCase) -> None:
    check(make_inputs(case, "cuda"), ours="triton:stream", peer=None, max_q_len=max(case.q_lens))


def test_even_shares_many_times_over() -> None:
    """The last to arrive differs from launch to launch, what it writes does not."""
    inputs = make_inputs(
        AttentionCase((1,) * 7, (9000, 3, 0, 777, 64, 4000, 2), 32, 8, 128), "cuda"
    )
    plan = tritonattn.plan_attention(
        inputs.q, inputs.kv_cache, qo_indptr=inputs.qo_indptr, seq_lens=inputs.seq_lens,
        **inputs.table, max_q_len=1, backend="triton:stream",
    )  # fmt: skip
    first = tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(2000):
        again = tritonattn.paged_attention(inputs.q, inputs.kv_cache, plan=plan)
        same &= (again == first).all()
    assert same


def test_extreme_logits() -> None:
    """FI 4267, 4401: FlashInfer is wrong here, so fp64 alone decides."""
    inputs = make_inputs(
        AttentionCase((1, 9, 40), (2, 12, 300), 4, 1, 128, dtype=torch.float16), "cuda"
    )
    inputs.q.fill_(-64.0)
    k, v = inputs.kv_cache.unbind(1)
    k[~k.isnan()] = 64.0
    v[~v.isnan()] = 1.0
    out, lse = run(inputs, "triton")
    assert (out == 1).all()
    assert lse[0, 0].item() == pytest.approx(-66854.86, rel=1e-6)
    assert lse.isfinite().all()


@pytest.mark.parametrize("elements", [2**31, 2**32])
def test_fi_3130_pool_past_32_bits(elements: int) -> None:
    """FI 3130, vLLM 50427: the table names the last pages of a pool past 2^31 and 2^32."""
    page = 2 * 16 * 8 * 128
    pool = torch.empty(elements // page + 8, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    inputs = make_inputs(AttentionCase((1, 20), (60, 50), 32, 8, 128), "cuda")
    small = inputs.kv_cache
    pool[-small.size(0) :] = small
    shift = pool.size(0) - small.size(0)
    table = inputs.table["block_table"]
    far = {"block_table": torch.where(table >= 0, table + shift, table)}
    expected = run(inputs, "triton")
    got = run(dataclasses.replace(inputs, kv_cache=pool, table=far), "triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sgl_20389_queries_past_31_bits() -> None:
    """SGL 20389: tokens x heads x head_dim of q past 2^31."""
    case = AttentionCase((20, 1), (40, 33), 32, 8, 128)
    inputs = make_inputs(case, "cuda")
    total_q = 2**31 // (32 * 128) + 64
    q = torch.zeros(total_q, 32, 128, dtype=torch.bfloat16, device="cuda")
    q[-21:] = inputs.q[:21]
    qo_indptr = (inputs.qo_indptr + (total_q - 21)).int()
    out = torch.full_like(q, SENTINEL)
    call = {**inputs.arguments(), "q": q, "qo_indptr": qo_indptr}
    tritonattn.paged_attention(**call, out=out, backend="triton")
    assert torch.equal(out[-21:], run(inputs, "triton")[0])
    assert (out[: total_q - 21] == SENTINEL).all()


def refill(inputs: AttentionInputs, q_lens: list[int], kv_lens: list[int]) -> None:
    """Change the lengths of a batch in place."""
    ends = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0)
    inputs.qo_indptr.copy_(ends)
    inputs.seq_lens.copy_(torch.tensor(kv_lens, dtype=torch.int32))


def test_graph_replay_follows_lengths_changed_in_place() -> None:
    """A captured call plans itself anew: mixed batches up to capacity, equal to eager."""
    case = AttentionCase((40, 1, 8, 20), (900, 700, 64, 20), 32, 8, 128, page_size=16)
    inputs = make_inputs(case, "cuda")
    call = inputs.unpoisoned().arguments()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tritonattn.paged_attention(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        out, lse = tritonattn.paged_attention(**call, return_lse=True)
    steps = [
        ([1, 1, 1, 1], [900, 1, 64, 20]),
        ([0, 60, 0, 9], [0, 700, 5, 9]),
        ([8, 8, 8, 0], [8, 300, 3, 0]),
        ([40, 1, 8, 20], [900, 700, 64, 20]),
    ]
    for q_lens, kv_lens in steps + steps[::-1]:
        refill(inputs, q_lens, kv_lens)
        graph.replay()
        expected, expected_lse = tritonattn.paged_attention(**call, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert out.isfinite().all()


def test_graph_of_a_whole_step_shares_one_plan() -> None:
    case = AttentionCase((1,) * 8, (100, 5, 0, 700, 33, 16, 17, 2000), 32, 8, 128)
    layers = [make_inputs(case, "cuda", seed) for seed in range(3)]
    metadata = layers[0].metadata()

    def step() -> list[torch.Tensor]:
        plan = tritonattn.plan_attention(layers[0].q, layers[0].kv_cache, max_q_len=1, **metadata)
        return [
            tritonattn.paged_attention(layer.q, layers[0].kv_cache, plan=plan) for layer in layers
        ]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kv_lens in ([1, 1, 0, 1, 1, 1, 1, 1], [100, 5, 0, 7, 33, 16, 17, 1999], [0] * 8):
        layers[0].seq_lens.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_no_synchronization() -> None:
    inputs = make_inputs(AttentionCase((40, 1), (90, 70), 8, 2, 128), "cuda")
    tritonattn.paged_attention(**inputs.arguments())
    torch.cuda.set_sync_debug_mode("error")
    try:
        tritonattn.paged_attention(**inputs.arguments(), return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_streams_at_once() -> None:
    batches = [
        make_inputs(AttentionCase((1,) * 16, (3000 + 7 * i,) * 16, 32, 8, 128), "cuda", i)
        for i in range(2)
    ]
    expected = [run(inputs, "triton")[0] for inputs in batches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in batches]
    for _ in range(5):
        results = []
        for stream, inputs in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                results.append(tritonattn.paged_attention(**inputs.arguments()))
        torch.cuda.synchronize()
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result[: right.size(0)], right)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current() -> None:
    inputs = make_inputs(AttentionCase((1, 40), (700, 90), 32, 8, 128), "cuda:1")
    assert torch.cuda.current_device() == 0
    out, _ = run(inputs, "triton")
    report = compare(out, out, reference_results(inputs)[0][: out.size(0)], name="cuda:1")
    assert report.passed, str(report)


def test_a_bound_that_is_too_small_stays_in_bounds() -> None:
    """Rows may be left unwritten, but nothing else is touched."""
    inputs = make_inputs(AttentionCase((1, 8, 2), (3000, 700, 64), 32, 8, 128), "cuda")
    for max_q_len in (0, 1):
        run(inputs, "triton", max_q_len=max_q_len)
        torch.cuda.synchronize()
    expected = run(inputs, "triton")
    assert all(x.isfinite().all() for x in expected)


def test_large_batch_and_long_context() -> None:
    """Thousands of short requests beside one long one."""
    lengths = (131072, *(1 + 37 * i % 900 for i in range(4095)))
    case = AttentionCase((1,) * 4096, lengths, 8, 1, 128)
    inputs = make_inputs(case, "cuda")
    out, lse = run(inputs, "triton", max_q_len=1)
    inputs = inputs.unpoisoned()
    expected, expected_lse = run(inputs, "reference", max_q_len=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)
    other, other_lse = run(inputs, "flashinfer", max_q_len=1)
    torch.testing.assert_close(out, other, rtol=0, atol=2e-2)
    # FlashInfer's tensor-core kernels sum weights that are rounded to bf16 (2^-9 of each).
    torch.testing.assert_close(lse, other_lse, rtol=1e-4, atol=3e-3)
