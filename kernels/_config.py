"""Launch parameters: a small reviewed table, chosen from static facts only.

Nothing here looks at a device value, so a captured graph and an eager call run the same kernels.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from tritonattn.spec import AttentionSpec

# Requests with at most this many query tokens take the split-KV path; longer ones take query tiles.
MAX_DECODE_Q_LEN = 8

# Split-KV work is cut so that about this many programs per multiprocessor have something to do.
DECODE_CTAS_PER_SM = 4
STREAM_CTAS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile and launch shape of one attention kernel."""

    block_m: int  # rows of a query tile: tokens x heads of a GQA group
    block_n: int  # KV tokens of a tile
    num_warps: int
    num_stages: int


def pow2_ceil(x: int) -> int:
    """Return the smallest power of two that is at least `x`."""
    return 1 << max(0, (x - 1).bit_length())


def decode_tile(spec: AttentionSpec) -> TileConfig:
    """Choose the tile of the split-KV kernel: all rows of a request in one, if 64 hold them."""
    q_len = spec.max_q_len if spec.max_q_len <= MAX_DECODE_Q_LEN else 1
    block_m = min(64, max(16, pow2_ceil(q_len * spec.group_size)))
    block_n = 32 if max(spec.head_dim_qk, spec.head_dim_vo) > 128 or _needs_registers(spec) else 64
    return TileConfig(block_m, block_n, num_warps=4, num_stages=2 if _needs_registers(spec) else 3)


def within(spec: AttentionSpec) -> list[AttentionSpec]:
    """Return one shape for each tile that calls with at most so many query tokens may use.

    What a tile costs grows with requests and rows, so these bound all calls within `spec`.
    """
    q_lens = {
        min(q_len, spec.max_q_len) for q_len in (*range(1, MAX_DECODE_Q_LEN + 1), spec.max_q_len)
    }
    return [replace(spec, max_q_len=q_len) for q_len in sorted(q_lens)]


def prefill_tile(spec: AttentionSpec) -> TileConfig:
    """Choose the tile of the prefill kernel."""
    if _needs_registers(spec):
        return TileConfig(block_m=16, block_n=32, num_warps=8, num_stages=1)
    if max(spec.head_dim_qk, spec.head_dim_vo) > 128:
        return TileConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if not chip(spec.device).has_wgmma:
        # Operands pass through registers there: a tile of 64 x 64 on four warps would spill.
        return TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=3)
    return TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)


def _needs_registers(spec: AttentionSpec) -> bool:
    """Return whether dots are fp32 on the chip: no matrix unit holds their operands.

    In the interpreter fewer and fatter programs win, whatever the dtype.
    """
    return spec.q_dtype == torch.float32 and spec.device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Chip:
    """What launch parameters depend on."""

    num_sms: int  # multiprocessors
    has_wgmma: bool  # matrix instructions that read their operands from shared memory


@functools.cache
def chip(device: torch.device) -> Chip:
    """Describe a device; the CPU stands for one program at a time."""
    if device.type == "cpu":
        return Chip(num_sms=1, has_wgmma=True)
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        num_sms=properties.multi_processor_count,
        has_wgmma=torch.version.hip is None and properties.major >= 9,
    )


def split_programs(spec: AttentionSpec) -> int:
    """Return how many (request, KV head, KV chunk) programs split-KV work should fill."""
    if spec.device.type == "cpu":
        return 1
    return chip(spec.device).num_sms * DECODE_CTAS_PER_SM


def stream_workers(spec: AttentionSpec) -> int:
    """Return how many programs share short queries evenly: as many as the chip holds at once."""
    return 4 if spec.device.type == "cpu" else chip(spec.device).num_sms * STREAM_CTAS_PER_SM


def is_swapped(spec: AttentionSpec) -> bool:
    """Return whether the tokens of a tile are the rows of its products, as Hopper's units want."""
    return chip(spec.device).has_wgmma and not _needs_registers(spec)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current: a launch goes to the current device, whatever its arguments."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
