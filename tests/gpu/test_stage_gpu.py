"""Stages on a GPU: graphs of every size on every stage, replayed in any order, nothing waits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn import PipelineBuffers, use_backend
from tritonattn.stage import StageBuffers

pytestmark = pytest.mark.gpu

HEADS, PAGE, MAX_PAGES = (8, 2, 64), 16, 8
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def allocate(
    num_stages: int,
    max_batch_size: int = 512,
    max_num_tokens: int = 640,
    heads: tuple[int, int, int] = HEADS,
    max_pages: int = MAX_PAGES,
) -> Any:
    return PipelineBuffers.allocate(
        num_stages=num_stages,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_pages_per_request=max_pages,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cuda",
    )


class Layer:
    """One attention layer of a stage with tensors that stay where they are."""

    def __init__(self, stage: StageBuffers, seed: int, pages: int = 600) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.stage = stage
        has = stage.capacity
        draw = {"generator": generator, "device": "cuda", "dtype": torch.float32}
        self.q = torch.randn(has.max_num_tokens, has.num_qo_heads, has.head_dim, **draw).bfloat16()
        shape = (pages, 2, PAGE, has.num_kv_heads, has.head_dim)
        self.cache = torch.randn(shape, **draw).bfloat16()
        self.out = torch.full_like(self.q, math.nan)
        self.generator = torch.Generator().manual_seed(seed)

    def decode(self, batch_size: int) -> torch.Tensor:
        """Launch a decode step of the stage's metadata."""
        return self.attend(batch_size, rows=batch_size, max_q_len=1)

    def mixed(self, batch_size: int) -> torch.Tensor:
        """Launch a step of any query lengths."""
        return self.attend(batch_size, rows=self.q.size(0), max_q_len=None)

    def attend(self, batch_size: int, rows: int, max_q_len: int | None) -> torch.Tensor:
        plan = tritonattn.plan_attention(
            self.q[:rows], self.cache, **self.stage.metadata(batch_size), max_q_len=max_q_len,
            buffers=self.stage,
        )  # fmt: skip
        out = tritonattn.paged_attention(self.q[:rows], self.cache, plan=plan, out=self.out[:rows])
        assert isinstance(out, torch.Tensor)
        return out

    def step(self, q_lens: list[int]) -> dict[str, torch.Tensor]:
        """Draw the metadata of a step, on the host."""
        batch, width = len(q_lens), self.stage.capacity.max_pages_per_request
        lengths = torch.randint(0, width * PAGE + 1, (batch,), generator=self.generator)
        pages = torch.randint(0, self.cache.size(0), (batch, width), generator=self.generator)
        return {
            "qo_indptr": torch.tensor([0, *q_lens]).cumsum(0).int(),
            "seq_lens": lengths.maximum(torch.tensor(q_lens)).int(),
            "block_table": pages.int(),
        }

    def eager(self, step: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        """Return what a call without buffers gives."""
        metadata = {name: tensor.cuda() for name, tensor in step.items()}
        out = tritonattn.paged_attention(self.q[:rows], self.cache, **metadata)
        assert isinstance(out, torch.Tensor)
        return out

    def reference(self, step: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        """Return the same in fp64."""
        metadata = {name: tensor.cuda() for name, tensor in step.items()}
        out = tritonattn.paged_attention(self.q[:rows], self.cache, **metadata, backend="reference")
        assert isinstance(out, torch.Tensor)
        return out


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_all_sizes_on_all_stages_in_any_order() -> None:
    """vLLM 6708: every virtual engine captures every batch size over buffers that never shrink."""
    choose = random.Random(0)
    buffers = allocate(4)
    layers = [Layer(buffers.stage(index), seed=index) for index in range(4)]
    addresses = [[t.data_ptr() for t in layer.stage.metadata().values()] for layer in layers]
    graphs = [
        layer.stage.capture(choose.sample(SIZES, len(SIZES)), layer.decode) for layer in layers
    ]
    for turn in range(2000):
        index = choose.randrange(4)
        layer, batch = layers[index], choose.choice([*SIZES, choose.randint(1, 512)])
        step = layer.step([1] * batch)
        layer.out.fill_(math.nan)
        layer.stage.update(**step)
        size = graphs[index].replay(batch).size(0)
        assert size == next(s for s in SIZES if s >= batch)
        assert torch.equal(layer.out[:batch], layer.eager(step, batch)), (turn, index, batch)
        assert layer.out[batch:].isnan().all()
        if turn % 100 == 0 and batch <= 64:
            expected = layer.reference(step, batch).float()
            torch.testing.assert_close(layer.out[:batch].float(), expected, rtol=2e-2, atol=2e-2)
    assert addresses == [
        [t.data_ptr() for t in layer.stage.metadata().values()] for layer in layers
    ]
    assert all(set(g.memory_bytes) == set(SIZES) for g in graphs)


def test_mixed_batches_in_a_graph() -> None:
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=3)
    graphs = stage.capture([4, 32], layer.mixed)
    for q_lens in ([1] * 20, [40, 1, 9, 70], [0, 0, 3], [128, 8, 1], [1] * 31 + [100]):
        step = layer.step(q_lens)
        layer.out.fill_(math.nan)
        stage.update(**step)
        graphs.replay(len(q_lens))
        rows = sum(q_lens)
        expected = layer.eager(step, layer.q.size(0))
        assert torch.equal(layer.out[:rows], expected[:rows]), q_lens
        assert layer.out[rows:].isnan().all()


def test_plain_torch_capture_on_another_stream() -> None:
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=4)
    warm_up, recording = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(warm_up):
        layer.decode(8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=recording, capture_error_mode="global"):
        layer.decode(8)
    for batch in (5, 8, 1):
        step = layer.step([1] * batch)
        stage.update(**step)
        graph.replay()
        assert torch.equal(layer.out[:batch], layer.eager(step, batch))


def test_overlapping_micro_batches_on_two_stages() -> None:
    buffers = allocate(2)
    layers = [Layer(buffers.stage(index), seed=index, pages=600) for index in range(2)]
    graphs = [layer.stage.capture([256], layer.decode) for layer in layers]
    streams = [torch.cuda.Stream() for _ in layers]
    results: list[list[torch.Tensor]] = [[], []]
    steps = [[layer.step([1] * 256) for _ in range(20)] for layer in layers]
    torch.cuda.synchronize()
    for turn in range(20):
        for layer, graph, stream, step, kept in zip(
            layers, graphs, streams, steps, results, strict=True
        ):
            with torch.cuda.stream(stream):
                layer.stage.update(**step[turn])
                graph.replay(256)
                kept.append(layer.out[:256].clone())
    torch.cuda.synchronize()
    for layer, kept, drawn in zip(layers, results, steps, strict=True):
        for out, step in zip(kept, drawn, strict=True):
            assert torch.equal(out, layer.eager(step, 256))


@pytest.mark.parametrize("pinned", [True, False])
def test_host_metadata_may_be_rewritten_at_once(pinned: bool) -> None:
    """vLLM 23737, 32799: the copy is still in flight when the engine writes the next step."""
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=5)
    steps = [layer.step([1] * 100) for _ in range(8)]
    host = {name: torch.empty_like(tensor) for name, tensor in steps[0].items()}
    if pinned:
        host = {name: tensor.pin_memory() for name, tensor in host.items()}
    seen = []
    torch.cuda._sleep(200_000_000)
    for step in steps:
        for name, tensor in step.items():
            host[name].copy_(tensor)
        with no_synchronization():
            stage.update(**host)
        seen.append({name: tensor.clone() for name, tensor in stage.metadata(100).items()})
    for tensor in host.values():
        tensor.fill_(-5)
    for step, found in zip(steps, seen, strict=True):
        assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in step.items())


def test_a_step_does_not_wait() -> None:
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=6)
    graphs = stage.capture([16], layer.decode)
    host = layer.step([1] * 9)
    device = {name: tensor.cuda() for name, tensor in host.items()}
    layer.mixed(9)
    torch.cuda.synchronize()
    with no_synchronization():
        for step in (host, device):
            stage.update(**step)
            layer.decode(9)
            layer.mixed(9)
            graphs.replay(9)


def test_update_in_a_capture() -> None:
    """Device tensors are read at each replay; host tensors would be this step's for ever."""
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=7)
    source = {name: tensor.cuda() for name, tensor in layer.step([1] * 6).items()}
    stage.update(**source)
    layer.decode(6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage.update(**source)
        layer.decode(6)
    step = layer.step([1] * 6)
    for name, tensor in step.items():
        source[name].copy_(tensor)
    graph.replay()
    assert torch.equal(layer.out[:6], layer.eager(step, 6))
    with (
        pytest.raises(ValueError, match="qo_indptr is on the host"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        stage.update(**step)


def test_a_graph_keeps_its_backend() -> None:
    stage = allocate(1).stage(0)
    layer = Layer(stage, seed=8)
    graphs = stage.capture([4], layer.decode)
    with use_backend("triton"):
        graphs.replay(3)
    with (
        use_backend("reference"),
        pytest.raises(ValueError, match="captured with triton, now reference is asked for"),
    ):
        graphs.replay(3)
    with pytest.raises(ValueError, match="no graph holds 5 requests: captured are 4"):
        graphs.replay(5)


def test_over_capacity_and_nested_captures_are_refused() -> None:
    stage = allocate(1, max_batch_size=8).stage(0)
    layer = Layer(stage, seed=9)
    with pytest.raises(ValueError, match="has 9 requests, the stage holds max_batch_size = 8"):
        stage.capture([1, 9], layer.decode)
    with (
        pytest.raises(ValueError, match="inside another capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        stage.capture([1], layer.decode)


def test_a_capture_without_a_warm_up() -> None:
    """Nothing was compiled for these heads: the capture holds all the same."""
    buffers = PipelineBuffers.allocate(
        num_stages=1, max_batch_size=4, max_num_tokens=4, max_pages_per_request=2, num_qo_heads=6,
        num_kv_heads=2, head_dim=48, page_size=24, dtype=torch.float16, device="cuda",
    )  # fmt: skip
    stage = buffers.stage(0)
    q = torch.randn(4, 6, 48, device="cuda", dtype=torch.float16)
    cache = torch.randn(8, 2, 24, 2, 48, device="cuda", dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        out = tritonattn.paged_attention(q, cache, **stage.metadata(), buffers=stage)
    step = {
        "qo_indptr": torch.tensor([0, 1, 2, 4], dtype=torch.int32, device="cuda"),
        "seq_lens": torch.tensor([5, 40, 30], dtype=torch.int32, device="cuda"),
        "block_table": torch.tensor([[7, 0], [1, 2], [3, 4]], dtype=torch.int32, device="cuda"),
    }
    stage.update(**step)
    graph.replay()
    assert torch.equal(out, tritonattn.paged_attention(q, cache, **step))
