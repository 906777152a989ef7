"""The functional API: `paged_attention`, `plan_attention`, `explain`.

One call serves decode, prefill and mixed batches. Metadata stays on the device: nothing here reads
it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from tritonattn import checks, dispatch
from tritonattn.backends import AttentionCall, get_backend
from tritonattn.layout import KVCacheLike, PagedKVCache
from tritonattn.plan import AttentionPlan
from tritonattn.spec import AttentionSpec, check_dtypes, requested_features
from tritonattn.stage import StageBuffers, check_stage
from tritonattn.staging import values_are_checked


def plan_attention(
    q: Tensor | None = None,
    kv_cache: KVCacheLike | None = None,
    *,
    qo_indptr: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    causal: bool = True,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    buffers: StageBuffers | None = None,
    backend: str = "auto",
) -> AttentionPlan:
    """Plan a step once, on the device, for all its layers.

    Takes the metadata arguments of `paged_attention` (see there). With `q` and `kv_cache` (any
    layer's: only their geometry matters) the work is launched at once, otherwise with the first
    layer. Inside a CUDA graph call this within the capture, so that a replay plans anew from the
    lengths that stand there then.

    Returns
    -------
    AttentionPlan
        To be passed as `plan=` to every `paged_attention` call of the step.

    Raises
    ------
    ValueError, TypeError
        As `paged_attention`.
    """
    dispatch.check_backend_name(backend)
    cache = None if kv_cache is None else PagedKVCache.of(kv_cache, kv_layout)
    if cache is not None:
        checks.check_stated(cache, num_kv_heads, page_size)
        page_size = cache.page_size
    if page_size is None:
        raise ValueError("plan_attention needs page_size or kv_cache")
    check_stage(buffers)
    table = checks.make_page_table(seq_lens, block_table, indptr, indices, page_size)
    checks.check_qo_indptr(qo_indptr, table)
    plan = AttentionPlan(
        qo_indptr,
        table,
        causal=causal,
        max_q_len=checks.as_bound("max_q_len", max_q_len),
        max_kv_len=checks.as_bound("max_kv_len", max_kv_len),
        backend=backend,
        stage=buffers,
    )
    if q is not None and cache is not None:
        checks.check_q(q)
        spec = _describe(q, cache, plan, ())
        if values_are_checked(q.device):
            checks.check_values(spec, qo_indptr, table, cache)
        plan.state(spec, dispatch.choose(spec, backend))
    return plan


def paged_attention(
    q: Tensor,
    kv_cache: KVCacheLike | None,
    *,
    qo_indptr: Tensor | None = None,
    seq_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    lse_base: Literal["log2", "e"] = "log2",
    buffers: StageBuffers | None = None,
    plan: AttentionPlan | None = None,
    backend: str = "auto",
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend varlen queries over a paged KV cache; no host sync, capturable in a CUDA graph.

    Query i of a request stands at position `kv_len - q_len + i`; `causal` keeps keys up to that
    position. A row that sees no key gives 0 and LSE -inf. Nothing beyond a request's keys is read.

    Parameters
    ----------
    q : Tensor, shape [total_q, num_qo_heads, head_dim_qk], float16, bfloat16 or float32
        Queries of all requests; last stride 1. Head dims: multiples of 8 from 16 to 256.
    kv_cache : Tensor, (Tensor, Tensor) or None
        Combined `[num_pages, 2, page_size, num_kv_heads, head_dim]` (NHD) or `[num_pages, 2,
        num_kv_heads, page_size, head_dim]` (HND), or a `(k, v)` tuple without the 2; any strides,
        last stride 1. None is an engine's profiling run: out 0, LSE -inf, nothing is read.
    qo_indptr : Tensor, shape [batch + 1], int32
        First row of each request in q. Rows past `qo_indptr[-1]` are padding.
    seq_lens : Tensor, shape [batch], int32
        Keys of each request, in tokens, the new ones included (already in the cache).
    block_table : Tensor, shape [batch, width], int32
        Page ids, one row a request. Entries past a request's pages are never read.
    indptr, indices : Tensor, shape [batch + 1] and [num_entries], int32
        The same as a CSR table. Exactly one of the two forms.
    num_kv_heads, page_size : int, optional
        If given, must agree with the cache.
    kv_layout : {"NHD", "HND"}
    causal : bool
    sm_scale : float, optional
        Factor of the logits, `head_dim_qk ** -0.5` by default.
    max_q_len, max_kv_len : int, optional
        Upper bounds in tokens, `total_q` and the table's capacity by default. A query longer than
        `max_q_len` may be left unwritten (refused under `TRITONATTN_VALIDATE=1`). `max_kv_len=0`
        says that a table without columns is meant.
    out : Tensor, shape [total_q, num_qo_heads, head_dim_vo], optional
        Written in place; rows outside the batch stay untouched. A new one has 0 there.
    lse : Tensor, shape [total_q, num_qo_heads], float32, optional
        Likewise; a new one has -inf there.
    return_lse : bool
    lse_base : {"log2", "e"}
        Unit of the log-sum-exp of the scaled logits.
    plan : AttentionPlan, optional
        From `plan_attention` of the same step; the metadata arguments may then be left out.
    backend : {"auto", "triton", "flashinfer", "reference"}
        An explicit choice never falls back: it works or raises with the reason.
    window_left, logits_soft_cap, alibi_slopes, sinks, custom_mask, k_scale, v_scale
        Refused by every backend for now, unless neutral.
    batch_invariant : bool
        Likewise.
    buffers : StageBuffers, optional
        `PipelineBuffers.stage(i)`: the work lists and partial states lie there, at addresses that
        stay. Without it they are allocated.

    Returns
    -------
    out : Tensor
    lse : Tensor
        Only with `return_lse`.

    Raises
    ------
    ValueError, TypeError
        For bad input, before any launch, naming the argument, the value seen and what is allowed.
        `UnsupportedError`, a ValueError, if the backend lacks what the call asks for.
    """
    if lse_base not in ("log2", "e"):
        raise ValueError(f"lse_base must be 'log2' or 'e', got {lse_base!r}")
    dispatch.check_backend_name(backend)
    checks.check_q(q)
    if kv_cache is None:
        return _profile_run(q, out, lse, return_lse)
    sm_scale = checks.as_scale("sm_scale", sm_scale, q.size(2) ** -0.5)
    cache, plan, spec = _describe_call(
        q,
        kv_cache,
        qo_indptr=qo_indptr,
        seq_lens=seq_lens,
        block_table=block_table,
        indptr=indptr,
        indices=indices,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        kv_layout=kv_layout,
        causal=causal,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        plan=plan,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        custom_mask=custom_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        buffers=buffers,
        batch_invariant=batch_invariant,
    )
    asked = plan.backend if backend == "auto" else backend
    name = dispatch.choose(spec, asked, plan.planned_by(spec))
    out, lse = checks.make_results(q, spec.head_dim_vo, out, lse, return_lse)
    if values_are_checked(q.device):
        checks.check_values(spec, plan.qo_indptr, plan.table, cache)
    if spec.total_q and spec.batch_size:
        call = AttentionCall(
            spec=spec,
            q=q,
            cache=cache,
            table=plan.table,
            qo_indptr=plan.qo_indptr,
            out=out,
            lse=lse,
            sm_scale=sm_scale,
            lse_base=lse_base,
        )
        get_backend(name).run(call, plan.state(spec, name))
    return _returned(out, lse, return_lse)


def explain(
    q: Tensor, kv_cache: KVCacheLike | None, *, backend: str = "auto", **arguments: Any
) -> dispatch.Explanation:
    """Say which backend `paged_attention` would use for these arguments, and why; launch nothing.

    Parameters
    ----------
    q, kv_cache, backend, **arguments
        As `paged_attention`.

    Returns
    -------
    Explanation
        The choice, its reason, and every backend's verdict; prints well.
    """
    dispatch.check_backend_name(backend)
    unknown = set(arguments) - set(paged_attention.__kwdefaults__ or ())
    if unknown:
        raise TypeError(f"paged_attention has no argument {', '.join(sorted(unknown))}")
    checks.check_q(q)
    if kv_cache is None:
        reason = "kv_cache=None is a profiling run: zeros, and no backend runs"
        return dispatch.Explanation(None, reason, {})
    for name in ("sm_scale", "out", "lse", "return_lse", "lse_base"):
        arguments.pop(name, None)
    _, plan, spec = _describe_call(q, kv_cache, **arguments)
    return dispatch.explain_spec(spec, plan.backend if backend == "auto" else backend)


def _describe_call(
    q: Tensor,
    kv_cache: KVCacheLike,
    *,
    qo_indptr: Tensor | None = None,
    seq_lens: Tensor | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    causal: bool = True,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    block_table: Tensor | None = None,
    indptr: Tensor | None = None,
    indices: Tensor | None = None,
    plan: AttentionPlan | None = None,
    buffers: StageBuffers | None = None,
    **features: Any,
) -> tuple[PagedKVCache, AttentionPlan, AttentionSpec]:
    """Check a call and describe it, with a plan that has not been made yet unless one is given."""
    cache = PagedKVCache.of(kv_cache, kv_layout)
    checks.check_stated(cache, num_kv_heads, page_size)
    if plan is not None:
        if not isinstance(plan, AttentionPlan):
            raise TypeError(f"plan must be from plan_attention, got {type(plan).__name__}")
        plan.check_same_step(
            causal=causal,
            qo_indptr=qo_indptr,
            seq_lens=seq_lens,
            block_table=block_table,
            indptr=indptr,
            indices=indices,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            stage=buffers,
        )
    elif qo_indptr is None or seq_lens is None:
        raise TypeError("paged_attention needs qo_indptr and seq_lens, or a plan")
    else:
        plan = plan_attention(
            qo_indptr=qo_indptr,
            seq_lens=seq_lens,
            block_table=block_table,
            indptr=indptr,
            indices=indices,
            page_size=cache.page_size,
            causal=causal,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            buffers=buffers,
        )
    requested = requested_features(kv_dtype=cache.dtype, **features)
    return cache, plan, _describe(q, cache, plan, requested)


def _describe(
    q: Tensor, cache: PagedKVCache, plan: AttentionPlan, features: tuple[str, ...]
) -> AttentionSpec:
    """Check that the parts of a call fit together and describe it."""
    checks.check_geometry(q, cache, plan.table)
    checks.check_has_pages(plan.table, q.size(0), plan.max_kv_len)
    spec = plan.spec(q, cache, features)
    if plan.stage is not None:
        plan.stage.check(spec)
    return spec


def _profile_run(
    q: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Answer an engine's memory-profiling run, which has no cache: zeros, and nothing is read."""
    check_dtypes(q.dtype, q.dtype)
    head_dim_vo = out.size(-1) if isinstance(out, Tensor) and out.dim() else q.size(2)
    out, lse = checks.make_results(q, head_dim_vo, out, lse, return_lse)
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    return _returned(out, lse, return_lse)


def _returned(out: Tensor, lse: Tensor | None, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    if not return_lse:
        return out
    assert lse is not None
    return out, lse
