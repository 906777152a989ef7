"""Arguments of the wrappers: FlashInfer's names, order and defaults, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from tritonattn import cascade, decode, prefill, staging
from tritonattn.backends import UnsupportedError
from tritonattn.cases import AttentionCase, make_inputs

HEADS = (4, 2, 16, 4)
INT32 = {"dtype": torch.int32}

# flashinfer-python 0.6.13: parameters after self; those after `*args` are keyword-only.
DECODE_PLAN = (
    "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
    "pos_encoding_mode='NONE' window_left=-1 logits_soft_cap=None q_data_type='float16' "
    "kv_data_type=None o_data_type=None data_type=None sm_scale=None rope_scale=None "
    "rope_theta=None non_blocking=True block_tables=None seq_lens=None "
    "fixed_split_size=None disable_split_kv=False q_len_per_req=1"
)
DECODE_FORWARD = (
    "q paged_kv_cache pos_encoding_mode='NONE' q_scale=None k_scale=None v_scale=None "
    "window_left=-1 logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None"
)
PREFILL_PLAN = (
    "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
    "num_kv_heads head_dim_qk page_size head_dim_vo=None custom_mask=None "
    "packed_custom_mask=None causal=False pos_encoding_mode='NONE' "
    "use_fp16_qk_reduction=False sm_scale=None window_left=-1 logits_soft_cap=None "
    "rope_scale=None rope_theta=None q_data_type='float16' kv_data_type=None "
    "o_data_type=None non_blocking=True prefix_len_ptr=None token_pos_in_items_ptr=None "
    "token_pos_in_items_len=0 max_item_len_ptr=None seq_lens=None seq_lens_q=None "
    "block_tables=None max_token_per_sequence=None max_sequence_kv=None "
    "fixed_split_size=None disable_split_kv=False"
)
PREFILL_FORWARD = (
    "q paged_kv_cache causal=False pos_encoding_mode='NONE' use_fp16_qk_reduction=False "
    "k_scale=None v_scale=None window_left=-1 logits_soft_cap=None sm_scale=None "
    "rope_scale=None rope_theta=None"
)
SIGNATURES = {
    "decode.BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False use_tensor_cores=False "
        "paged_kv_indptr_buffer=None paged_kv_indices_buffer=None "
        "paged_kv_last_page_len_buffer=None backend='auto' jit_args=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.plan": DECODE_PLAN,
    "decode.BatchDecodeWithPagedKVCacheWrapper.begin_forward": DECODE_PLAN,
    "decode.BatchDecodeWithPagedKVCacheWrapper.run": (
        "q paged_kv_cache *args q_scale=None k_scale=None v_scale=None out=None lse=None "
        "return_lse=False enable_pdl=None window_left=None sinks=None q_len_per_req=None "
        "skip_softmax_threshold_scale_factor=None kv_cache_sf=None"
    ),
    "decode.BatchDecodeWithPagedKVCacheWrapper.forward": DECODE_FORWARD,
    "decode.BatchDecodeWithPagedKVCacheWrapper.forward_return_lse": DECODE_FORWARD,
    "decode.BatchDecodeWithPagedKVCacheWrapper.end_forward": "",
    "decode.BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "float_workspace_buffer int_workspace_buffer"
    ),
    "decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": (
        "workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout='NHD' "
        "use_tensor_cores=False"
    ),
    "decode.fast_decode_plan": (
        "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
        "pos_encoding_mode='NONE' window_left=-1 logits_soft_cap=None q_data_type=None "
        "kv_data_type=None data_type=None sm_scale=None rope_scale=None rope_theta=None "
        "non_blocking=True fixed_split_size=None disable_split_kv=False "
        "global_override_indptr_cpu=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer kv_layout='NHD' use_cuda_graph=False qo_indptr_buf=None "
        "paged_kv_indptr_buf=None paged_kv_indices_buf=None paged_kv_last_page_len_buf=None "
        "custom_mask_buf=None mask_indptr_buf=None backend='auto' jit_args=None "
        "jit_kwargs=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.plan": PREFILL_PLAN,
    "prefill.BatchPrefillWithPagedKVCacheWrapper.begin_forward": PREFILL_PLAN,
    "prefill.BatchPrefillWithPagedKVCacheWrapper.run": (
        "q paged_kv_cache *args q_scale=None k_scale=None v_scale=None out=None lse=None "
        "return_lse=False enable_pdl=None window_left=None sinks=None kv_cache_sf=None "
        "skip_softmax_threshold_scale_factor=None"
    ),
    "prefill.BatchPrefillWithPagedKVCacheWrapper.forward": PREFILL_FORWARD,
    "prefill.BatchPrefillWithPagedKVCacheWrapper.forward_return_lse": PREFILL_FORWARD,
    "prefill.BatchPrefillWithPagedKVCacheWrapper.end_forward": "",
    "prefill.BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "float_workspace_buffer int_workspace_buffer"
    ),
    "cascade.merge_state": "v_a s_a v_b s_b",
    "cascade.merge_state_in_place": "v s v_other s_other mask=None",
    "cascade.merge_states": "v s",
}


def signature(module: Any, path: str) -> str:
    """Return the parameters of a function or method below `module` in the form of the table."""
    target = module
    for name in path.split("."):
        target = getattr(target, name)
    parameters = list(inspect.signature(target).parameters.values())
    if path.count(".") == 1:
        parameters = parameters[1:]
    star = {inspect.Parameter.VAR_POSITIONAL: "*"}
    return " ".join(
        star.get(p.kind, "") + p.name + ("" if p.default is p.empty else f"={p.default!r}")
        for p in parameters
    )


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures_are_flashinfers(path: str) -> None:
    module, rest = path.split(".", 1)
    ours = {"decode": decode, "prefill": prefill, "cascade": cascade}[module]
    assert signature(ours, rest) == SIGNATURES[path]


@pytest.mark.gpu
@pytest.mark.parametrize("path", SIGNATURES)
def test_the_table_is_flashinfers(path: str) -> None:
    """Where FlashInfer is installed: it still has these parameters and defaults, in this order."""
    module, rest = path.split(".", 1)
    theirs = pytest.importorskip(f"flashinfer.{module}", reason="FlashInfer is not installed")
    assert signature(theirs, rest) == SIGNATURES[path]


def workspace() -> torch.Tensor:
    return torch.full((1 << 14,), 0xFF, dtype=torch.uint8)


def table() -> dict[str, torch.Tensor]:
    """Return two requests with two pages and one page of size 4."""
    return {
        "indptr": torch.tensor([0, 2, 3], **INT32),
        "indices": torch.tensor([4, 2, 3], **INT32),
        "last_page_len": torch.tensor([1, 4], **INT32),
    }


def plan(kind: str, given: dict[str, torch.Tensor], **arguments: Any) -> Any:
    """Plan a decode or a prefill wrapper."""
    constructor = {k: arguments.pop(k) for k in ("backend", "jit_args") if k in arguments}
    if kind == "decode":
        wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace(), **constructor)
        wrapper.plan(*given.values(), *HEADS, **arguments)
        return wrapper
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(workspace(), **constructor)
    qo_indptr = arguments.pop("qo_indptr", torch.tensor([0, 3, 4], **INT32))
    wrapper.plan(qo_indptr, *given.values(), *HEADS, **arguments)
    return wrapper


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, "indptr must be int32, got torch.int64", {"indptr": torch.tensor([0, 2, 3])}),
        (TypeError, "indices must be int32, got torch.int64", {"indices": torch.tensor([4, 2, 3])}),
        (TypeError, "last_page_len must be a torch.Tensor, got list", {"last_page_len": [1, 4]}),
        (ValueError, r"indices must have 1 dimension", {"indices": torch.ones(1, 3, **INT32)}),
        (ValueError, "indices must be on the host or on cpu, got meta",
         {"indices": torch.ones(3, device="meta", **INT32)}),
        (ValueError, r"indptr must have batch \+ 1 = 3 entries .* names 2 requests.*, got 1",
         {"indptr": torch.zeros(1, **INT32)}),
        (ValueError, r"indptr must have batch \+ 1 = 3 entries .* got 257",
         {"indptr": torch.zeros(257, **INT32)}),
        (ValueError, r"indptr must not decrease, request 1 spans \[2, 1\)",
         {"indptr": torch.tensor([0, 2, 1], **INT32)}),
        (ValueError, "indptr must not start below 0, got -1",
         {"indptr": torch.tensor([-1, 2, 3], **INT32)}),
        (ValueError, "indptr ends at 4, .*indices has 3 entries",
         {"indptr": torch.tensor([0, 2, 4], **INT32)}),
        (ValueError, "indptr ends at 3, .*indices has 0 entries",
         {"indices": torch.empty(0, **INT32)}),
        (ValueError, "indices must not be negative, got -1",
         {"indices": torch.tensor([4, -1, 3], **INT32)}),
        (ValueError, "last_page_len must be from 0 to page_size = 4, request 1 has 5",
         {"last_page_len": torch.tensor([1, 5], **INT32)}),
        (ValueError, "last_page_len must be from 0 to page_size = 4, request 0 has -1",
         {"last_page_len": torch.tensor([-1, 4], **INT32)}),
    ],
)  # fmt: skip
def test_fi_320_values_on_the_host(
    kind: str, error: type[Exception], match: str, change: dict[str, Any]
) -> None:
    """FI 320 and its kind: what contradicts itself is refused instead of read."""
    plan(kind, table())
    with pytest.raises(error, match=match):
        plan(kind, {**table(), **change})


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"qo_indptr must have batch \+ 1 = 3 entries .* got 2",
         {"qo_indptr": torch.tensor([0, 4], **INT32)}),
        (ValueError, r"qo_indptr must not decrease, request 0 spans \[3, 1\)",
         {"qo_indptr": torch.tensor([3, 1, 4], **INT32)}),
        (TypeError, "qo_indptr must be int32", {"qo_indptr": torch.tensor([0, 3, 4])}),
        (UnsupportedError, "does not support custom_mask yet", {"custom_mask": torch.ones(9) > 0}),
        (UnsupportedError, "does not support custom_mask yet",
         {"packed_custom_mask": torch.ones(9, dtype=torch.uint8)}),
        (UnsupportedError, "multi-item scoring is not supported",
         {"prefix_len_ptr": torch.ones(2)}),
        (UnsupportedError, "multi-item scoring is not supported",
         {"token_pos_in_items_ptr": torch.ones(2), "token_pos_in_items_len": 2}),
        (UnsupportedError, "backend='cudnn' counts qo_indptr in elements", {"backend": "cudnn"}),
        (ValueError, "head_dim of v must be a multiple of 8", {"head_dim_vo": 12}),
    ],
)  # fmt: skip
def test_prefill_refusals(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        plan("prefill", table(), **arguments)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (UnsupportedError, "does not support window_left yet", {"window_left": 7}),
        (UnsupportedError, "does not support logits_soft_cap yet", {"logits_soft_cap": 30.0}),
        (UnsupportedError, "does not support fp8 KV cache yet", {"kv_data_type": "float8_e4m3fn"}),
        (UnsupportedError, "pos_encoding_mode='ROPE_LLAMA' is not",
         {"pos_encoding_mode": "ROPE_LLAMA"}),
        (UnsupportedError, "pos_encoding_mode='ALIBI' is not", {"pos_encoding_mode": "ALIBI"}),
        (ValueError, "pos_encoding_mode must be 'NONE', got 'none'", {"pos_encoding_mode": "none"}),
        (UnsupportedError, "o_data_type must be q's dtype torch.float16, got float32",
         {"o_data_type": "float32"}),
        (UnsupportedError, "jit_args: custom attention variants", {"jit_args": ["mine"]}),
        (ValueError, "backend must be one of .* got 'fa4'", {"backend": "fa4"}),
        (TypeError, "the cache must have q's dtype", {"kv_data_type": torch.bfloat16}),
        (TypeError, "q must be float16, bfloat16 or float32", {"q_data_type": torch.float64}),
    ],
)  # fmt: skip
def test_refusals(kind: str, error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        plan(kind, table(), **arguments)


def test_refused_geometry() -> None:
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace())
    for heads, match in (
        ((3, 2, 16, 4), "positive multiple of num_kv_heads, got 3 and 2"),
        ((4, 2, 12, 4), "head_dim of q must be a multiple of 8 from 16 to 256, got 12"),
        ((4, 2, 16, 0), "page_size must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            wrapper.plan(*table().values(), *heads)
    with pytest.raises(ValueError, match="q_len_per_req must be an int of at least 1, got 0"):
        wrapper.plan(*table().values(), *HEADS, q_len_per_req=0)
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called before run"):
        wrapper.run(torch.ones(2, 4, 16), None)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "window_left must be the planned -1, got 7", {"window_left": 7}),
        (ValueError, "planned q_data_type torch.float16, got torch.float32",
         {"q": torch.ones(2, 4, 16)}),
        (ValueError, r"planned heads and head_dim \(4, 16\), got \(2, 16\)",
         {"q": torch.ones(2, 2, 16).half()}),
        (ValueError, r"q must be a tensor \[rows, .* got \(2, 64\)",
         {"q": torch.ones(2, 64).half()}),
        (ValueError, "same number of rows for each of 2 planned requests, got 3 rows",
         {"q": torch.ones(3, 4, 16).half()}),
        (ValueError, "planned kv_data_type torch.float16, got torch.float32",
         {"paged_kv_cache": torch.ones(5, 2, 4, 2, 16)}),
        (ValueError, "num_kv_heads=2 disagrees",
         {"paged_kv_cache": torch.ones(5, 2, 4, 1, 16).half()}),
        (ValueError, "page_size=4 disagrees",
         {"paged_kv_cache": torch.ones(5, 2, 8, 2, 16).half()}),
        (UnsupportedError, "does not support k_scale", {"k_scale": 0.5}),
        (UnsupportedError, "does not support v_scale", {"v_scale": torch.ones(())}),
        (UnsupportedError, "does not support sinks", {"sinks": torch.ones(4)}),
        (UnsupportedError, "q_scale is not supported yet", {"q_scale": 2.0}),
        (UnsupportedError, "kv_cache_sf is not supported yet", {"kv_cache_sf": torch.ones(1)}),
        (ValueError, r"out must have shape \(2, 4, 16\)", {"out": torch.ones(3, 4, 16).half()}),
    ],
)  # fmt: skip
def test_refused_runs(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    case = AttentionCase((1, 1), (5, 4), 4, 2, 16, page_size=4, dtype=torch.float16)
    inputs = make_inputs(case)
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*inputs.last_page_table(), *HEADS)
    call = {"q": inputs.q[:2], "paged_kv_cache": inputs.kv_cache, **arguments}
    with pytest.raises(error, match=match):
        wrapper.run(**call)
    with pytest.raises(UnsupportedError, match="belong to custom kernels"):
        wrapper.run(inputs.q[:2], inputs.kv_cache, torch.ones(1))
    assert wrapper.run(inputs.q[:2], inputs.kv_cache).isfinite().all()


def test_host_tensors_travel_in_one_block_of_their_own() -> None:
    tensors = [torch.arange(n, **INT32) + 100 * n for n in (5, 0, 64, 65)]
    block = staging.stage(tensors)
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(-1)
    parts = staging.cut(block, tensors)
    for part, right in zip(parts, expected, strict=True):
        assert torch.equal(part, right)
        assert part.storage_offset() % 64 == 0
    host = torch.ones(3, **INT32)
    moved = staging.to_device([host, host.to("meta"), host], torch.device("meta"))
    assert [tensor.device.type for tensor in moved] == ["meta"] * 3
    assert [tensor.numel() for tensor in moved] == [3, 3, 3]
    assert staging.to_device([host], host.device)[0] is host


def test_the_workspace_is_checked() -> None:
    with pytest.raises(TypeError, match=r"float_workspace_buffer must be a torch.Tensor, got int"):
        decode.BatchDecodeWithPagedKVCacheWrapper(64)
    with pytest.raises(ValueError, match="float_workspace_buffer must be contiguous"):
        decode.BatchDecodeWithPagedKVCacheWrapper(torch.ones(8, 8).T)
    with pytest.raises(ValueError, match="kv_layout must be 'NHD' or 'HND', got 'NDH'"):
        decode.BatchDecodeWithPagedKVCacheWrapper(torch.ones(8), "NDH")
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(torch.ones(8))
    with pytest.raises(ValueError, match="float_workspace_buffer must be on cpu, got meta"):
        wrapper.reset_workspace_buffer(torch.ones(8, device="meta"), torch.ones(8))
