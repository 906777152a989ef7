"""What a vLLM installation ships: FlashAttention-3, and its Triton unified attention.

Neither needs the engine: FlashAttention-3 is a library of torch operators, the Triton kernel a
module with few imports.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tritonattn.perf.providers import (
    ATTENTION_KINDS,
    PEER,
    Call,
    Layer,
    Prepared,
    Provider,
    register,
)
from tritonattn.perf.steps import Step

# vLLM's own settings of the split kernel for decode (v1/attention/backends/triton_attn.py).
_MIN_PROGRAMS = 128
_SEGMENTS = 16


@functools.cache
def _load_fa3() -> str | None:
    """Load the library of FlashAttention-3; return why it cannot be, or None."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return "vllm is not installed"
    library = Path(found.origin).parent / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    if not library.exists():
        return f"this vllm has no FlashAttention-3: {library.name} is not there"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"vllm's FlashAttention-3 does not load: {error}"
    return None


def _fa3_refusal(step: Step) -> str | None:
    if step.device.type != "cuda" or torch.cuda.get_device_capability(step.device)[0] != 9:
        return "FlashAttention-3 needs a GPU of compute capability 9"
    if step.dtype == torch.float32:
        return "FlashAttention-3 takes float16 and bfloat16, not float32"
    if step.case.features:
        return f"FlashAttention-3 is not set up for {step.case.features} here"
    return _load_fa3()


def _prepare_fa3(step: Step) -> Prepared:
    # By position, as the operators of vLLM 0.25.1 take them.
    ops: Any = torch.ops._vllm_fa3_C
    causal = step.case.causal
    schedule: list[torch.Tensor] = []
    nothing = (None,)

    def plan() -> None:
        schedule[:] = [
            ops.get_scheduler_metadata(
                step.batch_size, step.max_q_len, step.max_kv_len, step.num_qo_heads,
                step.num_kv_heads, step.head_dim, step.head_dim, step.dtype, step.seq_lens,
                step.qo_indptr, *nothing * 4, step.page_size, 0, causal, -1, -1, False, 0, None, 0,
            )
        ]  # fmt: skip

    def bind(layer: Layer) -> Call:
        k, v = layer.kv_cache.unbind(1)
        if step.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)

        def call() -> torch.Tensor:
            out: torch.Tensor = ops.fwd(
                layer.q, k, v, *nothing * 3, layer.out, step.qo_indptr, *nothing * 3,
                step.seq_lens, step.max_q_len, step.max_kv_len, step.block_table, *nothing * 8,
                step.sm_scale, causal, -1, -1, 0.0, True, schedule[0], 0, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip
            return out

        return call

    return Prepared(bind, plan)


@functools.cache
def _unified_attention() -> tuple[Any, str]:
    """Return vLLM's kernel launcher and "", or None and why it cannot be had."""
    if importlib.util.find_spec("vllm") is None:
        return None, "vllm is not installed"
    name = "vllm.v1.attention.ops.triton_unified_attention"
    try:
        return importlib.import_module(name).unified_attention, ""
    except Exception as error:  # another version of vllm, torch or Triton fails in many ways
        return None, f"{name} cannot be imported: {type(error).__name__}: {error}"


def _triton_refusal(step: Step) -> str | None:
    if step.device.type != "cuda":
        return "vllm's Triton kernel needs CUDA tensors"
    return _unified_attention()[1] or None


def _prepare_triton(step: Step) -> Prepared:
    run, _ = _unified_attention()
    threshold = _MIN_PROGRAMS // step.num_kv_heads
    shape = (threshold, step.num_qo_heads, _SEGMENTS)
    dim = 1 << (step.head_dim - 1).bit_length()
    empty = partial(torch.empty, dtype=torch.float32, device=step.device)
    segments = {
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": empty((*shape, dim)),
        "softmax_segm_max": empty(shape),
        "softmax_segm_expsum": empty(shape),
    }
    case = step.case

    def bind(layer: Layer) -> Call:
        k, v = layer.kv_cache.unbind(1)
        if step.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        call = partial(
            run,
            layer.q,
            k,
            v,
            layer.out,
            step.qo_indptr,
            step.max_q_len,
            step.seq_lens,
            step.max_kv_len,
            step.sm_scale,
            case.causal,
            (case.window_left, 0 if case.window_left >= 0 else -1),
            step.block_table,
            case.logits_soft_cap,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            **segments,
        )

        def call_and_return() -> torch.Tensor:
            call()
            return layer.out

        return call_and_return

    return Prepared(bind)


register(Provider("fa3", PEER, ATTENTION_KINDS, _prepare_fa3, _fa3_refusal))
register(Provider("vllm-triton", PEER, ATTENTION_KINDS, _prepare_triton, _triton_refusal))
