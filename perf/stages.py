"""What the stages of a pipeline cost: memory, capture time, and the host's part of a step.

    python -m tritonattn.perf.stages --out FILE.csv [--stages 4] [--quick]

Needs a GPU. Ours beside FlashInfer's decode wrapper in the same stages, one for each size, which is
how engines capture it. A step is decode, on a Llama-3 8B layer with room for 8192 tokens a request.
Memory is what the device has less of. Host times are medians with the device at rest, in us.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import tritonattn
from tritonattn import PipelineBuffers, dispatch, use_backend
from tritonattn.layout import PagedKVCache
from tritonattn.perf.environment import environment
from tritonattn.perf.timing import host_us
from tritonattn.plan import AttentionPlan
from tritonattn.stage import StageBuffers

BACKENDS = ("triton", "flashinfer")
SIZES = [1, 2, 4, *range(8, 257, 8), 512]
GEOMETRY = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
MAX_PAGES = 512
FIGURES = {
    "stages": "stages",
    "sizes": "captured sizes of each",
    "buffers_mib": "buffers, MiB",
    "all_mib": "all that the device has less of, MiB",
    "capture_s": "all captures, s",
    "update_from_host_us": "update from pinned tensors, µs",
    "update_from_device_us": "update from device tensors, µs",
    "replay_us": "replay, plan included, until it returns, µs",
    "dispatch_us": "dispatch, µs",
    "dispatch_planned_us": "dispatch of a layer of a planned step, µs",
}
DTYPE = torch.bfloat16


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write it with the environment."""
    parser = argparse.ArgumentParser(description="What the stages of a pipeline cost.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="the first three sizes, few rounds")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("stages are measured on a GPU", file=sys.stderr)
        return 2
    sizes, rounds = (SIZES[:3], 5) if args.quick else (SIZES, 200)
    facts = environment(torch.device("cuda"))
    rows = [measure(name, args.stages, sizes, rounds) for name in BACKENDS]
    frame = pd.DataFrame(rows)
    print(table(frame))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    frame.assign(**facts).to_csv(args.out, index=False)
    return 0


def table(frame: pd.DataFrame) -> str:
    """Return the figures as Markdown, a column for each backend."""
    figures = frame.set_index("backend")[list(FIGURES)].rename(columns=FIGURES)
    return str(figures.T.to_markdown(floatfmt=".1f"))


def measure(backend: str, num_stages: int, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Return a row: what all stages took together, and the host's part of one step."""
    with use_backend(backend):
        _capture(backend, 1, sizes[:1])  # compiles, loads, and starts the allocator
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        buffers, layers, graphs = _capture(backend, num_stages, sizes)
        seconds = time.perf_counter() - begin
        taken = free - torch.cuda.mem_get_info()[0]
        size = sizes[-1]
        stage, graph = buffers.stage(0), graphs[0]
        step: dict[str, Any] = {**_step(size)}
        on_device: dict[str, Any] = {name: tensor.cuda() for name, tensor in step.items()}
        spec = layers[0].plan(size).spec(layers[0].q[:size], PagedKVCache.of(layers[0].cache), ())
        own = sum(t.nbytes for layer in layers for t in (layer.q, layer.out, layer.cache))

        def host(work: Callable[[], Any]) -> float:
            return host_us(work, stage.device, wait=False, rounds=rounds)

        def choose(planned: str | None) -> None:
            for _ in range(1000):
                dispatch.choose(spec, planned=planned)

        return {
            "backend": backend,
            "stages": num_stages,
            "sizes": len(sizes),
            "buffers_mib": buffers.nbytes / 2**20,
            "all_mib": (taken - own) / 2**20,
            "capture_s": seconds,
            "update_from_host_us": host(lambda: stage.update(**step)),
            "update_from_device_us": host(lambda: stage.update(**on_device)),
            "replay_us": host(lambda: graph.replay(size)),
            "dispatch_us": host(lambda: choose(None)) / 1000,
            "dispatch_planned_us": host(lambda: choose(backend)) / 1000,
        }


class _Layer:
    """One layer of a stage, whose tensors stay."""

    def __init__(self, stage: StageBuffers) -> None:
        rows, heads = stage.capacity.max_num_tokens, GEOMETRY["num_qo_heads"]
        self.stage = stage
        self.q = torch.randn(rows, heads, GEOMETRY["head_dim"], device="cuda", dtype=DTYPE)
        self.out = torch.empty_like(self.q)
        shape = (64, 2, GEOMETRY["page_size"], GEOMETRY["num_kv_heads"], GEOMETRY["head_dim"])
        self.cache = torch.randn(shape, device="cuda", dtype=DTYPE)

    def plan(self, batch: int) -> AttentionPlan:
        """Plan a step."""
        metadata: dict[str, Any] = {**self.stage.metadata(batch), "max_q_len": 1}
        return tritonattn.plan_attention(self.q[:batch], self.cache, **metadata, buffers=self.stage)

    def decode(self, batch: int) -> None:
        """Launch a step, as `StageBuffers.capture` asks for it."""
        q, out = self.q[:batch], self.out[:batch]
        tritonattn.paged_attention(q, self.cache, plan=self.plan(batch), out=out)


def _capture(
    backend: str, num_stages: int, sizes: list[int]
) -> tuple[PipelineBuffers, list[_Layer], list[Any]]:
    buffers = PipelineBuffers.allocate(
        num_stages=num_stages, max_batch_size=max(sizes), max_num_tokens=max(sizes),
        max_pages_per_request=MAX_PAGES, dtype=DTYPE, device="cuda", **GEOMETRY,
    )  # fmt: skip
    layers = [_Layer(buffers.stage(index)) for index in range(num_stages)]
    graphs = [layer.stage.capture(sizes, layer.decode) for layer in layers]
    return buffers, layers, graphs


def _step(batch: int) -> dict[str, torch.Tensor]:
    """Return the metadata of a decode step of 1000 keys a request, in pinned memory."""
    pages = torch.arange(MAX_PAGES, dtype=torch.int32).remainder(64).expand(batch, -1)
    step = {
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32),
        "seq_lens": torch.full((batch,), 1000, dtype=torch.int32),
        "block_table": pages.contiguous(),
    }
    return {name: tensor.pin_memory() for name, tensor in step.items()}


if __name__ == "__main__":
    sys.exit(main())
