"""The wrappers on a GPU: identical calls beside FlashInfer's own, CUDA graphs, copies in flight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn import decode, prefill
from tritonattn.cases import AttentionCase, AttentionInputs, make_inputs, reference_results
from tritonattn.diff import compare

pytestmark = pytest.mark.gpu

Decode = decode.BatchDecodeWithPagedKVCacheWrapper
GraphDecode = decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
Prefill = prefill.BatchPrefillWithPagedKVCacheWrapper
HEADS = (32, 8, 128, 16)
BF16 = {"q_data_type": torch.bfloat16}


def make(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], seed: int = 0, **fields: Any
) -> AttentionInputs:
    inputs = make_inputs(AttentionCase(q_lens, kv_lens, *HEADS[:3], **fields), "cuda", seed)
    return dataclasses.replace(inputs, q=inputs.q[: int(inputs.qo_indptr[-1])])


def workspace(fill: int = 0xFF) -> torch.Tensor:
    return torch.full((128 << 20,), fill, dtype=torch.uint8, device="cuda")


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


def assert_as_close(inputs: AttentionInputs, ours: Any, theirs: Any) -> None:
    """Assert that ours is within twice FlashInfer's error of fp64."""
    for name, got, other, right in zip(
        ("out", "lse"), ours, theirs, reference_results(inputs), strict=True
    ):
        report = compare(
            got, other, right, name=name, lse=name == "lse", qo_indptr=inputs.qo_indptr
        )
        assert report.passed, str(report)


def expected(inputs: AttentionInputs, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the functional API gives; without keys the wrappers agree bitwise as well."""
    return tritonattn.paged_attention(**inputs.arguments(), return_lse=True, **arguments)


CASES = [
    {"page_size": page_size, "kv_layout": kv_layout, "dtype": dtype}
    for page_size, kv_layout, dtype in (
        (1, "NHD", torch.bfloat16),
        (16, "NHD", torch.float16),
        (16, "HND", torch.bfloat16),
        (64, "NHD", torch.bfloat16),
    )
]


@pytest.mark.parametrize("metadata", ["cpu", "cuda"])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_decode_beside_flashinfer(fields: dict[str, Any], metadata: str) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is the peer")
    inputs = make((1,) * 7, (1, 16, 17, 97, 512, 2048, 333), **fields).unpoisoned()
    heads = (*HEADS[:3], fields["page_size"])
    table = on(metadata, *inputs.last_page_table())
    results = []
    for library in (decode, flashinfer):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace(0), fields["kv_layout"])
        wrapper.plan(*table, *heads, q_data_type=fields["dtype"], kv_data_type=fields["dtype"])
        results.append(wrapper.run(inputs.q, inputs.kv_cache, return_lse=True))
    assert_as_close(inputs, *results)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("metadata", ["cpu", "cuda"])
@pytest.mark.parametrize("fields", [c for c in CASES if c["dtype"] == torch.bfloat16], ids=str)
def test_prefill_beside_flashinfer(fields: dict[str, Any], metadata: str, causal: bool) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is the peer")
    lengths = (37, 127, 1, 577, 16), (54, 127, 97, 577, 1040)
    inputs = make(*lengths, causal=causal, **fields).unpoisoned()
    heads = (*HEADS[:3], fields["page_size"])
    table = on(metadata, inputs.qo_indptr, *inputs.last_page_table())
    results = []
    for library in (prefill, flashinfer):
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace(0), fields["kv_layout"])
        wrapper.plan(*table, *heads, causal=causal, q_data_type=fields["dtype"])
        results.append(wrapper.run(inputs.q, inputs.kv_cache, return_lse=True))
    assert_as_close(inputs, *results)


@pytest.mark.parametrize("metadata", ["cpu", "cuda"])
def test_nothing_waits_for_the_device(metadata: str) -> None:
    one = make((1,) * 9, (1, 16, 17, 0, 97, 512, 2048, 5000, 333))
    two = make((37, 1, 0, 200), (54, 97, 0, 1040))
    scratch = workspace()
    size = (9, one.last_page_table()[1].numel(), 8)
    fixed = [torch.empty(n + 1, dtype=torch.int32, device="cuda") for n in size]
    wrappers = [Decode(scratch), GraphDecode(scratch, fixed[0][:10], fixed[1], fixed[2])]
    tables = [
        on(metadata, *one.last_page_table()),
        on(metadata, two.qo_indptr, *two.last_page_table()),
    ]
    wrappers.append(Prefill(scratch))
    for check in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if check else "default")
        try:
            results = []
            for wrapper in wrappers[:2]:
                wrapper.plan(*tables[0], *HEADS, **BF16)
                results.append(wrapper.run(one.q, one.kv_cache, return_lse=True))
            wrappers[2].plan(*tables[1], *HEADS, causal=True, **BF16)
            results.append(wrappers[2].run(two.q, two.kv_cache, return_lse=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for result, inputs in zip(results, (one, one, two), strict=True):
        for got, right in zip(result, expected(inputs), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-2, atol=1e-2)


def test_vllm_23737_host_metadata_rewritten_while_its_copy_is_in_flight() -> None:
    """Pinned tensors are the caller's again when plan() returns (also vLLM 32799)."""
    inputs = make((1,) * 9, (1, 16, 17, 0, 97, 512, 2048, 5000, 333))
    table = [tensor.cpu().pin_memory() for tensor in inputs.last_page_table()]
    fixed = [torch.empty_like(tensor, device="cuda") for tensor in table]
    for wrapper in (Decode(workspace()), GraphDecode(workspace(), *fixed)):
        wrapper.plan(*table, *HEADS, **BF16)
        right = wrapper.run(inputs.q, inputs.kv_cache)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        wrapper.plan(*table, *HEADS, **BF16)
        saved = [tensor.clone() for tensor in table]
        for tensor in table:
            tensor.zero_()
        assert torch.equal(wrapper.run(inputs.q, inputs.kv_cache), right)
        for tensor, old in zip(table, saved, strict=True):
            tensor.copy_(old)


SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_vllm_6708_capture_sizes_share_the_buffers_of_each_stage(num_stages: int) -> None:
    """Sizes 256 to 1 captured on every stage, replayed interleaved, 5 in the graph of 8."""
    pool = make((1,) * 256, tuple(1 + 37 * i % 300 for i in range(256)))
    cache, (indptr, indices, last_page_len) = pool.kv_cache, pool.last_page_table()
    scratch = workspace()
    stages = []
    for _ in range(num_stages):
        fixed = [
            torch.zeros(n, dtype=torch.int32, device="cuda") for n in (257, indices.numel(), 256)
        ]
        q = torch.zeros(256, *HEADS[:1], HEADS[2], dtype=torch.bfloat16, device="cuda")
        graphs = {}
        for size in SIZES:
            wrapper = GraphDecode(scratch, fixed[0][: size + 1], fixed[1], fixed[2][:size])
            wrapper.plan(indptr[: size + 1], indices, last_page_len[:size], *HEADS, **BF16)
            wrapper.run(q[:size], cache)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = wrapper.run(q[:size], cache, return_lse=True)
            graphs[size] = (graph, wrapper, results)
        stages.append((q, graphs))

    eager = Decode(workspace())
    generator = torch.Generator().manual_seed(0)
    steps = [(size, size) for size in SIZES] + [(8, 5), (256, 200), (1, 1), (8, 8), (2, 1), (8, 5)]
    for graph_size, batch in steps:
        for q, graphs in stages:
            order = torch.randperm(256, generator=generator)[:batch]
            pages = [indices[indptr[i] : indptr[i + 1]] for i in order]
            ends = torch.tensor([0, *map(len, pages)], dtype=torch.int32).cumsum(0).int()
            table = (ends, torch.cat(pages), last_page_len[order.cuda()].cpu())
            graph, wrapper, (out, lse) = graphs[graph_size]
            q[:batch] = pool.q[order.cuda()]
            q[batch:] = float("nan")
            wrapper.plan(*table, *HEADS, **BF16)
            graph.replay()
            eager.plan(*table, *HEADS, **BF16)
            right, right_lse = eager.run(q[:batch], cache, return_lse=True)
            assert torch.equal(out[:batch], right)
            assert torch.equal(lse[:batch], right_lse)
            assert (out[batch:] == 0).all()
            assert lse[batch:].isneginf().all()
    call = {**pool.arguments(), "q": pool.q}
    whole, _ = tritonattn.paged_attention(**call, max_q_len=1, return_lse=True)
    torch.testing.assert_close(right[0], whole[order[0]], rtol=0, atol=1e-2)


def test_replay_follows_changes_in_place_in_all_layers() -> None:
    """Three layers in one graph of one wrapper: no plan() between replays."""
    case = make((1,) * 8, (3000, 5, 64, 0, 33, 700, 17, 16))
    layers = [make((1,) * 8, (1,) * 8, seed=i).q for i in range(3)]
    fixed = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (9, 1024, 8)]
    wrapper = GraphDecode(workspace(), *fixed)
    wrapper.plan(*case.last_page_table(), *HEADS, **BF16)
    wrapper.run(layers[0], case.kv_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [wrapper.run(q, case.kv_cache, return_lse=True) for q in layers]
    indptr, indices, last_page_len = case.last_page_table()
    for keep in ([1] * 8, [1, 0, 1, 1, 0, 1, 0, 1], [0] * 8, [0, 1, 0, 0, 0, 0, 0, 1]):
        mask = torch.tensor(keep, device="cuda")
        pages = (indptr[1:] - indptr[:-1]) * mask
        used = torch.repeat_interleave(mask.bool(), indptr[1:] - indptr[:-1])
        kept = indices[used]
        fixed[0][1:] = pages.cumsum(0)
        fixed[1][: kept.numel()] = kept
        fixed[2].copy_(last_page_len)
        graph.replay()
        eager = Decode(workspace())
        eager.plan(fixed[0].clone(), fixed[1].clone(), fixed[2].clone(), *HEADS, **BF16)
        for q, (out, lse) in zip(layers, results, strict=True):
            right, right_lse = eager.run(q, case.kv_cache, return_lse=True)
            assert torch.equal(out, right)
            assert torch.equal(lse, right_lse)
            assert out.isfinite().all()


def test_fi_726_graph_prefill_with_zero_length_requests() -> None:
    """FI 726: capacity 24, 5 queries each, 40/8 heads, the rest padded with kv 0."""
    capacity, heads = 24, (40, 8, 128, 16)
    fixed = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (25, 25, 4096, 24)]
    wrapper = Prefill(workspace(), "NHD", True, *fixed)
    q = torch.full((5 * capacity, 40, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    pool = make_inputs(
        AttentionCase((5,) * 24, tuple(5 + 41 * i for i in range(24)), *heads[:3]), "cuda"
    )
    indptr, indices, last_page_len = pool.last_page_table()

    def plan(target: Any, live: int) -> None:
        table = (pool.qo_indptr[: live + 1], indptr[: live + 1], indices, last_page_len[:live])
        target.plan(*table, *heads, causal=True, **BF16)

    plan(wrapper, capacity)
    wrapper.run(q, pool.kv_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q, pool.kv_cache, return_lse=True)
    for live in (6, 24, 0, 1, 17):
        q.fill_(float("nan"))
        q[: 5 * live] = pool.q[: 5 * live]
        plan(wrapper, live)
        graph.replay()
        eager = Prefill(workspace())
        plan(eager, live)
        right, right_lse = eager.run(q, pool.kv_cache, return_lse=True)
        assert torch.equal(out, right)
        assert torch.equal(lse, right_lse)
        assert out.isfinite().all()


def test_fi_4002_workspace_contents_and_earlier_plans() -> None:
    """FI 4002, 600: filled with 0xFF, used by a larger plan, shared by two wrappers."""
    large = make((3,) * 64, tuple(1 + 211 * i % 4000 for i in range(64)))
    small = make((1, 1), (5000, 3))
    scratch = workspace()
    one, two = Prefill(scratch), Decode(scratch)
    right = [expected(large), expected(small, max_q_len=1)]
    for _ in range(2):
        one.plan(large.qo_indptr.cpu(), *large.last_page_table(), *HEADS, causal=True, **BF16)
        two.plan(*small.last_page_table(), *HEADS, **BF16)
        for _ in range(2):
            results = [
                one.run(large.q, large.kv_cache, return_lse=True),
                two.run(small.q, small.kv_cache, return_lse=True),
            ]
            for result, other in zip(results, right, strict=True):
                for got, should in zip(result, other, strict=True):
                    torch.testing.assert_close(got, should, rtol=1e-2, atol=1e-2)
        scratch.fill_(0xFF)


def test_values_on_the_device_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make((1, 1), (20, 40))
    indptr, indices, last_page_len = inputs.last_page_table()
    wrapper = Decode(workspace())
    wrapper.plan(indptr, indices, last_page_len + 100, *HEADS, **BF16)
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    with pytest.raises(ValueError, match="last_page_len must be from 0 to page_size = 16"):
        wrapper.plan(indptr, indices, last_page_len + 100, *HEADS, **BF16)
    wrapper.plan(indptr, indices + 10**6, last_page_len, *HEADS, **BF16)
    with pytest.raises(ValueError, match="names pages from"):
        wrapper.run(inputs.q, inputs.kv_cache)


def test_host_metadata_is_refused_in_a_capture() -> None:
    inputs = make((1, 1), (20, 40))
    wrapper = Decode(workspace())
    table = inputs.last_page_table()
    wrapper.plan(*table, *HEADS, **BF16)
    right = wrapper.run(inputs.q, inputs.kv_cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="indptr is on the host: a CUDA graph would replay"):
            wrapper.plan(torch.tensor([0, 2, 5], dtype=torch.int32), *table[1:], *HEADS, **BF16)
        wrapper.plan(*table, *HEADS, **BF16)
        out = wrapper.run(inputs.q, inputs.kv_cache)
    graph.replay()
    assert torch.equal(out, right)
