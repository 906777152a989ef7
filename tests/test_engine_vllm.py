"""vLLM's CUSTOM backend against vLLM's own classes: what vLLM asks, and what it passes."""

from __future__ import annotations

import builtins
import importlib
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tritonattn import env
from tritonattn.reference.attention import attention as fp64_attention

pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends import utils as vllm_utils
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from tritonattn.engines import vllm as engine
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


def validate(**changes: Any) -> list[str]:
    """Ask as vLLM's platform does."""
    asked: dict[str, Any] = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": CAPABILITY,
        "attn_type": "decoder",
    }  # fmt: skip
    return TritonAttnBackend.validate_configuration(**asked | changes)


def test_registered_once_and_found_by_its_name() -> None:
    for _ in range(2):
        engine.register()
    assert registry.AttentionBackendEnum.CUSTOM.is_overridden()
    found = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert found is TritonAttnBackend
    # vLLM looks a backend up again by this name.
    assert registry.AttentionBackendEnum[found.get_name()] is registry.AttentionBackendEnum.CUSTOM


@pytest.mark.parametrize(
    "accepted",
    [
        {}, {"head_size": 80}, {"head_size": 256}, {"dtype": torch.float16},
        {"dtype": torch.float32}, {"kv_cache_dtype": "bfloat16"}, {"block_size": 1},
        {"block_size": 48}, {"use_kv_connector": True},
        {"device_capability": DeviceCapability(8, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_accepted(accepted: dict[str, Any]) -> None:
    assert validate(**accepted) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 512}, "head_size not supported"),
        ({"head_size": 33}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache for a model of torch.bfloat16"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "full attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(asked: dict[str, Any], reason: str) -> None:
    (said,) = validate(**asked)
    assert reason in said


@pytest.mark.parametrize(
    "feature",
    [
        {"alibi_slopes": [0.5]}, {"sliding_window": 128}, {"logits_soft_cap": 30.0},
        {"attn_type": "encoder"}, {"sinks": torch.zeros(4)}, {"chunk_lookback": 2},
        {"use_alibi_sqrt": True},
    ],
    ids=lambda feature: next(iter(feature)),
)  # fmt: skip
def test_what_a_layer_cannot_do(feature: dict[str, Any]) -> None:
    """vLLM asks about some of these nobody: the layer itself says no."""
    (name,) = feature
    with pytest.raises(NotImplementedError, match=rf"does not support .*{name.split('_')[0]}"):
        TritonAttnImpl(HEADS, DIM, 1.0, KV_HEADS, **feature)


def test_a_layer_with_everything_at_rest() -> None:
    TritonAttnImpl(
        HEADS, DIM, 1.0, KV_HEADS, None, None, "auto", 0, "decoder", "model.layers.0",
        sinks=None, use_alibi_sqrt=False, chunk_lookback=-1,
    )  # fmt: skip


def test_the_cache_is_flashinfers(layout: str) -> None:
    shape = TritonAttnBackend.get_kv_cache_shape(10, PAGE, KV_HEADS, DIM)
    assert shape == (10, 2, PAGE, KV_HEADS, DIM)
    assert TritonAttnBackend.get_kv_cache_block_dim(PAGE, KV_HEADS, DIM) == 0
    order = TritonAttnBackend.get_kv_cache_stride_order()
    assert [shape[i] for i in order][2:4] == (
        [PAGE, KV_HEADS] if layout == "NHD" else [KV_HEADS, PAGE]
    )
    layered = TritonAttnBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    assert sorted(layered) == list(range(6))
    assert layered[0] == 1
    # Without the layers it is the order of one layer's cache, pages first.
    one_layer = [i - 1 for i in layered if i != 0]
    assert one_layer == list(order) or layout == "HND"
    assert one_layer.index(4) == 4
    # What padded pages and KV connectors ask for.
    assert TritonAttnBackend.indexes_kv_by_block_stride()


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


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([1, 1, 1], [5, 33, 128]), ([17, 1, 9], [17, 40, 25]), ([1], [1]), ([40], [100])],
    ids=["decode", "mixed", "first", "chunk"],
)
@pytest.mark.parametrize(("pad_reqs", "pad_tokens"), [(0, 0), (3, 5)], ids=["exact", "padded"])
def test_steps_are_right(
    layout: str, q_lens: list[int], kv_lens: list[int], pad_reqs: int, pad_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    builder = make_builder(monkeypatch)
    for seed in range(2):
        step = Step(q_lens, kv_lens, pad_reqs, pad_tokens, seed)
        out = run(step, builder)
        rows = sum(q_lens)
        torch.testing.assert_close(out[:rows], step.expected().float(), rtol=1e-4, atol=1e-4)
        assert (out[rows:] == 7.0).all()


def test_a_plan_serves_what_stands_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's plan is launched anew over the same tensors: for longer queries than captured."""
    builder = make_builder(monkeypatch, CUDAGraphMode.FULL)
    captured = Step([5] * MAX_REQS, [9] * MAX_REQS)
    metadata = builder.build_for_cudagraph_capture(captured.common)
    later = Step([33, 7], [120, 40], pad_reqs=MAX_REQS - 2)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor"):
        place, new = getattr(captured.common, name), getattr(later.common, name)
        place[: new.size(0)].copy_(new)
    impl = TritonAttnImpl(HEADS, DIM, SCALE, KV_HEADS)
    output = torch.full_like(captured.q, 7.0)
    impl.do_kv_cache_update(None, later.new_k, later.new_v, later.cache, later.slots)
    impl.forward(None, later.q, later.new_k, later.new_v, later.cache, metadata, output)
    torch.testing.assert_close(output, later.expected().float(), rtol=1e-4, atol=1e-4)


def test_a_step_at_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(monkeypatch)
    step = Step([MAX_TOKENS - MAX_REQS + 1, *[1] * (MAX_REQS - 1)], [128, *range(1, MAX_REQS)])
    out = run(step, builder)
    torch.testing.assert_close(out, step.expected().float(), rtol=1e-4, atol=1e-4)


def test_buffers_do_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are vLLM's own: at a million tokens a copy would take hundreds of MiB."""
    sizes = []
    for length in (128, 1 << 20):
        monkeypatch.setattr(f"{__name__}.MAX_LEN", length)
        stage = make_builder(monkeypatch)._stage
        sizes.append(stage.workspace.step.nbytes + stage.block_table.nbytes)  # type: ignore[union-attr]
    assert sizes[0] == sizes[1]


def test_layers_that_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shares an earlier layer's writes nothing: vLLM does not ask it to."""
    builder, step = make_builder(monkeypatch), Step([1, 2], [30, 9])
    metadata = builder.build(0, step.common)
    writer = TritonAttnImpl(HEADS, DIM, SCALE, KV_HEADS)
    sharer = TritonAttnImpl(
        HEADS, DIM, SCALE, KV_HEADS, kv_sharing_target_layer_name="model.layers.0"
    )
    writer.do_kv_cache_update(None, step.new_k, step.new_v, step.cache, step.slots)
    output = torch.empty_like(step.q)
    sharer.forward(None, step.q, step.new_k, step.new_v, step.cache, metadata, output)
    torch.testing.assert_close(output, step.expected().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_chunk_size": 64}, "attention in chunks"),
        (None, "a cache of ChunkedLocalAttentionSpec"),
    ],
)
def test_caches_that_are_refused(
    fields: dict[str, Any] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks nobody about these; batches of virtual requests would come later."""
    shape: dict[str, Any] = {
        "block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIM, "dtype": torch.float32,
    }  # fmt: skip
    if fields is None:
        spec: Any = ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64)
    else:
        spec = FullAttentionSpec(**shape, **fields)
    with pytest.raises(NotImplementedError, match=f"does not support {said}"):
        make_builder(monkeypatch, spec=spec)


@pytest.mark.parametrize("method", ["eagle", "mtp", "draft_model"])
def test_draft_models_are_refused(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hands the metadata of one model's graph to the other's."""
    with pytest.raises(NotImplementedError, match=f"does not support speculation by {method}"):
        make_builder(monkeypatch, speculative=method)
    make_builder(monkeypatch, speculative="ngram")


def test_a_policy_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """It might choose what waits for the device; a backend that is named is taken."""
    step = Step([1], [9])
    assert make_builder(monkeypatch).build(0, step.common).plan.backend == "triton"
    monkeypatch.setenv("TRITONATTN_BACKEND", "reference")
    assert make_builder(monkeypatch).build(0, step.common).plan.backend == "reference"
    out = run(step, make_builder(monkeypatch))
    torch.testing.assert_close(out, step.expected().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not env.INTERPRET, reason="outside the interpreter nothing plans on the CPU")
def test_a_step_is_planned_once(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """By its first layer, so that a graph holds the plan; describing a step launches nothing."""
    from tritonattn.backends.triton import TritonBackend

    planned = []
    plan = TritonBackend.plan
    monkeypatch.setattr(TritonBackend, "plan", lambda self, *a: planned.append(1) or plan(self, *a))
    builder, step = make_builder(monkeypatch), Step([1, 3], [20, 30])
    builder.build(0, step.common)
    builder.build_for_cudagraph_capture(step.common)
    assert not planned
    run(step, builder, layers=3)
    assert len(planned) == 1


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        (CUDAGraphMode.FULL, None), (CUDAGraphMode.FULL_DECODE_ONLY, 1),
        (CUDAGraphMode.FULL_AND_PIECEWISE, 1),
    ],
    ids=str,
)  # fmt: skip
def test_a_graph_of_mixed_steps_takes_longer_queries_than_its_capture(
    mode: CUDAGraphMode, bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM captures 4 tokens as 4 requests of one, and replays it for one request of four."""
    builder, capture = make_builder(monkeypatch, mode), Step([1] * 4, [9] * 4)
    assert builder.build_for_cudagraph_capture(capture.common).plan.max_q_len == bound
    assert builder.build(0, capture.common).plan.max_q_len == 1


def test_the_profiling_run_has_no_metadata() -> None:
    impl = TritonAttnImpl(HEADS, DIM, 1.0, KV_HEADS)
    q, kv = torch.randn(5, HEADS, DIM), torch.randn(5, KV_HEADS, DIM)
    output = torch.full_like(q, math.nan)
    assert impl.forward(None, q, kv, kv, torch.empty(0), None, output) is output
    assert not output.any()


def test_what_a_step_may_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    builder, step = make_builder(monkeypatch), Step([1], [9])
    impl = TritonAttnImpl(HEADS, DIM, 1.0, KV_HEADS)
    step.common.causal = torch.tensor([True])
    with pytest.raises(NotImplementedError, match="causal attention only"):
        builder.build(0, step.common)
    with pytest.raises(NotImplementedError, match="does not quantise its output"):
        impl.forward(
            None, step.q, step.new_k, step.new_v, step.cache, None, step.q, torch.ones(1)
        )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "support"),
    [
        ("auto", AttentionCGSupport.ALWAYS), ("triton", AttentionCGSupport.ALWAYS),
        ("flashinfer", AttentionCGSupport.NEVER), ("reference", AttentionCGSupport.NEVER),
    ],
)  # fmt: skip
def test_graphs_are_for_what_plans_on_the_device(
    backend: str, support: AttentionCGSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITONATTN_BACKEND", backend)
    builder = make_builder(monkeypatch)
    assert builder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec) == support


def test_another_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registering harms nobody; asking for the backend tells."""
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    engine.register()
    with pytest.raises(RuntimeError, match=r"knows .* vLLM 0.25, got 0.99.1"):
        registry.AttentionBackendEnum.CUSTOM.get_class()


def test_registering_with_a_vllm_that_has_moved_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would stop there, for those too who want another backend."""
    monkeypatch.delattr(registry, "register_backend")
    engine._log.propagate = True
    monkeypatch.setattr(engine._log, "parent", logging.getLogger())
    with caplog.at_level(logging.WARNING):
        engine.register()
    assert "could not register CUSTOM" in caplog.text


def test_an_import_problem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an ImportError vLLM would show its name alone."""
    real = builtins.__import__

    def fail(name: str, *arguments: Any) -> Any:
        if name == "tritonattn.engines.vllm_backend":
            raise ImportError("no libcudart.so.13")
        return real(name, *arguments)

    engine.register()
    monkeypatch.delitem(sys.modules, "tritonattn.engines.vllm_backend", raising=False)
    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(RuntimeError, match=r"CUSTOM backend: no libcudart\.so\.13"):
        registry.AttentionBackendEnum.CUSTOM.get_class()


def test_the_plug_in_is_an_entry_point() -> None:
    """`pip install tritonattn` is all that vLLM needs."""
    tomllib = pytest.importorskip("tomllib")
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["tritonattn"].partition(":")
    assert getattr(importlib.import_module(module), name) is engine.register
