"""Replay graphs of many sizes on many stages for long, each result beside an eager call's.

    python -m tests.soak [--replays 100000] [--stages 4] [--sizes 1 2 4 8 ...]

Needs a GPU. Lengths, tables and batch sizes change at random before every replay; the eager call
has no buffers. Results must be equal bit for bit, and rows past the batch untouched. Exit status 1
if one was not.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time

import torch

from tests.gpu.test_stage_gpu import MAX_PAGES, PAGE, SIZES, Layer, allocate


def draw(layer: Layer, batch: int) -> dict[str, torch.Tensor]:
    """Draw a decode step on the device: nothing of it passes the host."""
    device = layer.q.device
    return {
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32, device=device),
        "seq_lens": torch.randint(
            0, MAX_PAGES * PAGE + 1, (batch,), dtype=torch.int32, device=device
        ),
        "block_table": torch.randint(
            0, layer.cache.size(0), (batch, MAX_PAGES), dtype=torch.int32, device=device
        ),
    }


def main() -> int:
    """Soak; return 1 if a result differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    args = parser.parse_args()
    torch.manual_seed(0)
    choose = random.Random(0)
    buffers = allocate(args.stages)
    layers = [Layer(buffers.stage(index), seed=index) for index in range(args.stages)]
    graphs = [layer.stage.capture(args.sizes, layer.decode) for layer in layers]
    print(f"{buffers.nbytes} bytes of buffers; graphs: {[g.memory_bytes for g in graphs]}")
    different = torch.zeros(3, dtype=torch.int64, device="cuda")  # results, touched rows, replays
    begin = time.perf_counter()
    for turn in range(args.replays):
        index = choose.randrange(args.stages)
        layer, batch = layers[index], choose.randint(1, max(args.sizes))
        step = draw(layer, batch)
        layer.out.fill_(math.nan)
        layer.stage.update(**step)
        graphs[index].replay(batch)
        expected = layer.eager(step, batch)
        different[0] += (layer.out[:batch] != expected).any()
        different[1] += (~layer.out[batch:].isnan()).any()
        different[2] += 1
        if (turn + 1) % 10_000 == 0:
            found = different.tolist()
            print(f"{found[2]} replays, {time.perf_counter() - begin:.0f} s: {found[0]} differ, "
                  f"{found[1]} touched rows that are not theirs", flush=True)  # fmt: skip
    found = different.tolist()
    print(f"{found[2]} replays: {found[0]} differ, {found[1]} touched rows that are not theirs")
    return int(found[0] + found[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
