"""FlashInfer's plan/run classes on CPU tensors (the interpreter), against the fp64 reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn.backends import triton as triton_backend
from tritonattn.cases import STORAGES, AttentionCase, AttentionInputs, make_inputs
from tritonattn.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from tritonattn.kernels import plan as plan_op
from tritonattn.prefill import BatchPrefillWithPagedKVCacheWrapper

SENTINEL = 7.0


@dataclasses.dataclass(frozen=True)
class Call:
    """A case as the wrappers take it, and its right results."""

    case: AttentionCase
    inputs: AttentionInputs
    q: torch.Tensor  # without padding rows
    qo_indptr: torch.Tensor
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indptr, indices, last_page_len
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Return what every plan() states: heads, head_dim, page_size."""
        case = self.case
        return case.num_qo_heads, case.num_kv_heads, case.head_dim, case.page_size


def make_call(q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **fields: Any) -> Call:
    """Draw inputs; the table is a slice of a larger one, requests without keys have no page."""
    case = AttentionCase(q_lens, kv_lens, 4, 2, **{"head_dim": 16, "page_size": 4, **fields})
    inputs = make_inputs(case)
    indptr, indices, last_page_len = inputs.last_page_table()
    elsewhere = torch.full((3,), -7, dtype=torch.int32)
    table = (
        indptr + 3,
        torch.cat((elsewhere, indices)),
        last_page_len.where(last_page_len > 0, 99),
    )
    total_q = int(inputs.qo_indptr[-1])
    out, lse = tritonattn.paged_attention(
        **{**inputs.arguments(), "q": inputs.q[:total_q]}, backend="reference", return_lse=True
    )
    return Call(case, inputs, inputs.q[:total_q], inputs.qo_indptr, table, out, lse)


def workspace(num_bytes: int = 1 << 16) -> torch.Tensor:
    """Return a workspace whose every word is NaN, whatever it is taken for."""
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def assert_results(call: Call, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Assert the results of a call; rows past it are padding and must be 0 and -inf."""
    end = call.q.size(0)
    atol = 2 * torch.finfo(call.q.dtype).eps * max(call.out.abs().max().item(), 1e-3) + 1e-5
    torch.testing.assert_close(out[:end], call.out, rtol=0, atol=atol)
    assert (out[end:] == 0).all()
    if lse is not None:
        torch.testing.assert_close(lse[:end], call.lse, rtol=1e-5, atol=1e-4)
        assert (lse[end:] == -math.inf).all()


def plan_decode(wrapper: Any, call: Call, **arguments: Any) -> Any:
    wrapper.plan(*call.table, *call.heads, **{"q_data_type": call.q.dtype, **arguments})
    return wrapper


def plan_prefill(wrapper: Any, call: Call, **arguments: Any) -> Any:
    given = {"q_data_type": call.q.dtype, "causal": call.case.causal, **arguments}
    wrapper.plan(call.qo_indptr, *call.table, *call.heads, **given)
    return wrapper


@pytest.fixture
def decode() -> Call:
    return make_call((1,) * 4, (5, 0, 17, 4))


@pytest.fixture
def prefill() -> Call:
    return make_call((12, 1, 0, 3), (20, 9, 0, 2))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count launches of the device planner, by batch size."""
    launches: list[int] = []
    launch = plan_op.plan

    def counted(spec: Any, *arguments: Any) -> None:
        launches.append(spec.batch_size)
        launch(spec, *arguments)

    monkeypatch.setattr(plan_op, "plan", counted)
    return launches


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut requests into chunks, as a GPU would, so that partial states go through the workspace."""
    monkeypatch.setattr("tritonattn.kernels.plan.split_programs", lambda spec: 16)
    monkeypatch.setattr("tritonattn.kernels._config.DECODE_CTAS_PER_SM", 16)


GEOMETRY = [
    {"page_size": 1},
    {"page_size": 5, "kv_layout": "HND", "dtype": torch.float16},
    {"page_size": 16, "dtype": torch.float32},
    *({"storage": storage} for storage in STORAGES),
]


@pytest.mark.parametrize("fields", GEOMETRY, ids=str)
def test_decode(fields: dict[str, Any]) -> None:
    call = make_call((1,) * 4, (5, 0, 37, 4), **fields)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), call.case.kv_layout)
    plan_decode(wrapper, call)
    assert_results(call, *wrapper.run(call.q, call.inputs.kv_cache, return_lse=True))
    assert_results(call, *wrapper.run_return_lse(call.q, call.inputs.kv_cache))
    assert_results(call, wrapper.run(call.q, call.inputs.kv_cache))


@pytest.mark.parametrize("fields", [*GEOMETRY, {"causal": False}], ids=str)
def test_prefill(fields: dict[str, Any]) -> None:
    call = make_call((12, 1, 0, 3, 2), (20, 9, 0, 2, 0), **fields)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), call.case.kv_layout)
    plan_prefill(wrapper, call)
    assert_results(call, *wrapper.run(call.q, call.inputs.kv_cache, return_lse=True))
    assert_results(call, *wrapper.run_return_lse(call.q, call.inputs.kv_cache))


def test_different_value_dim() -> None:
    call = make_call((9, 1), (20, 9), head_dim_vo=32, storage="tuple")
    wrapper = plan_prefill(BatchPrefillWithPagedKVCacheWrapper(workspace()), call, head_dim_vo=32)
    assert_results(call, wrapper.run(call.q, call.inputs.kv_cache))
    assert wrapper.run(call.q, None).shape == (10, 4, 32)


@pytest.mark.parametrize("q_len", [2, 5])
def test_decode_of_several_tokens_is_causal_among_them(q_len: int) -> None:
    call = make_call((q_len,) * 4, (5, 0, 17, q_len))
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan_decode(wrapper, call, q_len_per_req=q_len)
    assert_results(call, *wrapper.run(call.q, call.inputs.kv_cache, return_lse=True))
    # As in FlashInfer, q's rows may say otherwise than plan() did.
    plan_decode(wrapper, call)
    assert_results(call, wrapper.run(call.q, call.inputs.kv_cache))
    with pytest.warns(DeprecationWarning, match="give it to plan"):
        assert_results(call, wrapper.run(call.q, call.inputs.kv_cache, q_len_per_req=q_len))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches_without_the_page_dimension(kv_layout: Any) -> None:
    call = make_call((1, 1), (5, 3), page_size=1, kv_layout=kv_layout)
    k, v = call.inputs.kv_cache.unbind(1)
    page_dim = 1 if kv_layout == "NHD" else 2
    small = call.inputs.kv_cache.squeeze(page_dim + 1), (k.squeeze(page_dim), v.squeeze(page_dim))
    wrapper = plan_decode(BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout), call)
    for cache in small:
        assert_results(call, wrapper.run(call.q, cache))
    call = make_call((1, 1), (5, 3), kv_layout=kv_layout)
    plan_decode(wrapper, call)
    with pytest.raises(ValueError, match="page_size=4 disagrees with the cache, which has 1"):
        wrapper.run(call.q, small[0])


def test_given_outputs_and_padding_rows(prefill: Call) -> None:
    wrapper = plan_prefill(BatchPrefillWithPagedKVCacheWrapper(workspace()), prefill)
    q = prefill.inputs.q  # two rows more
    assert_results(prefill, *wrapper.run(q, prefill.inputs.kv_cache, return_lse=True))
    out, lse = torch.full_like(q, SENTINEL), torch.full(q.shape[:2], SENTINEL)
    got = wrapper.run(q, prefill.inputs.kv_cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert (out[-2:] == SENTINEL).all()
    assert (lse[-2:] == SENTINEL).all()
    assert_results(prefill, out[:-2], lse[:-2])


def test_one_plan_for_all_layers(decode: Call, prefill: Call, planner: list[int]) -> None:
    """plan() launches the device planner, and no run() does again."""
    one = plan_decode(BatchDecodeWithPagedKVCacheWrapper(workspace()), decode)
    two = plan_prefill(BatchPrefillWithPagedKVCacheWrapper(workspace()), prefill)
    assert planner == [4, 4]
    for _ in range(2):
        assert_results(decode, *one.run(decode.q, decode.inputs.kv_cache, return_lse=True))
        assert_results(prefill, two.run(prefill.q, prefill.inputs.kv_cache))
    assert planner == [4, 4]
    for _ in range(2):
        assert_results(prefill, two.run(prefill.inputs.q, prefill.inputs.kv_cache))
    assert planner == [4, 4, 4]


def test_dtypes_by_name() -> None:
    call = make_call((1, 1), (5, 3), dtype=torch.float16)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    for arguments in (
        {},
        {"q_data_type": "float16", "kv_data_type": "float16", "o_data_type": "half"},
        {"q_data_type": None, "data_type": torch.float16},
    ):
        wrapper.plan(*call.table, *call.heads, **arguments)
        assert_results(call, wrapper.run(call.q, call.inputs.kv_cache))
    with pytest.raises(TypeError, match=r"q_data_type must be .* or its name, got 'fp16'"):
        wrapper.plan(*call.table, *call.heads, q_data_type="fp16")
    with pytest.raises(TypeError, match=r"q_data_type must be .* or its name, got None"):
        wrapper.plan(*call.table, *call.heads, q_data_type=None)


def test_scale_and_hints(decode: Call) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", False, True, backend="fa2")
    assert wrapper.use_tensor_cores
    assert not wrapper.is_cuda_graph_enabled
    hints = {
        "fixed_split_size": 4,
        "disable_split_kv": True,
        "non_blocking": False,
        "rope_theta": 2.0,
    }
    plan_decode(wrapper, decode, sm_scale=0.5, **hints)
    call = {**decode.inputs.arguments(), "q": decode.q, "sm_scale": 0.5}
    expected = tritonattn.paged_attention(**call)
    neutral = {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1, "window_left": -1, "enable_pdl": True}
    run = {**neutral, "skip_softmax_threshold_scale_factor": 3.0}
    assert torch.equal(wrapper.run(decode.q, decode.inputs.kv_cache, **run), expected)
    # `forward` replaces what was planned, sm_scale included.
    assert_results(decode, wrapper.forward(decode.q, decode.inputs.kv_cache))
    assert_results(decode, *wrapper.forward_return_lse(decode.q, decode.inputs.kv_cache))
    wrapper.end_forward()


def test_prefill_forward_has_its_own_mask(prefill: Call) -> None:
    wrapper = plan_prefill(BatchPrefillWithPagedKVCacheWrapper(workspace()), prefill, causal=False)
    cache = prefill.inputs.kv_cache
    assert_results(prefill, wrapper.forward(prefill.q, cache, causal=True))
    assert_results(prefill, *wrapper.forward_return_lse(prefill.q, cache, causal=True))
    full = tritonattn.paged_attention(**{**prefill.inputs.arguments(), "causal": False})
    torch.testing.assert_close(wrapper.forward(prefill.q, cache), full[:-2], rtol=0, atol=2e-2)


def test_profiling_run_without_a_cache(decode: Call) -> None:
    wrapper = plan_decode(BatchDecodeWithPagedKVCacheWrapper(workspace()), decode)
    out, lse = wrapper.run(decode.q, None, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("batch", [0, 3])
def test_steps_without_keys(batch: int) -> None:
    """All-zero indptr on the host: no key for any request, also with indices of no entries."""
    q = torch.ones(batch, 4, 16, dtype=torch.float16)
    cache = torch.full((2, 2, 4, 2, 16), math.nan, dtype=torch.float16)
    ends, ones = torch.zeros(batch + 1, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    for entries in (0, 5):
        table = (ends, torch.zeros(entries, dtype=torch.int32), ones)
        one = BatchDecodeWithPagedKVCacheWrapper(workspace())
        one.plan(*table, 4, 2, 16, 4)
        two = BatchPrefillWithPagedKVCacheWrapper(workspace())
        two.plan(torch.arange(batch + 1, dtype=torch.int32), *table, 4, 2, 16, 4)
        for wrapper in (one, two):
            out, lse = wrapper.run(q, cache, return_lse=True)
            assert (out == 0).all()
            assert (lse == -math.inf).all()


@pytest.mark.usefixtures("split")
def test_fi_4002_a_larger_plan_before_a_smaller_one() -> None:
    """FI 4002, 600: neither an earlier plan nor the workspace's contents show in the results."""
    large = make_call((3,) * 6, (90, 5, 64, 0, 33, 70))
    small = make_call((1, 1), (40, 3))
    scratch = workspace()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch)
    for call in (large, small, large):
        plan_prefill(wrapper, call)
        assert_results(call, *wrapper.run(call.q, call.inputs.kv_cache, return_lse=True))
        assert (scratch != 0xFF).any()
    scratch.fill_(0xFF)
    assert_results(large, *wrapper.run(large.q, large.inputs.kv_cache, return_lse=True))


@pytest.mark.usefixtures("split")
def test_wrappers_share_a_workspace() -> None:
    """As engines do: plan prefill, plan decode, then alternate the layers of both."""
    one, two = make_call((1,) * 4, (90, 0, 17, 4)), make_call((12, 1, 3), (20, 60, 70))
    scratch = workspace()
    decode = plan_decode(BatchDecodeWithPagedKVCacheWrapper(scratch), one)
    prefill = plan_prefill(BatchPrefillWithPagedKVCacheWrapper(scratch), two)
    for _ in range(2):
        assert_results(one, *decode.run(one.q, one.inputs.kv_cache, return_lse=True))
        assert_results(two, *prefill.run(two.q, two.inputs.kv_cache, return_lse=True))


@pytest.mark.usefixtures("split")
def test_workspace_of_any_dtype_and_its_replacement(decode: Call) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.full((1 << 14,), math.nan)[1:])
    plan_decode(wrapper, decode)
    assert_results(decode, wrapper.run(decode.q, decode.inputs.kv_cache))
    wrapper.reset_workspace_buffer(workspace(), torch.empty(0))
    assert_results(decode, wrapper.run(decode.q, decode.inputs.kv_cache))


@pytest.mark.usefixtures("split")
def test_vllm_40023_a_workspace_that_is_too_small(decode: Call) -> None:
    """vLLM 40023, 40381: refused by plan(), with both sizes."""
    needed = triton_backend.BACKEND.workspace_bytes(
        tritonattn.plan_attention(
            decode.q, decode.inputs.kv_cache, max_q_len=1, **decode.inputs.metadata()
        ).spec(decode.q, tritonattn.layout.PagedKVCache.of(decode.inputs.kv_cache), ())
    ).call
    assert needed > 0
    too_small = torch.empty(needed + 255, dtype=torch.uint8)
    too_small = too_small[-too_small.data_ptr() % 256 :][: needed - 1]
    with pytest.raises(ValueError, match=f"at least {needed} bytes .* got {needed - 1}"):
        plan_decode(BatchDecodeWithPagedKVCacheWrapper(too_small), decode)
    buffers = [torch.full((n,), 9, dtype=torch.int32) for n in (5, 64, 4)]
    wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(too_small, *buffers)
    with pytest.raises(ValueError, match=f"at least {needed} bytes"):
        plan_decode(wrapper, decode)
    assert all((buffer == 9).all() for buffer in buffers)


def test_other_backends(decode: Call) -> None:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), backend="reference")
    plan_decode(wrapper, decode)
    assert torch.equal(wrapper.run(decode.q, decode.inputs.kv_cache), decode.out)
    refused = BatchDecodeWithPagedKVCacheWrapper(workspace(), backend="flashinfer")
    with pytest.raises(tritonattn.backends.UnsupportedError, match="flashinfer backend needs CUDA"):
        plan_decode(refused, decode)
    assert fast_decode_plan.__module__ == "tritonattn.decode"
