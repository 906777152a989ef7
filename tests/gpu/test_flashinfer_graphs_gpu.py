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
HEAD_DIM = 128  # XQA has no smaller one for four heads a group


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
    buffers = allocate(2, max_batch_size=16, max_num_tokens=16, head_dim=HEAD_DIM)
    rigs = [Rig.make(buffers.stage(index), kernel, seed=index) for index in range(2)]
    with use_backend(name):
        graphs = [rig.layer.stage.capture(SIZES, rig.decode) for rig in rigs]
        assert all(len(g.steps[size].plans) == 1 for g in graphs for size in SIZES)
        for turn in range(60):
            index, batch = choose.randrange(2), choose.randint(1, 16)
            q_lens = [1] * batch if turn % 3 else [int(choose.random() < 0.7) for _ in range(batch)]
            step = rigs[index].layer.step(q_lens)
            if turn % 4 == 0:
                step["seq_lens"][choose.randrange(batch)] = 0
            rigs[index].update(step)
            graphs[index].replay(batch)
            rigs[index].check(step)


def test_two_stages_on_two_streams() -> None:
    buffers = allocate(2, max_batch_size=16, max_num_tokens=16, head_dim=HEAD_DIM)
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
    stage = allocate(1, max_batch_size=4, max_num_tokens=16, head_dim=HEAD_DIM).stage(0)
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
    with pytest.raises(ValueError, match="captured with flashinfer, now triton is asked for"):
        graphs.replay(4)


def test_a_plan_made_before_a_capture() -> None:
    """What an engine does that plans for each step itself: the graph holds its layers alone."""
    stage = allocate(1, max_batch_size=4, max_num_tokens=4, head_dim=HEAD_DIM).stage(0)
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
