"""Greedy generation in transformers' continuous batching, watched and compared.

The engine runs in a thread that logs an exception and returns failed requests, or dies, or hangs.
`generate` turns each of these into an exception. `compare_greedy` is the check of an attention
implementation on a real model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tritonattn.cli import need
from tritonattn.engines.transformers import IMPLEMENTATION, register

BASELINE = "paged|sdpa"
# Two implementations may round a tie to different tokens, so a divergence is accepted where the
# baseline's own top two logits are this many steps of their dtype apart, and neither token is more
# than twice as far from the top: each run rounds. A step of bf16 is 0.125 for logits of 16 to 32
# and 0.25 for those of 32 to 64; the noise of fp32 sums is many of its steps.
NEAR_TIE_STEPS = {torch.bfloat16: 1, torch.float16: 4, torch.float32: 512}
# The first step may compile kernels; after this long without a token nothing more will come.
STALL_S = 180.0
# The engine ends after the step that it is in.
STOP_S = 10.0

OnTokens = Callable[[int, list[int], bool], None]


class GenerationError(RuntimeError):
    """A request failed, or the engine did."""


class StallError(GenerationError):
    """The engine brought no token for too long.

    While its thread is alive, Python will not exit by itself.
    """

    def __init__(self, message: str, thread_alive: bool) -> None:
        super().__init__(message)
        self.thread_alive = thread_alive


@dataclass(frozen=True, slots=True)
class Generated:
    """What one implementation generated."""

    implementation: str
    tokens: list[list[int]]  # per prompt
    seconds: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far the tokens of a prompt agree with the baseline's."""

    equal: int  # tokens before the first divergence
    expected: int  # tokens of the baseline
    gap: float | None = None  # between the baseline's top two logits at the divergence, if any
    depth: float = 0.0  # from its top logit down to the lower of the two tokens'
    tolerance: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether all tokens agree, or the first that does not is a near tie."""
        if self.gap is None:
            return True
        return self.gap <= self.tolerance and self.depth <= 2 * self.tolerance

    def __str__(self) -> str:
        """Say it in a line."""
        line = f"{self.equal} of {self.expected} tokens equal"
        if self.gap is None:
            return line
        verdict = "a near tie" if self.accepted else "NOT a near tie"
        return (
            f"{line}; the first that differs is {verdict}: the top two logits of {BASELINE} are "
            f"{self.gap:.4g} apart (allowed {self.tolerance:g}), both tokens within "
            f"{self.depth:.4g}"
        )


def generate(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    implementation: str,
    max_new_tokens: int,
    batching: Any,
    eos_token_id: int = -1,
    on_tokens: OnTokens | None = None,
    stall_s: float | None = None,
) -> Generated:
    """Generate greedily for all prompts at once.

    Parameters
    ----------
    model : PreTrainedModel
        Left with `implementation` set.
    prompts : sequence of list of int
        Token ids.
    implementation : str
        A `paged|...` attention implementation.
    max_new_tokens : int
    batching : ContinuousBatchingConfig
    eos_token_id : int
        Ends a request; -1 lets all run to `max_new_tokens`.
    on_tokens : callable, optional
        Called with (prompt index, all its tokens so far, whether it is finished) as they come.
    stall_s : float, optional
        Seconds without a token after which the engine counts as hung, `STALL_S` by default.

    Raises
    ------
    GenerationError
        With the engine's error. `StallError` if it hangs.
    """
    transformers = need("transformers", "engines")
    model.set_attn_implementation(implementation)
    config = transformers.GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
    )
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=batching
    )
    started = time.perf_counter()
    finished = False
    try:
        manager.warmup()
        _order_inputs(manager)
        # All requests are there before the first step, so that every run forms the same batches.
        names = [manager.add_request(list(ids), streaming=True) for ids in prompts]
        manager.start()
        limit = STALL_S if stall_s is None else stall_s
        tokens = _collect(manager, names, on_tokens, limit, implementation)
        finished = True
    finally:
        _stop(manager, hard=not finished)
    return Generated(implementation, tokens, time.perf_counter() - started)


def _order_inputs(manager: Any) -> None:
    """Make each step wait for its inputs.

    Without async batching transformers 5.17 writes them on the current stream and reads them on a
    stream of its own, with nothing between: on a busy GPU a step may see those of the one before.
    """
    inputs = manager.batch_processor.inputs_and_outputs
    prepare = inputs.prepare_batch_tensors

    def prepare_and_wait(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    inputs.prepare_batch_tensors = prepare_and_wait


def _collect(
    manager: Any, names: list[str], on_tokens: OnTokens | None, stall_s: float, implementation: str
) -> list[list[int]]:
    """Poll until every request has finished; raise as soon as one has failed."""
    tokens: list[list[int]] = [[] for _ in names]
    waiting = set(range(len(names)))
    last = time.monotonic()
    while waiting:
        result = manager.get_result(timeout=0.5)
        if result is None:
            if not manager.is_running() and manager.output_router.output_queue.empty():
                cause = manager.background_thread_status.fatal_error
                raise GenerationError(f"{implementation}: the engine's thread ended early: {cause}")
            if time.monotonic() - last > stall_s:
                _stop(manager, hard=True)
                raise StallError(
                    f"{implementation}: no token for {stall_s:.0f} s, "
                    f"{len(waiting)} of {len(names)} requests are unfinished",
                    manager.is_running(),
                )
            continue
        last = time.monotonic()
        index = names.index(result.request_id)
        done = result.is_finished()
        if result.error is not None or (done and not result.generated_tokens):
            raise GenerationError(f"{implementation}: request {index + 1} failed: {result.error}")
        tokens[index] = list(result.generated_tokens)
        if done:
            waiting.discard(index)
        if on_tokens is not None:
            on_tokens(index, tokens[index], done)
    return tokens


def _stop(manager: Any, hard: bool) -> None:
    """End the engine's thread: Python would wait for it at exit."""
    if manager.is_running():
        manager.stop(block=True, timeout=STOP_S, hard_stop=hard)
    if not manager.is_running():
        # Its last step may still write to the cache, whose memory the next engine will get, on a
        # stream of its own.
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        manager.destroy()


def compare_greedy(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batching: Any,
    baseline_batching: Any | None = None,
    eos_token_id: int = -1,
) -> list[Agreement]:
    """Generate with `paged|tritonattn` and with `paged|sdpa`; return the agreement of each prompt.

    Parameters
    ----------
    model, prompts, max_new_tokens, batching, eos_token_id
        As `generate`.
    baseline_batching : ContinuousBatchingConfig, optional
        For the baseline, if it cannot run as `batching` says (CUDA graphs).
    """
    register()
    shared: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
    expected = generate(
        model, prompts, implementation=BASELINE, batching=baseline_batching or batching, **shared
    )
    actual = generate(model, prompts, implementation=IMPLEMENTATION, batching=batching, **shared)
    return agreements(model, prompts, actual.tokens, expected.tokens)


def agreements(
    model: Any,
    prompts: Sequence[list[int]],
    actual: Sequence[list[int]],
    expected: Sequence[list[int]],
) -> list[Agreement]:
    """Compare the tokens of each prompt with the baseline's.

    Only the first divergence is judged: after it the two continue different texts.
    """
    rows = []
    for prompt, a, b in zip(prompts, actual, expected, strict=True):
        equal = next(
            (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None
        )
        if equal is None and len(a) == len(b):
            rows.append(Agreement(len(b), len(b)))
        elif equal is None:
            # One ran on where the other, with the same tokens, had ended: no tie explains that.
            rows.append(Agreement(min(len(a), len(b)), len(b), math.inf, math.inf))
        else:
            rows.append(
                divergence(model, [*prompt, *b[:equal]], (a[equal], b[equal]), equal, len(b))
            )
    return rows


@torch.no_grad()
def divergence(
    model: Any, context: list[int], tokens: tuple[int, int], equal: int, expected: int
) -> Agreement:
    """Judge two tokens that follow `context` by the logits of plain sdpa."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        logits = model(torch.tensor([context], device=model.device)).logits[0, -1].float()
    finally:
        model.set_attn_implementation(implementation)
    first, second = (float(value) for value in logits.topk(2).values)
    step = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(first), 1.0)))
    return Agreement(
        equal,
        expected,
        gap=first - second,
        depth=first - float(logits[list(tokens)].min()),
        tolerance=NEAR_TIE_STEPS[model.dtype] * step,
    )
