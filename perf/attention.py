"""Decode and prefill beside FlashInfer: plans outside the time, one layer a call, CUDA graphs.

    python -m tritonattn.perf.attention [--out FILE.csv]

Warm L2: one set of buffers. Both sides are checked against each other before they are timed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import flashinfer
import pandas as pd
import torch

import tritonattn
from tritonattn.perf.timing import Work, environment, interleaved_us


@dataclass(frozen=True)
class Case:
    """Uniform lengths over one model shape, bf16, head_dim 128, page 16, NHD, causal."""

    op: str
    num_qo_heads: int
    num_kv_heads: int
    batch_size: int
    q_len: int  # tokens
    kv_len: int  # tokens
    head_dim: int = 128
    page_size: int = 16

    @property
    def name(self) -> str:
        """Return `op heads BxQxL`."""
        shape = f"{self.batch_size}x{self.q_len}x{self.kv_len}"
        return f"{self.op} {self.num_qo_heads}/{self.num_kv_heads} {shape}"


CASES = [
    Case("decode", 32, 8, 1, 1, 8192),
    Case("decode", 32, 8, 8, 1, 4096),
    Case("decode", 32, 8, 64, 1, 1024),
    Case("decode", 32, 8, 64, 1, 8192),
    Case("decode", 28, 4, 64, 1, 1024),
    Case("decode", 32, 32, 8, 1, 4096),
    Case("prefill", 32, 8, 16, 512, 512),
    Case("prefill", 32, 8, 8, 2048, 2048),
    Case("prefill", 32, 8, 2, 8192, 8192),
    Case("prefill", 32, 8, 16, 128, 4096),
    Case("prefill", 28, 4, 2, 8192, 8192),
]


def make_call(case: Case) -> dict[str, Any]:
    """Draw random tensors for a case, pages in random order."""
    pages = -(-case.kv_len // case.page_size)
    shape = (case.batch_size * pages, 2, case.page_size, case.num_kv_heads, case.head_dim)
    order = torch.randperm(case.batch_size * pages, device="cuda", dtype=torch.int32)

    def int32(values: torch.Tensor) -> torch.Tensor:
        return values.to("cuda", torch.int32)

    total_q = case.batch_size * case.q_len
    return {
        "q": torch.randn(
            total_q, case.num_qo_heads, case.head_dim, device="cuda", dtype=torch.bfloat16
        ),
        "kv_cache": torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        "qo_indptr": int32(torch.arange(case.batch_size + 1) * case.q_len),
        "seq_lens": int32(torch.full((case.batch_size,), case.kv_len)),
        "indptr": int32(torch.arange(case.batch_size + 1) * pages),
        "indices": order,
        "max_q_len": case.q_len,
    }


def flashinfer_wrapper(case: Case, call: dict[str, Any], backend: str) -> Any:
    """Plan a FlashInfer wrapper: `decode` (CUDA cores), `decode-tc`, `fa2` or `fa3`."""
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    last = torch.full_like(call["seq_lens"], (case.kv_len - 1) % case.page_size + 1)
    table = (call["indptr"], call["indices"], last)
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if backend.startswith("decode"):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=backend == "decode-tc"
        )
        wrapper.plan(*table, *heads, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(call["qo_indptr"], *table, *heads, causal=True, **dtypes)
    return wrapper


def measure(case: Case) -> list[dict[str, Any]]:
    """Return one row per provider."""
    call = make_call(case)
    out = torch.empty_like(call["q"])
    q, kv_cache = call["q"], call["kv_cache"]
    plan = tritonattn.plan_attention(**call)
    works: dict[str, Work] = {
        "triton": partial(tritonattn.paged_attention, q, kv_cache, plan=plan, out=out)
    }
    works["triton"]()
    refused: dict[str, str] = {}
    for backend in ("decode", "decode-tc") if case.op == "decode" else ("fa2", "fa3"):
        try:
            wrapper = flashinfer_wrapper(case, call, backend)
            peer = wrapper.run(q, kv_cache)
        except Exception as error:
            # FlashInfer puts the place in its generated source before what it has to say.
            refused[backend] = re.sub(r"^Error in function .* at \S+:\d+: ", "", str(error)).strip()
            continue
        difference = (peer.float() - out.float()).norm() / peer.float().norm()
        assert difference < 8e-3, (case.name, backend, difference.item())
        works[backend] = partial(wrapper.run, q, kv_cache, out=peer)
    times = interleaved_us(works)
    best = min(time for name, time in times.items() if name != "triton")
    pairs = case.q_len * case.kv_len - case.q_len * (case.q_len - 1) / 2
    flops = 4 * case.num_qo_heads * case.head_dim * pairs * case.batch_size
    size = kv_cache.nbytes + q.nbytes + out.nbytes
    rows: list[dict[str, Any]] = [
        {
            "case": case.name,
            "provider": name,
            "us_p50": time,
            "gb_per_s": size / time / 1e3,
            "tflops": flops / time / 1e6,
            "us_over_best_flashinfer": time / best,
            "status": "ok",
        }
        for name, time in times.items()
    ]
    rows += [
        {"case": case.name, "provider": name, "status": f"refused: {reason}"}
        for name, reason in refused.items()
    ]
    return rows


def main() -> None:
    """Measure all cases, print a table, write a CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    rows = [row for case in CASES if arguments.only in case.name for row in measure(case)]
    frame = pd.DataFrame(rows).assign(mode="graph", l2="warm", **environment())
    print(frame.iloc[:, :7].round(2).to_string(index=False))
    if arguments.out:
        frame.to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
