"""The real model in transformers' continuous batching on the GPU: its tokens against `paged|sdpa`.

The model is the demo's: `TRITONATTN_DEMO_MODEL` names a Hugging Face folder where there is no
network.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager

from tritonattn.demo import PROMPTS, generation, weights
from tritonattn.engines import transformers as engine

pytestmark = pytest.mark.gpu

NEW_TOKENS = 64


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.fixture(scope="module", params=list(DTYPES.values()), ids=list(DTYPES))
def loaded(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]]]:
    """Return the model and the token ids of eight prompts of different lengths."""
    try:
        folder = weights.find(None)
    except weights.WeightsMissingError as error:
        pytest.skip(f"no model: {error}")
    model, tokenizer = weights.load(folder, torch.device("cuda"), request.param)
    return model, [tokenizer(prompt).input_ids for prompt in PROMPTS]


def batching(**changes: Any) -> ContinuousBatchingConfig:
    """Few tokens a step, so that prefills are cut and run beside decodes."""
    sizes = {"block_size": 16, "num_blocks": 256, "max_batch_tokens": 64, "use_cuda_graph": False}
    return ContinuousBatchingConfig(**{**sizes, "use_async_batching": False, **changes})


def assert_tokens_agree(loaded: tuple[Any, list[list[int]]], **changes: Any) -> None:
    """Compare all tokens; the first that differs must be a near tie in sdpa's own logits."""
    model, prompts = loaded
    rows = generation.compare_greedy(
        model,
        prompts,
        max_new_tokens=NEW_TOKENS,
        batching=batching(**changes),
        baseline_batching=batching(),
    )
    shown = "\n".join(f"[{i + 1}] {row}" for i, row in enumerate(rows))
    print(f"\n{shown}")
    assert len(rows) == len(prompts) >= 8
    assert all(row.expected == NEW_TOKENS for row in rows), shown
    assert all(row.accepted for row in rows), shown
    # bf16 has many ties. In finer dtypes more than a few would mean that something is a little off.
    if model.dtype != torch.bfloat16:
        assert sum(row.equal == NEW_TOKENS for row in rows) >= len(rows) // 2, shown


def count_graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each plan made, whether it was made inside a capture."""
    made: list[bool] = []
    make = engine._make_step

    def counting(*args: Any) -> Any:
        made.append(torch.cuda.is_current_stream_capturing())
        return make(*args)

    monkeypatch.setattr(engine, "_make_step", counting)
    return made


def test_eager(loaded: tuple[Any, list[list[int]]]) -> None:
    assert_tokens_agree(loaded)


@pytest.mark.parametrize("use_async_batching", [False, True])
def test_cuda_graphs(
    loaded: tuple[Any, list[list[int]]],
    use_async_batching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padded batches; most steps are replays, which plan from the lengths that stand there then."""
    made = count_graphs(monkeypatch)
    assert_tokens_agree(
        loaded,
        use_cuda_graph=(True, True),
        use_async_batching=use_async_batching,
        q_padding_interval_size=16,
        kv_padding_interval_size=256,
    )
    assert any(made)
    assert len(made) < NEW_TOKENS


def test_cuda_graphs_of_the_decode_fast_path(
    loaded: tuple[Any, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block tables; one graph a batch size, whatever the lengths."""
    warmup = ContinuousBatchingManager.warmup
    tables = []

    def warmup_with_tables(manager: ContinuousBatchingManager) -> None:
        if manager.model.config._attn_implementation == engine.IMPLEMENTATION:
            manager.continuous_batching_config.max_blocks_per_request = 16
        warmup(manager)

    make = engine._make_step

    def counting(*args: Any) -> Any:
        tables.append(args[-1]["block_table"] is not None)
        return make(*args)

    monkeypatch.setattr(ContinuousBatchingManager, "warmup", warmup_with_tables)
    monkeypatch.setattr(engine, "_make_step", counting)
    assert_tokens_agree(loaded, use_cuda_graph=(True, True), max_requests_per_batch=8)
    assert any(tables)
    assert len(tables) < NEW_TOKENS
