"""Compile the kernels ahead of time, as their launchers launch them, and judge the binaries.

No GPU is needed: a stand-in driver names the target, launches become compilations, and tensors have
shapes but no memory. So what is checked is what runs: real launchers, real launch parameters, real
specialisation.

    python tests/aot/check.py [--target sm_90 ...] [--case NAME ...]

Each row says what a binary costs. A row fails on: no compilation, spills where none are meant, more
shared memory than the chip has, loads of K and V narrower than 16 bytes, no tensor-core instruction
in a 16-bit kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tritonattn.kernels import _config
from tritonattn.kernels import append as append_op
from tritonattn.kernels import copy_blocks as copy_op
from tritonattn.kernels import decode as decode_op
from tritonattn.kernels import plan as plan_op
from tritonattn.kernels import prefill as prefill_op
from tritonattn.kernels import read as read_op
from tritonattn.kernels import stream as stream_op
from tritonattn.kernels import stream_plan as stream_plan_op
from tritonattn.kernels import zero_blocks as zero_op
from tritonattn.layout import PagedKVCache, PageTable
from tritonattn.spec import AttentionSpec


@dataclass(frozen=True)
class Target:
    """A chip: what Triton calls it and what a program may use of it."""

    gpu: GPUTarget
    chip: _config.Chip
    shared_bytes: int


# ptxas may park a loop-invariant scalar or two on the stack, far from its register limit: no real
# spill.
PARKED_BYTES = 16
# What a kernel keeps on the stack across a call that is outside of its loops.
CALL_BYTES = {"stream_kernel": 64}

TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), _config.Chip(108, False), 166_912),
    "sm_90": Target(GPUTarget("cuda", 90, 32), _config.Chip(132, True), 232_448),
    "sm_100": Target(GPUTarget("cuda", 100, 32), _config.Chip(148, True), 232_448),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), _config.Chip(304, False), 65_536),
}


class AheadOfTimeDriver:
    """What `JITFunction.run` asks of a driver before it launches."""

    def __init__(self, gpu: GPUTarget) -> None:
        self.gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return self.gpu

    def get_current_device(self) -> int:
        # Triton keeps its caches per device: one number for each target.
        return int(re.sub(r"\D", "", str(self.gpu.arch)))

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(target: Target) -> Iterator[list[Any]]:
    """Turn launches into compilations for `target`; yield the list of compiled kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(AheadOfTimeDriver(target.gpu))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(_config, "chip", return_value=target.chip),
    ):
        yield compiled


@dataclass(frozen=True)
class AttentionCase:
    """Static facts of an attention call to compile."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    max_q_len: int = 1  # 1: decode kernels; 512: prefill as well
    csr: bool = False

    @property
    def tensor_cores(self) -> bool:
        """fp32 dots are exact products, which tensor cores do not have."""
        return self.dtype != torch.float32

    def launch(self) -> None:
        """Run the planner and the attention launchers as `paged_attention` would."""
        batch, width = 64, 128
        meta: dict[str, Any] = {"dtype": torch.int32, "device": "meta"}
        shape = (4096, 2, self.page_size, self.num_kv_heads, self.head_dim)
        cache = PagedKVCache.of(torch.empty(shape, dtype=self.dtype, device="meta"))
        lengths = torch.empty(batch, **meta)
        if self.csr:
            table = PageTable.csr(
                torch.empty(batch + 1, **meta),
                torch.empty(batch * width, **meta),
                lengths,
                self.page_size,
            )
        else:
            table = PageTable.dense(torch.empty(batch, width, **meta), lengths, self.page_size)
        spec = AttentionSpec(
            device=torch.device("cuda"),
            q_dtype=self.dtype,
            kv_dtype=self.dtype,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim,
            page_size=self.page_size,
            batch_size=batch,
            total_q=batch * self.max_q_len,
            max_q_len=self.max_q_len,
            max_kv_len=table.max_kv_len,
            is_csr=self.csr,
            causal=True,
        )
        q = torch.empty(
            spec.total_q, self.num_qo_heads, self.head_dim, dtype=self.dtype, device="meta"
        )
        lse = torch.empty(spec.total_q, self.num_qo_heads, device="meta")
        lists, scratch = (
            torch.empty(op.workspace_bytes(spec), dtype=torch.uint8, device="meta")
            for op in (plan_op, decode_op)
        )
        work, partials = plan_op.carve(spec, lists), decode_op.carve(spec, scratch)
        plan_op.plan(spec, table, lengths, work)
        scales = {"sm_scale_log2": 0.1, "lse_scale": 1.0}
        if work.capacity.prefill:
            prefill_op.prefill(spec, q, cache, table, work, q, lse, **scales)
        else:
            decode_op.decode(spec, q, cache, table, work, partials, q, lse, **scales)
            self.launch_stream(spec, q, cache, table, lengths, lse, scales)

    def launch_stream(
        self,
        spec: AttentionSpec,
        q: Any,
        cache: Any,
        table: Any,
        lengths: Any,
        lse: Any,
        scales: Any,
    ) -> None:
        """Run the planner and the launcher of even shares."""
        lists, scratch = (
            torch.empty(op.workspace_bytes(spec), dtype=torch.uint8, device="meta")
            for op in (stream_plan_op, stream_op)
        )
        shares = stream_plan_op.carve(spec, lists)
        stream_plan_op.plan(spec, table, lengths, shares)
        partials = stream_op.carve(spec, scratch)
        stream_op.stream(spec, q, cache, table, shares, partials, q, lse, **scales)


@dataclass(frozen=True)
class BytesCase:
    """A launch that moves cache bytes: `launch` is the call."""

    launch: Callable[[], None]
    tensor_cores: bool = False


def cache(
    *shape: int, dtype: torch.dtype = torch.bfloat16, interleaved: bool = False
) -> PagedKVCache:
    """Return a combined NHD cache without memory, or one whose K and V alternate by head."""
    empty = torch.empty(shape, dtype=dtype, device="meta")
    return PagedKVCache.of(empty.permute(0, 3, 1, 2, 4) if interleaved else empty)


def ids(*shape: int) -> torch.Tensor:
    """Return int64 ids without memory."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def copy_pages(*caches: PagedKVCache) -> None:
    """Copy from the first cache to the last."""
    copy_op.copy_blocks([caches[0]], [caches[-1]], ids(1000), ids(1000))


def append_rows(target: PagedKVCache, num_rows: int = 64) -> None:
    """Write rows that are slices of a fused projection."""
    heads, dim = target.num_kv_heads, target.head_dim_qk
    fused = torch.empty(num_rows, 3 * heads, dim, dtype=target.dtype, device="meta")
    _, key, value = fused.split(heads, 1)
    append_op.append_to_slots(key, value, target, ids(num_rows))


CASES = {
    "copy-p16-h8-d128-bf16": BytesCase(lambda: copy_pages(cache(4096, 2, 16, 8, 128))),
    "copy-interleaved": BytesCase(
        lambda: copy_pages(cache(4096, 16, 8, 2, 128, interleaved=True), cache(4096, 2, 16, 8, 128))
    ),
    "zero-p16-h8-d128-bf16": BytesCase(
        lambda: zero_op.zero_blocks([cache(4096, 2, 16, 8, 128)], ids(1000))
    ),
    "read": BytesCase(
        lambda: read_op.read(
            torch.empty(1 << 20, device="meta"), torch.empty(8 * 132, device="meta")
        )
    ),
    "append-p16-h8-d128-bf16": BytesCase(lambda: append_rows(cache(4096, 2, 16, 8, 128))),
    "append-p16-h8-d80-fp16": BytesCase(
        lambda: append_rows(cache(4096, 2, 16, 8, 80, dtype=torch.float16))
    ),
    "decode-h32/8-d128-bf16-p16": AttentionCase(32, 8, 128),
    "decode-h32/8-d128-fp16-p16-csr": AttentionCase(32, 8, 128, torch.float16, csr=True),
    "decode-h28/4-d128-bf16-p1": AttentionCase(28, 4, 128, page_size=1),
    "decode-h32/32-d128-bf16-p64": AttentionCase(32, 32, 128, page_size=64),
    "decode-h9/3-d64-bf16-p16": AttentionCase(9, 3, 64),
    "decode-h16/8-d256-bf16-p16": AttentionCase(16, 8, 256),
    "decode-h40/8-d80-fp16-p272": AttentionCase(40, 8, 80, torch.float16, page_size=272),
    "decode-q5-h32/8-d128-bf16-p16": AttentionCase(32, 8, 128, max_q_len=5),
    "decode-h8/2-d64-fp32-p16": AttentionCase(8, 2, 64, torch.float32),
    "prefill-h32/8-d128-bf16-p16": AttentionCase(32, 8, 128, max_q_len=512),
    "prefill-h32/8-d128-fp16-p64": AttentionCase(
        32, 8, 128, torch.float16, page_size=64, max_q_len=512
    ),
    "prefill-h28/4-d128-bf16-p1": AttentionCase(28, 4, 128, page_size=1, max_q_len=512),
    "prefill-h9/3-d64-bf16-p16": AttentionCase(9, 3, 64, max_q_len=512),
    "prefill-h16/8-d256-bf16-p16": AttentionCase(16, 8, 256, max_q_len=512),
    "prefill-h8/2-d128-fp32-p16": AttentionCase(8, 2, 128, torch.float32, max_q_len=512),
}


@dataclass(frozen=True)
class Row:
    """What one binary costs and what is wrong with it."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    mma: int
    wide: int  # 16-byte asynchronous copies, loads and stores
    faults: tuple[str, ...]


BYTE_KERNELS = ("copy_blocks_kernel", "zero_blocks_kernel", "read_kernel")


def judge(kernel: Any, target: Target, tensor_cores: bool) -> Row:
    """Read a compiled kernel's costs and compare them with what is meant."""
    name = kernel.metadata.name
    if target.gpu.backend == "cuda":
        registers, spills = _cuda_resources(kernel.asm["cubin"])
        code = kernel.asm["ptx"]
        mma = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", code))
        wide = len(
            re.findall(
                r"cp\.async\.c[ag].*0x10,|(?:ld|st)\.global[.\w:]*\.(?:v4\.[bu]32|v2\.[bu]64)", code
            )
        )
    else:
        code = kernel.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1])  # type: ignore[index]
        spills = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1])  # type: ignore[index]
        mma = len(re.findall(r"v_mfma", code))
        wide = len(re.findall(r"(global|buffer)_(load|store)_dwordx4", code))
    faults = []
    if spills > CALL_BYTES.get(name, PARKED_BYTES):
        faults.append(f"{spills} bytes spilled")
    if kernel.metadata.shared > target.shared_bytes:
        faults.append(f"{kernel.metadata.shared} bytes of shared memory > {target.shared_bytes}")
    attends = name in ("decode_split_kernel", "stream_kernel", "prefill_kernel")
    if attends and tensor_cores and not mma:
        faults.append("no tensor-core instruction")
    if not wide and (attends or name in BYTE_KERNELS):
        faults.append("no 16-byte loads or stores")
    return Row(name, registers, spills, kernel.metadata.shared, mma, wide, tuple(faults))


def _cuda_resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def main() -> int:
    """Compile the chosen cases for the chosen targets; return 1 if a row fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--target", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--case", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    failures = 0
    print(f"triton {triton.__version__}")
    for target_name in arguments.target:
        target = TARGETS[target_name]
        for case in arguments.case:
            with compiling(target) as compiled:
                CASES[case].launch()
            for kernel in compiled:
                row = judge(kernel, target, CASES[case].tensor_cores)
                failures += bool(row.faults)
                print(
                    f"{'FAIL' if row.faults else 'ok':4} {target_name:7} {case:32} {row.kernel:20} "
                    f"regs {row.registers:3} spill {row.spill_bytes:4} shared {row.shared_bytes:6} "
                    f"mma {row.mma:3} wide {row.wide:3} {'; '.join(row.faults)}",
                    flush=True,
                )
    print(f"{failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
