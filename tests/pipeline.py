"""A model in two pipeline stages, a process each: `python tests/pipeline.py` is one rank.

Each rank has layers, caches and a stage of buffers, and hands hidden states on through
torch.distributed. On a GPU the work of a stage is captured for each batch size and replayed for
every step; on the CPU it runs eagerly. The last rank compares with one process that runs all layers
without buffers or graphs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tritonattn
from tritonattn import PipelineBuffers

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 8, 6
WIDTH = HEADS * DIM
LAYERS = 2  # of a stage
SIZES = [1, 2, 4, 8]


class Stage:
    """The layers of one rank over one set of buffers, or over none."""

    def __init__(self, rank: int, device: torch.device, buffers: Any) -> None:
        generator = torch.Generator().manual_seed(rank)

        def weights(rows: int, columns: int) -> list[Tensor]:
            return [
                (torch.randn(rows, columns, generator=generator) / rows**0.5).to(device)
                for _ in range(LAYERS)
            ]

        kv = KV_HEADS * DIM
        self.q, self.k, self.v = weights(WIDTH, WIDTH), weights(WIDTH, kv), weights(WIDTH, kv)
        self.out = weights(WIDTH, WIDTH)
        self.caches = [
            torch.zeros(SIZES[-1] * PAGES, 2, PAGE, KV_HEADS, DIM, device=device)
            for _ in range(LAYERS)
        ]
        self.buffers = buffers
        self.hidden = torch.zeros(SIZES[-1], WIDTH, device=device)
        self.slots = torch.full((SIZES[-1],), -1, dtype=torch.int64, device=device)

    def run(self, size: int, metadata: dict[str, Tensor] | None = None) -> Tensor:
        """Run the layers on the first rows of `hidden`; one plan serves all."""
        hidden = self.hidden[:size]
        given = metadata or self.buffers.metadata(size)
        options = {"buffers": self.buffers} if self.buffers is not None else {}
        plan = None
        for layer, cache in enumerate(self.caches):
            q = (hidden @ self.q[layer]).view(size, HEADS, DIM)
            k, v = ((hidden @ w[layer]).view(size, KV_HEADS, DIM) for w in (self.k, self.v))
            tritonattn.reshape_and_cache(k, v, cache, self.slots[:size])
            if plan is None:
                plan = tritonattn.plan_attention(q, cache, **given, max_q_len=1, **options)
            out = tritonattn.paged_attention(q, cache, plan=plan)
            assert isinstance(out, Tensor)
            hidden = hidden + out.view(size, WIDTH) @ self.out[layer]
        return hidden


def steps() -> list[tuple[int, int]]:
    """Return (batch size, length of every request) of each step; requests come and go."""
    return [(3, 1), (3, 2), (8, 3), (8, 4), (1, 5), (5, 6), (8, 7), (2, 8), (7, 9), (8, 10)]


def metadata_of(batch: int, length: int) -> tuple[dict[str, Tensor], Tensor]:
    table = torch.arange(batch * PAGES, dtype=torch.int32).view(batch, PAGES)
    slots = torch.arange(batch) * PAGES * PAGE + length - 1
    lengths = torch.full((batch,), length, dtype=torch.int32)
    ends = torch.arange(batch + 1, dtype=torch.int32)
    return {"qo_indptr": ends, "seq_lens": lengths, "block_table": table}, slots


def inputs_of(step: int, batch: int) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


def size_of(batch: int) -> int:
    return next(size for size in SIZES if size >= batch)


def fill(stage: Stage, hidden: Tensor, slots: Tensor) -> None:
    batch = len(slots)
    stage.hidden[:batch].copy_(hidden)
    stage.slots.fill_(-1)
    stage.slots[:batch].copy_(slots)


def run_rank(rank: int, device: torch.device) -> None:
    """Run the steps of one rank; the last one checks what comes out."""
    buffers = PipelineBuffers.allocate(
        num_stages=2, max_batch_size=SIZES[-1], max_num_tokens=SIZES[-1],
        max_pages_per_request=PAGES, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        page_size=PAGE, dtype=torch.float32, device=device,
    )  # fmt: skip
    stage = Stage(rank, device, buffers.stage(rank))
    graphs = stage.buffers.capture(SIZES, stage.run) if device.type == "cuda" else None
    wire = device if dist.get_backend() == "nccl" else torch.device("cpu")
    plain = [Stage(other, device, None) for other in range(2)] if rank == 1 else []
    for index, (batch, length) in enumerate(steps()):
        metadata, slots = metadata_of(batch, length)
        hidden = inputs_of(index, batch).to(wire)
        if rank == 1:
            dist.recv(hidden, src=0)
        fill(stage, hidden, slots)
        stage.buffers.update(**metadata)
        out = graphs.replay(batch) if graphs is not None else stage.run(size_of(batch))
        if rank == 0:
            dist.send(out[:batch].to(wire), dst=1)
            continue
        expected = inputs_of(index, batch)
        for one in plain:
            fill(one, expected, slots)
            there = {name: tensor.to(device) for name, tensor in metadata.items()}
            expected = one.run(batch, there)
        torch.testing.assert_close(out[:batch], expected, rtol=1e-3, atol=1e-3)
    print(f"rank {rank}: {len(steps())} steps on {device}", flush=True)


def main() -> None:
    """Join the other rank and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("meeting", type=Path, help="a file that both ranks name")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    several = args.device == "cuda" and torch.cuda.device_count() > 1
    device = torch.device("cuda", args.rank if several else 0) if args.device == "cuda" else None
    device = device or torch.device("cpu")
    if several:
        torch.cuda.set_device(device)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if several else "gloo", init_method=f"file://{args.meeting}", rank=args.rank,
        world_size=2,
    )  # fmt: skip
    try:
        run_rank(args.rank, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
