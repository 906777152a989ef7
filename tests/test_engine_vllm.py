"""vLLM's CUSTOM backend against vLLM's own classes: what vLLM asks, and what is refused."""

from __future__ import annotations

import builtins
import importlib
import logging
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backend", reason="vLLM is not installed")

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import registry
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

from tests.vllm_steps import (
    CAPABILITY,
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    layout,
    make_builder,
    nhd,
)
from tritonattn.engines import vllm as engine
from tritonattn.engines.vllm_backend import (
    TritonAttnBackend,
    TritonAttnImpl,
)

__all__ = ["layout", "nhd"]  # fixtures


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
