"""The demo's run of the model: both implementations as they generate, then their agreement."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritonattn import env
from tritonattn.cli import need
from tritonattn.demo import generation, weights
from tritonattn.demo.console import TextStream, decode
from tritonattn.demo.generation import BASELINE, Agreement, Generated
from tritonattn.engines.transformers import IMPLEMENTATION, register

PAGE_SIZE = 16  # tokens


def show(
    chosen: Path | None,
    device: str,
    dtype: torch.dtype,
    prompts: Sequence[str],
    num_tokens: int,
    results: dict[str, Any],
) -> bool:
    """Generate with both implementations, print, and return whether they agree.

    Parameters
    ----------
    chosen : Path, optional
        Folder of another model than the demo's.
    device : str
    dtype : torch.dtype
    prompts : sequence of str
    num_tokens : int
        New tokens a prompt.
    results : dict
        Gets an entry "model".
    """
    transformers = need("transformers", "engines")
    need("psutil", "engines")
    # Its bars would stand among ours.
    transformers.utils.logging.disable_progress_bar()
    folder = weights.find(chosen)
    register()
    model, tokenizer = weights.load(folder, torch.device(device), dtype)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    print(
        f"\n{weights.label(folder)} in transformers {transformers.__version__}, "
        f"continuous batching, greedy, {dtype_name(dtype)}\n"
        f"{len(ids)} prompts of {', '.join(str(len(prompt)) for prompt in ids)} tokens, "
        f"{num_tokens} new tokens each, pages of {PAGE_SIZE} tokens"
    )
    for i, prompt in enumerate(prompts):
        print(f"  [{i + 1}] {prompt.strip()} ...")
    batching = _batching(transformers, ids, num_tokens, device)
    expected = _generate(BASELINE, model, tokenizer, ids, num_tokens, batching)
    actual = _generate(IMPLEMENTATION, model, tokenizer, ids, num_tokens, batching)
    rows = generation.agreements(model, ids, actual.tokens, expected.tokens)
    print(f"\n{IMPLEMENTATION} against {BASELINE}")
    for i, row in enumerate(rows):
        print(f"  [{i + 1}] {row}")
    texts = [decode(tokenizer, tokens) for tokens in actual.tokens]
    results["model"] = _record(prompts, ids, expected, actual, texts, rows, dtype)
    return all(row.accepted for row in rows)


def _generate(
    implementation: str,
    model: Any,
    tokenizer: Any,
    ids: list[list[int]],
    num_tokens: int,
    batching: Any,
) -> Generated:
    print(f"\n{implementation}", flush=True)
    with TextStream(tokenizer, len(ids), num_tokens) as stream, _overflow_unchecked():
        generated = generation.generate(
            model,
            ids,
            implementation=implementation,
            max_new_tokens=num_tokens,
            batching=batching,
            on_tokens=stream,
        )
    total = sum(map(len, generated.tokens))
    print(f"  {total} tokens in {generated.seconds:.1f} s, {total / generated.seconds:.1f}/s")
    return generated


def _record(
    prompts: Sequence[str],
    ids: list[list[int]],
    expected: Generated,
    actual: Generated,
    texts: list[str],
    rows: list[Agreement],
    dtype: torch.dtype,
) -> dict[str, Any]:
    return {
        "dtype": dtype_name(dtype),
        "seconds": {run.implementation: run.seconds for run in (expected, actual)},
        "prompts": [
            {
                "prompt": prompt,
                "prompt_tokens": len(ids[i]),
                "tokens": actual.tokens[i],
                "expected_tokens": expected.tokens[i],
                "text": texts[i],
                "equal_tokens": rows[i].equal,
                "logit_gap": rows[i].gap,
                "accepted": rows[i].accepted,
            }
            for i, prompt in enumerate(prompts)
        ],
    }


def _batching(transformers: Any, ids: list[list[int]], num_tokens: int, device: str) -> Any:
    """Size the engine for the prompts; few tokens a step, so that prefills run beside decodes."""
    pages = sum(-(-(len(prompt) + num_tokens) // PAGE_SIZE) + 1 for prompt in ids)
    return transformers.ContinuousBatchingConfig(
        block_size=PAGE_SIZE,
        num_blocks=max(32, 2 * pages),
        max_batch_tokens=16 if device == "cpu" else 64,
        use_cuda_graph=False,
        use_async_batching=False,
    )


@contextmanager
def _overflow_unchecked() -> Iterator[None]:
    """Let Triton's interpreter skip its check of integer overflow, a sixth of the time of a run.

    The numbers are the same, and the tests run with the check. The switch is not public: if it is
    gone, the run takes longer.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter") if env.INTERPRET else None
    options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
    checked = getattr(options, "sanitize_overflow", False)
    if checked:
        # The options are a frozen dataclass.
        object.__setattr__(options, "sanitize_overflow", False)
    try:
        yield
    finally:
        if checked:
            object.__setattr__(options, "sanitize_overflow", True)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
