"""transformers' continuous batching on our kernels: a tiny random Llama against `paged|sdpa`.

transformers is a development dependency: without it this module fails to import, on purpose.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager, LlamaConfig

from tritonattn.demo import generation
from tritonattn.engines import transformers as engine

NEW_TOKENS = 5
# Two fresh prompts, one of them longer than a step's tokens; page size 4.
PROMPTS = [list(range(3, 10)), list(range(20, 41))]


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers, GQA 3:1; weights large enough that no two logits are close."""
    engine.register()
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def batching(**changes: Any) -> ContinuousBatchingConfig:
    sizes = {"block_size": 4, "num_blocks": 48, "max_batch_tokens": 32}
    return ContinuousBatchingConfig(**{**sizes, **changes})


class Recorder:
    """Notes what each step looked like, at its first layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[str, Any]] = []
        make = engine._make_step

        def recording(
            cache: Any, group: int, q: Tensor, pages: Any, sources: Any, kwargs: Any
        ) -> Any:
            cu_q = kwargs["cu_seq_lens_q"].tolist()
            read = kwargs["read_index"][group]
            self.steps.append(
                {
                    "q_lens": [b - a for a, b in pairwise(cu_q)],
                    "rows": q.size(0),
                    "reads": read.numel() > 0,
                    "block_table": kwargs["block_table"] is not None,
                    "prefix_tokens": cache._total_prefix_length,
                }
            )
            return make(cache, group, q, pages, sources, kwargs)

        monkeypatch.setattr(engine, "_make_step", recording)

    def any(self, **facts: Any) -> bool:
        return any(all(step[k] == v for k, v in facts.items()) for step in self.steps)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def assert_same_tokens(model: Any, prompts: list[list[int]], **changes: Any) -> None:
    """Generate with both implementations; all tokens must be equal (fp32, no near ties)."""
    rows = generation.compare_greedy(
        model, prompts, max_new_tokens=NEW_TOKENS, batching=batching(**changes)
    )
    assert [row.equal for row in rows] == [NEW_TOKENS] * len(prompts), list(map(str, rows))
    assert all(row.gap is None for row in rows)


def test_other_releases_of_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their engine passes other arguments; the message says which release is known."""
    monkeypatch.setattr("transformers.__version__", "5.24.0")
    with pytest.raises(ImportError, match=r"transformers 5\.17, got 5\.24\.0: pip install"):
        engine.register()


def test_fresh_prefills_then_decode(model: Any, recorder: Recorder) -> None:
    assert_same_tokens(model, PROMPTS)
    assert sorted(recorder.steps[0]["q_lens"]) == [7, 21]
    assert not recorder.steps[0]["reads"]
    assert recorder.any(q_lens=[1, 1], reads=True)
    # One plan a step, not one a layer.
    assert len(recorder.steps) == NEW_TOKENS


def test_chunked_prefill_beside_decode(model: Any, recorder: Recorder) -> None:
    assert_same_tokens(model, PROMPTS, max_batch_tokens=16)
    mixed = [s["q_lens"] for s in recorder.steps if s["reads"] and max(s["q_lens"]) > 1]
    assert any(min(q_lens) == 1 for q_lens in mixed), recorder.steps


def test_prefix_cache_hit_is_a_prefill_with_a_past(model: Any, recorder: Recorder) -> None:
    prefix = list(range(50, 62))
    prompts = [[*prefix, 7, 8, 9], [*prefix, 70, 71]]
    assert_same_tokens(model, prompts, max_batch_tokens=15)
    assert recorder.steps[-1]["prefix_tokens"] == len(prefix)


def test_padded_batches(model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine does for CUDA graphs: padded rows, zero-length sequences, trash slots."""
    start = ContinuousBatchingManager.start

    def padded_start(manager: ContinuousBatchingManager) -> None:
        manager.batch_processor.model_runner.pad_inputs = True
        start(manager)

    monkeypatch.setattr(ContinuousBatchingManager, "start", padded_start)
    sizes = {"q_padding_interval_size": 8, "kv_padding_interval_size": 16, "max_batch_tokens": 16}
    assert_same_tokens(model, PROMPTS, **sizes)
    padded = [s for s in recorder.steps if sum(s["q_lens"]) < s["rows"] and 0 in s["q_lens"]]
    assert len(padded) >= NEW_TOKENS - 1, recorder.steps


def test_decode_fast_path(model: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps with a block table, which the engine gives to "flash" names unless told."""
    warmup = ContinuousBatchingManager.warmup

    def warmup_with_tables(manager: ContinuousBatchingManager) -> None:
        if manager.model.config._attn_implementation == engine.IMPLEMENTATION:
            manager.continuous_batching_config.max_blocks_per_request = 8
        warmup(manager)

    monkeypatch.setattr(ContinuousBatchingManager, "warmup", warmup_with_tables)
    assert_same_tokens(model, PROMPTS)
    assert recorder.any(q_lens=[1, 1], block_table=True)
    assert recorder.any(block_table=False)


def test_an_ordinary_forward_is_refused(model: Any) -> None:
    model.set_attn_implementation(engine.IMPLEMENTATION)
    with pytest.raises(ValueError, match="works only in continuous batching"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_sliding_window_model_fails_with_the_reason() -> None:
    engine.register()
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    mistral = transformers.MistralForCausalLM(config).eval()
    with pytest.raises(generation.GenerationError, match="sliding_window"):
        generation.generate(
            mistral,
            PROMPTS[:1],
            implementation=engine.IMPLEMENTATION,
            max_new_tokens=2,
            batching=batching(),
        )


def generate_ours(model: Any, **changes: Any) -> generation.Generated:
    return generation.generate(
        model,
        PROMPTS,
        implementation=engine.IMPLEMENTATION,
        max_new_tokens=3,
        batching=batching(),
        **changes,
    )


def test_an_error_in_a_layer_is_raised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    plan = engine.plan_attention
    calls = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("boom in the third step")
        return plan(*args, **kwargs)

    monkeypatch.setattr(engine, "plan_attention", failing)
    with pytest.raises(generation.GenerationError, match="boom in the third step"):
        generate_ours(model)
    assert threading.active_count() == threads


def test_a_cache_that_is_too_small_is_an_error(model: Any) -> None:
    with pytest.raises(generation.GenerationError, match="request"):
        generation.generate(
            model,
            [list(range(60))],
            implementation=engine.IMPLEMENTATION,
            max_new_tokens=3,
            batching=batching(num_blocks=4),
            stall_s=20.0,
        )


def test_a_hang_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    threads = threading.active_count()
    monkeypatch.setattr(engine, "reshape_and_cache", lambda *args: release.wait(60))
    try:
        monkeypatch.setattr(generation, "STOP_S", 0.5)
        with pytest.raises(generation.StallError, match="no token for 1 s, 2 of 2") as error:
            generate_ours(model, stall_s=1.0)
        assert error.value.thread_alive
    finally:
        release.set()
    for thread in threading.enumerate():
        if "_run_generation_loop" in thread.name:
            thread.join(30)
    assert threading.active_count() == threads
