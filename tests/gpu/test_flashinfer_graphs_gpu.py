"""FlashInfer in the graphs of a stage: planned anew before each replay, right for every step."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tritonattn
from tests.gpu.test_stage_gpu import Layer, allocate
from tritonattn import use_backend
from tritonattn.backends import UnsupportedError

pytestmark = pytest.mark.gpu

SIZES = [1, 4, 16]
HEADS = (8, 2, 128)  # XQA: no smaller head_dim with groups of four


@dataclass
class Rig:
    """A stage, a layer on it, and the memory that its results go to."""

    layer: Layer
    lse: torch.Tensor | None

    @classmethod
    def make(cls, stage: Any, kernel: str, seed: int = 0) -> Rig:
        layer = Layer(stage, seed)
        lse = None if kernel == "xqa" else torch.full(layer.q.shape[:2], math.nan, device="cuda")
        return cls(layer, lse)

    def decode(self, batch: int) -> None:
        layer = self.layer
        plan = tritonattn.plan_attention(
            layer.q[:batch], layer.cache, **layer.stage.metadata(batch), max_q_len=1,
            buffers=layer.stage,
        )  # fmt: skip
        lse = None if self.lse is None else self.lse[:batch]
        for _ in range(2):
            tritonattn.paged_attention(
                layer.q[:batch], layer.cache, plan=plan, out=layer.out[:batch], lse=lse
            )

    def update(self, step: dict[str, torch.Tensor]) -> None:
        self.layer.out.fill_(math.nan)
        if self.lse is not None:
            self.lse.fill_(math.nan)
        self.layer.stage.update(**step)

    def check(self, step: dict[str, torch.Tensor]) -> None:
        """Assert right rows and untouched padding."""
        layer, rows = self.layer, int(step["qo_indptr"][-1])
        metadata = {name: tensor.cuda() for name, tensor in step.items()}
        out, lse = tritonattn.paged_attention(
            layer.q[:rows], layer.cache, **metadata, return_lse=True, backend="reference"
        )
        torch.testing.assert_close(layer.out[:rows].float(), out.float(), rtol=2e-2, atol=2e-2)
        assert layer.out[rows:].isnan().all()
        if self.lse is not None:
            torch.testing.assert_close(self.lse[:rows], lse, rtol=1e-3, atol=1e-2)
            assert self.lse[rows:].isnan().all()


@pytest.mark.parametrize("kernel", ["auto", "decode", "tc", "xqa"])
def test_steps_of_any_lengths_on_two_stages(kernel: str) -> None:
    """Captured with nothing in the stages; padding, requests without keys or without queries."""
    choose = random.Random(1)
    name = "flashinfer" if kernel == "auto" else f"flashinfer:{kernel}"
    buffers = allocate(2, max_batch_size=16, max_num_tokens=16, heads=HEADS)
    rigs = [Rig.make(buffers.stage(index), kernel, seed=index) for index in range(2)]
    with use_backend(name):
        graphs = [rig.layer.stage.capture(SIZES, rig.decode) for rig in rigs]
        assert all(g.steps[size].plan is not None for g in graphs for size in SIZES)
        for turn in range(60):
            index, batch = choose.randrange(2), choose.randint(1, 16)
            q_lens = [1] * batch if turn % 3 else [int(choose.random() < 0.7) for _ in range(batch)]
            step = rigs[index].layer.step(q_lens)
            if turn % 4 == 0:
                step["seq_lens"][choose.randrange(batch)] = 0
            rigs[index].update(step)
            graphs[index].replay(batch)
            rigs[index].check(step)


@pytest.mark.parametrize("kernel", ["decode", "tc"])
@pytest.mark.parametrize("heads", [(32, 32, 128), (32, 8, 128)], ids=["mha", "gqa"])
def test_rows_without_keys_before_long_ones(kernel: str, heads: tuple[int, int, int]) -> None:
    """Such rows take no work from those that follow; requests are long enough to be split."""
    buffers = allocate(1, max_batch_size=8, max_num_tokens=8, heads=heads, max_pages=512)
    rig = Rig.make(buffers.stage(0), kernel)
    with use_backend(f"flashinfer:{kernel}"):
        graphs = rig.layer.stage.capture([2, 8], rig.decode)
        for lengths in ([0, 8192], [0, 4800, 0, 0, 8192, 0, 1024], [8192] * 8, [3, 0, 5]):
            step = rig.layer.step([1] * len(lengths))
            step["seq_lens"] = torch.tensor(lengths, dtype=torch.int32)
            rig.update(step)
            graphs.replay(len(lengths))
            rig.check(step)


def test_captured_after_a_prefill() -> None:
    """What stands in the stage at the capture is of no account."""
    stage = allocate(1, max_batch_size=4, max_num_tokens=16, heads=HEADS).stage(0)
    rig = Rig.make(stage, "tc")
    stage.update(**rig.layer.step([3, 1]))
    with use_backend("flashinfer:tc"):
        graphs = stage.capture([4], rig.decode)
        with pytest.raises(UnsupportedError, match="max_q_len=1, a request has 3 query tokens"):
            graphs.replay(2)
        step = rig.layer.step([1] * 4)
        rig.update(step)
        graphs.replay(4)
        rig.check(step)


def test_two_stages_on_two_streams() -> None:
    buffers = allocate(2, max_batch_size=16, max_num_tokens=16, heads=HEADS)
    rigs = [Rig.make(buffers.stage(index), "tc", seed=index) for index in range(2)]
    streams = [torch.cuda.Stream() for _ in rigs]
    kept: list[Any] = []
    with use_backend("flashinfer:tc"):
        graphs = [rig.layer.stage.capture([16], rig.decode) for rig in rigs]
        for _ in range(20):
            for rig, graph, stream in zip(rigs, graphs, streams, strict=True):
                step = rig.layer.step([1] * 16)
                with torch.cuda.stream(stream):
                    rig.layer.stage.update(**step)
                    graph.replay(16)
                    kept.append((rig.layer, step, rig.layer.out[:16].clone()))
    torch.cuda.synchronize()
    for layer, step, out in kept:
        expected = layer.reference(step, 16).float()
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_what_cannot_be_captured_is_refused() -> None:
    stage = allocate(1, max_batch_size=4, max_num_tokens=16, heads=HEADS).stage(0)
    layer = Layer(stage, seed=0)
    with use_backend("flashinfer"):
        with pytest.raises(UnsupportedError, match="capture decode with max_q_len=1"):
            stage.capture([4], layer.mixed)
        with (
            pytest.raises(UnsupportedError, match=r"capture by stage\.capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            layer.decode(4)
        graphs = stage.capture([4], layer.decode)
    graphs.replay(4)
    with (
        use_backend("triton"),
        pytest.raises(ValueError, match="captured with flashinfer, now triton is asked for"),
    ):
        graphs.replay(4)


def test_a_plan_made_before_a_capture() -> None:
    """What an engine does that plans for each step itself: the graph holds its layers alone."""
    stage = allocate(1, max_batch_size=4, max_num_tokens=4, heads=HEADS).stage(0)
    layer = Layer(stage, seed=2)
    step = layer.step([1] * 4)
    stage.update(**step)
    arguments: dict[str, Any] = {**stage.metadata(4), "max_q_len": 1, "buffers": stage}
    q, out = layer.q[:4], layer.out[:4]
    plan = tritonattn.plan_attention(q, layer.cache, **arguments, backend="flashinfer")
    tritonattn.paged_attention(q, layer.cache, plan=plan, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tritonattn.paged_attention(q, layer.cache, plan=plan, out=out)
    out.fill_(math.nan)
    graph.replay()
    expected = layer.reference(step, 4).float()
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
