"""Small runs of every kernel, for compute-sanitizer to watch.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 python -m tests.memcheck
    compute-sanitizer --error-exitcode 9 python -m tests.memcheck --graphs

Without torch's cache every tensor is an allocation of its own, so an access past its end is seen;
graphs need the cache. Results are compared with the reference: a launch that the sanitizer stopped
is not taken for a good one.
"""

from __future__ import annotations

import argparse
import random

import torch

import tritonattn
from tests import seeds
from tests.gpu.test_stage_gpu import Layer, allocate
from tritonattn.cases import AttentionCase, make_inputs, reference_results

SHAPE = seeds.Shape(8, 2, 64, page_size=16, max_batch=6, max_pages=5, prompt=40)
CASES = [
    AttentionCase((1, 1, 0, 1), (3000, 17, 5, 0), 8, 2, 128, page_size=16),
    AttentionCase((1, 5, 70, 0), (900, 37, 70, 9), 6, 2, 80, page_size=8, kv_layout="HND"),
    AttentionCase((130, 2, 40), (200, 1500, 40), 4, 4, 64, page_size=1, table="csr"),
]


def eager() -> None:
    """Run an engine's steps, attention of awkward shapes, and what the steps do not use."""
    seeds.profile_prefill_decode(SHAPE, "cuda")
    seeds.block_ops_between_steps(SHAPE, "cuda")
    for case in CASES:
        inputs = make_inputs(case, "cuda")
        out = tritonattn.paged_attention(**inputs.arguments())
        rows = int(inputs.qo_indptr[-1])
        expected = reference_results(inputs)[0][:rows].float()
        torch.testing.assert_close(out[:rows].float(), expected, rtol=2e-2, atol=2e-2)
    pages = torch.randn(7, 2, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([6, 0, 3], dtype=torch.int32, device="cuda")
    assert torch.equal(tritonattn.gather_blocks(pages, ids), pages[ids.long()])
    tritonattn.zero_blocks([pages], ids)
    assert not pages[ids.long()].any()
    v = torch.randn(5, 3, 4, 80, device="cuda", dtype=torch.bfloat16)
    merged, _ = tritonattn.merge_states(v, torch.zeros(5, 3, 4, device="cuda"))
    torch.testing.assert_close(merged.float(), v.float().mean(1), rtol=2e-2, atol=2e-2)


def graphs() -> None:
    """Replay the graphs of two stages."""
    choose = random.Random(0)
    buffers = allocate(2, max_batch_size=16, max_num_tokens=90)
    layers = [Layer(buffers.stage(index), seed=index, pages=40) for index in range(2)]
    decode = [layer.stage.capture([1, 4, 16], layer.decode) for layer in layers]
    mixed = [layer.stage.capture([16], layer.mixed) for layer in layers]
    for turn in range(24):
        index = choose.randrange(2)
        layer = layers[index]
        batch = choose.randint(1, 16)
        q_lens = [choose.choice([0, 1, 3, 9]) for _ in range(batch)] if turn % 2 else [1] * batch
        step = layer.step(q_lens)
        layer.stage.update(**step)
        (mixed if turn % 2 else decode)[index].replay(batch)
        rows = sum(q_lens)
        expected = layer.reference(step, layer.q.size(0))[:rows].float()
        torch.testing.assert_close(layer.out[:rows].float(), expected, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", action="store_true")
    graphs() if parser.parse_args().graphs else eager()
    torch.cuda.synchronize()
    print("all right")
