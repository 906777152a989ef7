"""Hugging Face transformers: `attn_implementation="paged|tritonattn"` for continuous batching.

    from tritonattn.engines import transformers as engine
    engine.register()
    model.set_attn_implementation("paged|tritonattn")

Thin on purpose: it views the engine's cache as pages, makes one plan a step and calls
`reshape_and_cache` and `paged_attention`. Metadata stays on the device and sizes depend on shapes
only, so that a padded batch can be captured in a CUDA graph. What the engine hands over comes in
three forms:

    slots       `read_index` has those of all keys: mixed, chunked and decode steps
    new slots   `read_index` is empty, `write_index` has all keys: fresh prefills only
    a table     `block_table` is given, both indices are stale: one token a request, decode
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonattn.attention import paged_attention, plan_attention
from tritonattn.backends import UnsupportedError
from tritonattn.block_ops import reshape_and_cache
from tritonattn.implementations import implementation
from tritonattn.plan import AttentionPlan

IMPLEMENTATION = "paged|tritonattn"

# What the engine passes to an attention function is not a stable interface.
_RELEASE = "5.17"

# The steps of a cache, one per layer group, are kept on the cache object: they live and die with
# it.
_STEPS = "_tritonattn_steps"
# Arguments that change the result and have no counterpart here yet; None and False ask for nothing.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "attention_mask")


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers of a group share in one forward pass."""

    sources: tuple[
        Tensor, ...
    ]  # the engine's tensors that it was made from, held: identity is exact
    slot_mapping: Tensor  # [total_q] int64, device; -1 writes nothing
    plan: AttentionPlan


def register() -> None:
    """Make `"paged|tritonattn"` known to transformers; doing it twice is harmless.

    Raises
    ------
    ImportError
        Without transformers, or with a release whose engine was not tried:
        `pip install 'tritonattn[engines]'`.
    """
    try:
        from transformers import AttentionInterface, __version__
    except ImportError as error:
        raise ImportError(
            f"{IMPLEMENTATION!r} needs transformers {_RELEASE}: pip install 'tritonattn[engines]'"
        ) from error
    if not __version__.startswith(f"{_RELEASE}."):
        raise ImportError(
            f"{IMPLEMENTATION!r} knows the engine of transformers {_RELEASE}, got {__version__}: "
            "pip install 'tritonattn[engines]'"
        )
    AttentionInterface.register(IMPLEMENTATION, attention)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    **step_kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values of a layer to the cache, then attend; called by transformers.

    Parameters
    ----------
    module : Module
        The attention layer; `layer_idx` names its part of the cache.
    query : Tensor, shape [1, num_qo_heads, total_q, head_dim]
        Tokens of all requests, side by side; rows past `cu_seq_lens_q[-1]` are padding.
    key, value : Tensor, shape [1, num_kv_heads, total_q, head_dim]
        The new tokens only.
    attention_mask : None
        The engine makes none for this implementation.
    scaling : float, optional
    dropout : float
        Must be 0.
    cache : PagedAttentionCache
    **step_kwargs
        The engine's metadata of the step, and whatever else the model passes.

    Returns
    -------
    out : Tensor, shape [1, total_q, num_qo_heads, head_dim]
    weights : None
    """
    if cache is None:
        raise ValueError(
            f"{IMPLEMENTATION!r} works only in continuous batching, which passes a paged cache: "
            "use model.generate_batch(...), or set_attn_implementation('sdpa') for an ordinary "
            "forward"
        )
    _check_supported({**step_kwargs, "attention_mask": attention_mask}, dropout, cache)
    group, index = cache.layer_index_to_group_indices[module.layer_idx]
    pages = _pages(cache, index)
    q = query[0].transpose(0, 1)
    step = _step(cache, group, index, q, pages, step_kwargs)
    reshape_and_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), pages, step.slot_mapping)
    out = paged_attention(q, pages, plan=step.plan, sm_scale=scaling)
    assert isinstance(out, Tensor)
    return out[None], None


def _check_supported(kwargs: dict[str, Any], dropout: float, cache: Any) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise UnsupportedError(
                f"{IMPLEMENTATION!r} does not support {name} yet: use 'paged|sdpa'"
            )
    if dropout:
        raise UnsupportedError(
            f"{IMPLEMENTATION!r} has no dropout, got {dropout}: call model.eval()"
        )
    if cache.num_sliding_attention_groups:
        raise UnsupportedError(
            f"{IMPLEMENTATION!r} does not support layers with a sliding window yet, the model has "
            f"{cache.num_sliding_attention_groups} group(s) of them: use 'paged|sdpa'"
        )


def _pages(cache: Any, index: int) -> tuple[Tensor, Tensor]:
    """View a layer's cache as an NHD `(k, v)` tuple; nothing is copied."""
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    return cache.key_cache[index].view(shape), cache.value_cache[index].view(shape)


def _step(
    cache: Any,
    group: int,
    index: int,
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
) -> _Step:
    """Return what the group's layers share, made anew for each forward pass.

    A group's first layer always makes it: the engine reuses its buffers, so the same addresses
    say nothing of their contents. A later layer takes it only if it came from the very same
    tensor objects, in case a forward leaves the first layer out.
    """
    steps: dict[int, _Step] = cache.__dict__.setdefault(_STEPS, {})
    sources = _sources(group, kwargs)
    made = steps.get(group) if index else None
    if made is None or not _identical(made.sources, sources):
        made = _make_step(cache, group, q, pages, sources, kwargs)
        steps[group] = made
    return made


def _sources(group: int, kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    lengths = (kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    block_table = kwargs.get("block_table")
    if block_table is not None:
        return (*lengths, block_table)
    return (*lengths, kwargs["read_index"][group], kwargs["write_index"][group])


def _identical(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _make_step(
    cache: Any,
    group: int,
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    sources: tuple[Tensor, ...],
    kwargs: dict[str, Any],
) -> _Step:
    """Launch the work of a step: page table, lengths, write slots and the attention plan."""
    cu_q, cu_k = sources[:2]
    page_size = cache.block_size
    ops = implementation("page_table", q.device)
    seq_lens = torch.empty(cu_k.numel() - 1, dtype=torch.int32, device=q.device)
    if kwargs.get("block_table") is not None:
        page_table = sources[2][group]
        slot_mapping = torch.empty(q.size(0), dtype=torch.int64, device=q.device)
        ops.last_slots(page_table, cu_k, seq_lens, slot_mapping, page_size=page_size)
    else:
        read, slot_mapping = sources[2:]
        slots = read if read.numel() else slot_mapping
        width = max(1, -(-kwargs["max_seqlen_k"] // page_size))
        page_table = torch.empty(seq_lens.numel(), width, dtype=torch.int32, device=q.device)
        ops.slots_to_pages(slots, cu_k, page_table, seq_lens, page_size=page_size)
    plan = plan_attention(
        q,
        pages,
        qo_indptr=cu_q,
        seq_lens=seq_lens,
        block_table=page_table,
        max_q_len=kwargs["max_seqlen_q"],
    )
    return _Step(sources, slot_mapping, plan)
