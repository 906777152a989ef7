"""Steps as vLLM describes them, on a cache in its own strides; needs vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn.reference.attention import attention as fp64_attention

pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import utils as vllm_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from tritonattn.engines import vllm_backend
from tritonattn.engines.vllm_backend import (
    TritonAttnBackend,
    TritonAttnImpl,
    TritonAttnMetadataBuilder,
)

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
SCALE = 0.4  # not the default of a head dim
MAX_REQS, MAX_TOKENS, MAX_LEN = 8, 64, 128
CAPABILITY = DeviceCapability(9, 0)


@pytest.fixture(autouse=True)
def nhd() -> Any:
    vllm_utils.set_kv_cache_layout("NHD")
    yield
    vllm_utils.set_kv_cache_layout(None)


@pytest.fixture(params=["NHD", "HND"])
def layout(request: pytest.FixtureRequest, nhd: None) -> str:
    vllm_utils.set_kv_cache_layout(request.param)
    return request.param


class Step:
    """A step as vLLM describes it: padded, on a cache in vLLM's own strides, poisoned with NaN."""

    def __init__(
        self, q_lens: list[int], kv_lens: list[int], pad_reqs: int = 0, pad_tokens: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.q_lens, self.kv_lens = q_lens, kv_lens
        tokens, batch = sum(q_lens), len(q_lens)
        width = MAX_LEN // PAGE
        ids = torch.randperm(batch * width, generator=generator) + 1  # block 0 is vLLM's null
        self.pages = ids.view(batch, width).int()
        order = TritonAttnBackend.get_kv_cache_stride_order()
        shape = TritonAttnBackend.get_kv_cache_shape(batch * width + 1, PAGE, KV_HEADS, DIM)
        raw = torch.full([shape[i] for i in order], math.nan)
        self.cache = raw.permute(*(order.index(i) for i in range(5)))
        self.k = [torch.randn(n, KV_HEADS, DIM, generator=generator) for n in kv_lens]
        self.v = [torch.randn(n, KV_HEADS, DIM, generator=generator) for n in kv_lens]
        self.q = torch.randn(tokens + pad_tokens, HEADS, DIM, generator=generator)
        slots = []
        for request, (new, total) in enumerate(zip(q_lens, kv_lens, strict=True)):
            at = torch.arange(total)
            page, offset = self.pages[request][at // PAGE].long(), at % PAGE
            old = total - new
            self.cache[page[:old], 0, offset[:old]] = self.k[request][:old]
            self.cache[page[:old], 1, offset[:old]] = self.v[request][:old]
            slots.append((page * PAGE + offset)[old:])
        padded = torch.full((pad_tokens,), -1)
        self.slots = torch.cat([*slots, padded]).long()
        # Views of one projection, as a model makes them.
        rows = [(k[-n:], v[-n:]) for k, v, n in zip(self.k, self.v, q_lens, strict=True) if n]
        new_kv = torch.full((tokens + pad_tokens, 2, KV_HEADS, DIM), math.nan)
        new_kv[:tokens, 0] = torch.cat([k for k, _ in rows])
        new_kv[:tokens, 1] = torch.cat([v for _, v in rows])
        self.new_k, self.new_v = new_kv.unbind(1)
        starts = torch.tensor([0, *q_lens, *[0] * pad_reqs]).cumsum(0).int()
        null = torch.zeros(pad_reqs, width, dtype=torch.int32)
        # vLLM passes views of what holds more requests; what is behind them is of earlier steps.
        stale = torch.full((MAX_REQS,), 77, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=torch.cat([starts, stale]), query_start_loc_cpu=starts,
            seq_lens=torch.cat([torch.tensor([*kv_lens, *[0] * pad_reqs]).int(), stale]),
            num_reqs=batch + pad_reqs, num_actual_tokens=tokens + pad_tokens,
            max_query_len=max(q_lens), max_seq_len=max(kv_lens),
            block_table_tensor=torch.cat([self.pages, null, stale[:, None].expand(-1, width)]),
            slot_mapping=self.slots,
        )  # fmt: skip

    def expected(self) -> Tensor:
        """Return what the tokens of requests should give, in fp64."""
        out, begin = [], 0
        for k, v, n in zip(self.k, self.v, self.q_lens, strict=True):
            q, seen = self.q[begin : begin + n], torch.ones(n, len(k), dtype=torch.bool)
            mask = seen.tril(len(k) - n)
            out.append(fp64_attention(q, k, v, mask, SCALE)[0])
            begin += n
        return torch.cat(out)


def make_builder(
    monkeypatch: pytest.MonkeyPatch,
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    spec: Any = None,
    speculative: str | None = None,
) -> TritonAttnMetadataBuilder:
    monkeypatch.setattr(vllm_backend, "get_num_attention_heads_from_layers", lambda *_: HEADS)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        speculative_config=speculative and SimpleNamespace(method=speculative),
    )
    spec = spec or FullAttentionSpec(
        block_size=2 * PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
    )
    # As vLLM makes them; blocks of its own are twice as large as those of the cache.
    group = AttentionGroup(TritonAttnBackend, ["layer.0"], spec, 0)
    group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=PAGE)
    builder = group.get_metadata_builder()
    assert isinstance(builder, TritonAttnMetadataBuilder)
    return builder


def run(step: Step, builder: TritonAttnMetadataBuilder, *, layers: int = 2) -> Tensor:
    """Run a step's layers, which here have the same cache."""
    impl = TritonAttnImpl(HEADS, DIM, SCALE, KV_HEADS)
    metadata = builder.build(0, step.common)
    output = torch.full_like(step.q, 7.0)
    for _ in range(layers):
        impl.do_kv_cache_update(None, step.new_k, step.new_v, step.cache, step.slots)
        impl.forward(None, step.q, step.new_k, step.new_v, step.cache, metadata, output)
    return output
