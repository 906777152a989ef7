"""The tensors of a case, the oracle's answer, and the check that comes before any timing.

A step has one batch and several layers, equal in all but where they lie. Calls that go round the
layers find nothing of theirs in the L2 cache if the layers together are several times larger than
it, as within a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonattn.backends import UnsupportedError
from tritonattn.cases import make_inputs, reference_results
from tritonattn.perf.cases import BlockCase, StepCase, heads_of
from tritonattn.perf.roofs import Roofs
from tritonattn.spec import DTYPES

# The layers of a cold run together, in sizes of the L2 cache.
COLD_L2_SIZES = 4
MAX_LAYERS = 256
# Error against fp64 of an output row, and of all rows together, in steps of its dtype. Rounding
# gives 0.3, kernels of all peers up to 0.7 and 0.55. A key that every row lacks shows up to about
# 10,000 keys; what hides in longer rows is for tests.
MAX_ROW_STEPS = 1.5
MAX_RMS_STEPS = 0.75
# A step of fp32 is less than what sums in fp32 lose.
MIN_STEP = 2.0**-20

Result = Tensor | Sequence[Tensor]  # parts stand in the order of the rows


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far a result is from the oracle."""

    rms_rel: float
    worst_row: float
    step: float  # of the dtype; 0: nothing but equal is right

    @property
    def problem(self) -> str | None:
        """Return what is wrong, or None. NaN is wrong."""
        if not self.worst_row <= MAX_ROW_STEPS * self.step:
            return (
                f"the worst row is off by {self.worst_row:.3g} of its norm, allowed "
                f"{MAX_ROW_STEPS * self.step:.3g}"
            )
        if not self.rms_rel <= MAX_RMS_STEPS * self.step:
            return (
                f"all rows are off by {self.rms_rel:.3g}, allowed {MAX_RMS_STEPS * self.step:.3g}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Layer:
    """What a call of one layer reads and writes."""

    q: Tensor  # [total_q, num_qo_heads, head_dim]
    kv_cache: Tensor  # [num_pages, 2, page_size, num_kv_heads, head_dim], or HND
    out: Tensor  # as q


class Step:
    """The tensors of a `StepCase`."""

    def __init__(self, case: StepCase, device: torch.device, cold: bool) -> None:
        if case.features:
            raise UnsupportedError(f"the oracle has no {case.features} yet")
        self.case = case
        inputs = make_inputs(case.attention_case(), device).unpoisoned()
        self.q_lens, self.kv_lens = case.tokens()
        self.max_q_len, self.max_kv_len = max(self.q_lens), max(self.kv_lens)
        self.batch_size = len(self.q_lens)
        self.num_qo_heads, self.num_kv_heads, self.head_dim = heads_of(case.model)
        self.page_size = case.page_size
        self.kv_layout = case.kv_layout
        self.dtype = DTYPES[case.dtype]
        self.sm_scale = self.head_dim**-0.5
        self.device = device
        self.qo_indptr, self.seq_lens = inputs.qo_indptr, inputs.seq_lens
        # Just as wide as the longest request: cuDNN takes no other.
        width = -(-self.max_kv_len // case.page_size)
        self.block_table = inputs.table["block_table"][:, :width].contiguous()
        self.indptr, self.indices, self.last_page_len = inputs.last_page_table()
        self.inputs = inputs
        total_q = sum(self.q_lens)
        assert isinstance(inputs.kv_cache, Tensor)
        first = Layer(inputs.q[:total_q], inputs.kv_cache, torch.empty_like(inputs.q[:total_q]))
        self.layers = [first]
        if cold:
            self.layers += [_copy(first) for _ in range(_cold_layers(self.bytes, device) - 1)]
        self.leaves_l2 = len(self.layers) * self.bytes >= 2 * _l2_bytes(device)
        self._oracle: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Return what a call must read and write: live K and V, q and out, each once."""
        heads = 2 * sum(self.kv_lens) * self.num_kv_heads
        heads += 2 * sum(self.q_lens) * self.num_qo_heads
        return heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Return 4 * heads * head_dim for each pair of query and key that causality keeps."""
        pairs = 0
        for q_len, kv_len in zip(self.q_lens, self.kv_lens, strict=True):
            hidden = q_len * (q_len - 1) // 2 if self.case.causal else 0
            pairs += q_len * kv_len - hidden
        return 4.0 * self.num_qo_heads * self.head_dim * pairs

    def roof_s(self, roofs: Roofs) -> float:
        """Return the time that the roofs allow: most bytes are read only."""
        return max(self.bytes / (roofs.read_gbps * 1e9), self.flops / (roofs.matmul_tflops * 1e12))

    def poison(self) -> None:
        """Fill all outputs with NaN."""
        for layer in self.layers:
            layer.out.fill_(math.nan)

    def check(self, result: Result | None) -> Accuracy:
        """Compare a result of the first layer with fp64."""
        if result is None:
            raise TypeError("an attention call must return its output, got None")
        if self._oracle is None:
            self._oracle = reference_results(self.inputs)[0][: sum(self.q_lens)]
        parts = [result] if isinstance(result, Tensor) else list(result)
        rows = torch.cat(parts) if len(parts) > 1 else parts[0]
        error = rows.reshape(self._oracle.shape).double() - self._oracle
        norms = self._oracle.norm(dim=-1)
        # What cancels out to little still carries the rounding of what cancelled.
        floor = norms.square().mean().sqrt() / 16
        worst = (error.norm(dim=-1) / norms.clamp(min=floor)).max()
        unit = max(torch.finfo(self.dtype).eps, MIN_STEP)
        return Accuracy(float(error.norm() / self._oracle.norm()), float(worst), unit)

    def columns(self) -> dict[str, Any]:
        """Return what the table says of the case."""
        return {
            "batch_size": self.batch_size,
            "total_q": sum(self.q_lens),
            "total_kv": sum(self.kv_lens),
            "max_q_len": self.max_q_len,
            "max_kv_len": self.max_kv_len,
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """The caches of a block op."""

    sources: list[Tensor]  # one a layer
    targets: list[Tensor]  # the same for copy_blocks


class BlockStep:
    """The tensors of a `BlockCase`; `src_to_dst` is on the host, as `on_device` on the device."""

    leaves_l2 = True  # or not: there is one set of buffers, and no cold variant

    def __init__(self, case: BlockCase, device: torch.device) -> None:
        self.case = case
        self.device = device
        _, num_kv_heads, head_dim = heads_of(case.model)
        inner = (case.page_size, num_kv_heads)
        inner = inner if case.kv_layout == "NHD" else inner[::-1]
        shape = (case.pool, 2, *inner, head_dim)
        dtype = DTYPES[case.dtype]

        generator = torch.Generator(device).manual_seed(0)

        def pool(host: bool) -> list[Tensor]:
            tensors = [
                torch.randn(shape, generator=generator, device=device).to(dtype)
                for _ in range(case.num_layers)
            ]
            if host and device.type == "cuda":
                return [tensor.cpu().pin_memory() for tensor in tensors]
            return tensors

        sources = pool(case.what.endswith("from host"))
        same = case.what == "copy_blocks"
        self.layers = [Pages(sources, sources if same else pool(case.what.endswith("to host")))]
        order = torch.randperm(case.pool, generator=torch.Generator().manual_seed(0))
        self.src_to_dst = torch.stack((order[: case.moved], order[-case.moved :]), 1)
        self.on_device = self.src_to_dst.to(device)
        page = sources[0][0].nbytes
        self.over_bus = case.what.endswith("host")
        # A copy on the device counts what is read and what is written; the bus carries a page once.
        self.bytes = page * case.moved * case.num_layers * (1 if self.over_bus else 2)
        self.flops = 0.0

    def roof_s(self, roofs: Roofs) -> float:
        """Return the time that the copy roof allows; the bus has no roof here."""
        return math.nan if self.over_bus else self.bytes / (roofs.copy_gbps * 1e9)

    def poison(self) -> None:
        """Make sure that the targets are not there yet."""
        for layer in self.layers:
            for target in layer.targets:
                target[self.src_to_dst[:, 1].to(target.device)] = math.nan

    def check(self, result: Result | None) -> Accuracy:
        """Compare target pages with their sources, bit for bit; or the two tensors of a result."""
        source, target = self.src_to_dst.unbind(1)
        pages = self.layers[0]
        if result is None:
            pairs = [
                (a[source.to(a.device)], b[target.to(b.device)])
                for a, b in zip(pages.sources, pages.targets, strict=True)
            ]
        else:
            pairs = [(result[0], result[1])]
        equal = all(torch.equal(a.to(b.device), b) for a, b in pairs)
        return Accuracy(0.0 if equal else 1.0, 0.0 if equal else 1.0, 0.0)

    def columns(self) -> dict[str, Any]:
        """Return what the table says of the case."""
        return {}


AnyStep = Step | BlockStep


def make_step(case: StepCase | BlockCase, device: torch.device, cold: bool) -> AnyStep:
    """Make the tensors of a case; `cold` asks for layers enough to leave the L2 cache."""
    if isinstance(case, BlockCase):
        return BlockStep(case, device)
    return Step(case, device, cold)


def _copy(layer: Layer) -> Layer:
    return Layer(layer.q.clone(), layer.kv_cache.clone(), torch.empty_like(layer.out))


def _cold_layers(size: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return max(1, min(MAX_LAYERS, math.ceil(COLD_L2_SIZES * _l2_bytes(device) / size)))


def _l2_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
