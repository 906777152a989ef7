"""`paged_attention` in Triton's interpreter against the fp64 reference: layouts, lengths, shapes.

Tolerance: the interpreter computes dots in fp32, so what remains is fp32 rounding and one rounding
to the output's dtype. Both are bounded from the data, not tuned.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tritonattn
from tritonattn.cases import STORAGES, AttentionCase, make_inputs
from tritonattn.kernels import _config

SENTINEL = 7.0


def check(inputs: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run both backends into sentinel-filled outputs; assert agreement, untouched padding."""
    call = {**inputs.arguments(), **arguments}
    q, v = call["q"], call["kv_cache"]
    v = v[1] if isinstance(v, tuple) else v
    results = []
    for backend in ("triton", "reference"):
        out = torch.full((*q.shape[:2], v.shape[-1]), SENTINEL, dtype=q.dtype)
        lse = torch.full(q.shape[:2], SENTINEL)
        tritonattn.paged_attention(**call, out=out, lse=lse, backend=backend)
        results.append((out, lse))
    (out, lse), (expected, expected_lse) = results
    end = int(call["qo_indptr"][-1])
    assert (out[end:] == SENTINEL).all()
    assert (lse[end:] == SENTINEL).all()
    eps = torch.finfo(q.dtype).eps
    scale = expected[:end].double().abs().max().item() if end else 0.0
    torch.testing.assert_close(out, expected, rtol=0, atol=(2 * eps + 1e-5) * max(scale, 1e-3))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)
    return out, lse


GEOMETRY = [
    AttentionCase((1, 1, 1), (5, 40, 17), page_size=1),
    AttentionCase((1, 1, 1), (5, 40, 17), page_size=5, table="csr"),
    AttentionCase((1, 3, 2), (9, 33, 2), page_size=8, dtype=torch.float16),
    AttentionCase((12, 1, 20), (40, 70, 20), page_size=16, dtype=torch.float32, head_dim=32),
    AttentionCase((11, 9), (16, 90), page_size=64, table="csr", head_dim=32),
    AttentionCase((10, 4), (30, 9), causal=False, dtype=torch.float16, head_dim=32),
    AttentionCase((1, 12), (300, 290), page_size=272, head_dim=16, table="csr"),
]


@pytest.mark.parametrize("case", GEOMETRY, ids=str)
def test_geometry(case: AttentionCase) -> None:
    check(make_inputs(case))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_storage(storage: Any, kv_layout: Any) -> None:
    """FI 527, aiter 3498: strides come from the tensors, also with as many heads as K and V."""
    check(
        make_inputs(
            AttentionCase((1, 10), (19, 21), storage=storage, kv_layout=kv_layout, head_dim=16)
        )
    )


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads"),
    [(9, 3), (10, 2), (6, 1), (14, 2), (16, 1), (48, 1), (71, 1), (4, 4)],
)
def test_fi_996_group_sizes(num_qo_heads: int, num_kv_heads: int) -> None:
    """FI 996, 2684, 3563, vLLM 18100: GQA groups 1 to 71, decode and prefill."""
    case = AttentionCase(
        (1, 9), (18, 20), num_qo_heads, num_kv_heads, head_dim=16, dtype=torch.float16
    )
    check(make_inputs(case))


@pytest.mark.parametrize("head_dim", [32, 56, 80, 96, 112, 224, 256])
def test_fi_4299_head_dims(head_dim: int) -> None:
    """FI 4299, 4312, 528, 1048, 790: head dims that are no power of two."""
    case = AttentionCase((1, 9), (18, 20), 4, 2, head_dim=head_dim, dtype=torch.float16)
    check(make_inputs(case))


def test_fi_860_different_value_dim() -> None:
    """FI 860: q/k and v head dims differ."""
    check(make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 48, head_dim_vo=32, storage="tuple")))


@pytest.mark.parametrize("q_lens", [(1, 1, 1), (9, 9, 9)])
def test_fi_353_empty_requests(q_lens: tuple[int, ...]) -> None:
    """FI 353, 363, 440: kv lengths 5, 0, 7; the empty row gives 0 and -inf."""
    inputs = make_inputs(AttentionCase(q_lens, (5, 0, 7), head_dim=16, page_size=4))
    out, lse = check(inputs)
    rows = slice(q_lens[0], 2 * q_lens[0])
    assert (out[rows] == 0).all()
    assert (lse[rows] == -math.inf).all()


def test_vllm_57017_zero_length_between() -> None:
    """vLLM 57017: lengths 5, 9, 3, 0."""
    check(make_inputs(AttentionCase((1, 1, 1, 1), (5, 9, 3, 0), head_dim=16)))


def test_vllm_57156_padded_rows_name_a_poisoned_page() -> None:
    """vLLM 57156, SGL 1469: padded requests point at page 0 (NaN) with any length."""
    inputs = make_inputs(AttentionCase((1, 1, 0, 0), (5, 9, 0, 0), head_dim=16))
    inputs.table["block_table"][2:] = 0
    for fill in (0, 1, 9, 2**31 - 1):
        inputs.seq_lens[2:] = fill
        out, _ = check(inputs)
        assert out[:2].isfinite().all()


def test_vllm_47305_unread_slots_of_the_last_page() -> None:
    """vLLM 47305, FI 1046, 941: page 16, length 17, NaN after it (make_inputs poisons)."""
    inputs = make_inputs(AttentionCase((1, 12), (17, 17), head_dim=16))
    assert inputs.kv_cache.isnan().any()
    out, _ = check(inputs)
    assert out[:13].isfinite().all()


def test_fi_4452_more_queries_than_keys() -> None:
    """FI 4452: causal with q_len > kv_len: rows before the first key are 0 / -inf."""
    out, lse = check(make_inputs(AttentionCase((34, 5), (20, 3), head_dim=16)))
    assert (out[:14] == 0).all()
    assert (lse[:14] == -math.inf).all()
    assert lse[14:34].isfinite().all()
    assert (lse[34:36] == -math.inf).all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_fi_4267_extreme_logits(sign: float) -> None:
    """FI 4267: q = -64, k = 64, D 128, kv_len 2, V = 1: output 1, LSE -66854.86 in log2 units."""
    inputs = make_inputs(AttentionCase((1, 9), (2, 12), 1, 1, 128, dtype=torch.float16))
    inputs.q.fill_(sign * 64.0)
    k, v = inputs.kv_cache.unbind(1)
    k[~k.isnan()] = 64.0
    v[~v.isnan()] = 1.0
    out, lse = check(inputs)
    assert (out[:10] == 1).all()
    expected = sign * 64 * 64 * 128 / math.sqrt(128) * math.log2(math.e)
    assert lse[0, 0].item() == pytest.approx(expected + 1.0, rel=1e-6)


def test_total_q_equal_to_batch_is_not_decode() -> None:
    """Query lengths 0 and 2: as many rows as requests."""
    check(make_inputs(AttentionCase((0, 2), (7, 9), head_dim=16)))


def test_length_beyond_the_table_is_clamped() -> None:
    inputs = make_inputs(AttentionCase((1, 10), (16, 32), page_size=16, head_dim=16, table="csr"))
    full, _ = check(inputs)
    inputs.seq_lens.add_(1000)
    inputs.table["indptr"][-1] -= 1  # drop the surplus page, which is poisoned
    clamped, _ = check(inputs)
    assert torch.equal(full, clamped)


def test_batch_of_none() -> None:
    q = torch.ones(3, 4, 16)
    cache = torch.full((2, 2, 4, 2, 16), math.nan)
    empty = torch.empty(0, dtype=torch.int32)
    out, lse = tritonattn.paged_attention(
        q,
        cache,
        qo_indptr=torch.zeros(1, dtype=torch.int32),
        seq_lens=empty,
        block_table=torch.empty(0, 5, dtype=torch.int32),
        return_lse=True,
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("programs", [4, 16, 64])
def test_splits_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, programs: int, q_len: int
) -> None:
    """One long request beside short ones, cut into few or many chunks, all tiles merged again."""
    case = AttentionCase((q_len,) * 4, (330, 7, 0, 90), 6, 2, 16, dtype=torch.float32, page_size=8)
    inputs = make_inputs(case)
    whole, _ = check(inputs)
    monkeypatch.setattr(_config, "split_programs", lambda spec: programs)
    monkeypatch.setattr("tritonattn.kernels.plan.split_programs", lambda spec: programs)
    split, _ = check(inputs)
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(split, check(inputs)[0])


def test_a_plan_serves_all_layers() -> None:
    inputs = make_inputs(AttentionCase((1, 10, 3), (19, 21, 0), head_dim=16))
    other = make_inputs(AttentionCase((1, 10, 3), (19, 21, 0), head_dim=16), seed=1)
    for arguments in ({"page_size": 16}, {"q": inputs.q, "kv_cache": inputs.kv_cache}):
        plan = tritonattn.plan_attention(**arguments, **inputs.metadata())
        for layer in (inputs, other):
            shared = tritonattn.paged_attention(layer.q, inputs.kv_cache, plan=plan)
            own = tritonattn.paged_attention(layer.q, inputs.kv_cache, **inputs.metadata())
            assert torch.equal(shared, own)


def test_a_plan_refuses_another_step_or_geometry() -> None:
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), head_dim=16))
    plan = tritonattn.plan_attention(inputs.q, inputs.kv_cache, **inputs.metadata())
    with pytest.raises(ValueError, match="seq_lens is not what the plan"):
        tritonattn.paged_attention(
            inputs.q, inputs.kv_cache, seq_lens=inputs.seq_lens.clone(), plan=plan
        )
    with pytest.raises(ValueError, match="causal=True, got causal=False"):
        tritonattn.paged_attention(inputs.q, inputs.kv_cache, causal=False, plan=plan)
    with pytest.raises(ValueError, match="layers of one geometry"):
        tritonattn.paged_attention(inputs.q[:, :4], inputs.kv_cache, plan=plan)


def test_lse_bases() -> None:
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), head_dim=16))
    call = inputs.arguments()
    _, log2 = tritonattn.paged_attention(**call, return_lse=True)
    _, natural = tritonattn.paged_attention(**call, return_lse=True, lse_base="e")
    torch.testing.assert_close(log2 * math.log(2.0), natural)
    check(inputs, lse_base="e")


def test_strided_q_out_and_lse() -> None:
    """Q as a slice of a fused projection, out and lse as slices of larger tensors."""
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 16, dtype=torch.float32))
    expected = tritonattn.paged_attention(**inputs.arguments(), backend="reference")
    fused = torch.full((*inputs.q.shape[:2], 48), math.nan)
    fused[..., 16:32] = inputs.q
    out = torch.full((inputs.q.size(0), 8, 32), SENTINEL)
    lse = torch.full((8, inputs.q.size(0)), SENTINEL)
    tritonattn.paged_attention(
        **{**inputs.arguments(), "q": fused[..., 16:32]}, out=out[:, 2:6, 8:24], lse=lse[2:6].T
    )
    torch.testing.assert_close(out[:-2, 2:6, 8:24], expected[:-2], rtol=1e-5, atol=1e-6)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[:-2, 2:6, 8:24] = True
    assert (out[~touched] == SENTINEL).all()
    assert (lse[:2] == SENTINEL).all()
    assert lse[2:6, :-2].isfinite().all()


def test_vllm_40737_single_head_with_a_degenerate_stride() -> None:
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), 4, 1, 16))
    cache = inputs.kv_cache
    strides = list(cache.stride())
    strides[3] = 1
    degenerate = cache.as_strided(cache.shape, strides)
    expected = tritonattn.paged_attention(**inputs.arguments())
    assert torch.equal(
        tritonattn.paged_attention(**{**inputs.arguments(), "kv_cache": degenerate}), expected
    )


def test_same_input_twice_is_bitwise_equal() -> None:
    inputs = make_inputs(AttentionCase((1, 10, 5), (90, 21, 33), head_dim=16))
    first = tritonattn.paged_attention(**inputs.arguments(), return_lse=True)
    second = tritonattn.paged_attention(**inputs.arguments(), return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fi_3130_page_offset_past_32_bits() -> None:
    """FI 3130: page 65536 x stride 65536. Untouched memory of the pool costs nothing."""
    inputs = make_inputs(AttentionCase((1, 10), (19, 21), 4, 2, 16, page_size=16))
    small, page, stride = inputs.kv_cache, 65536, 65536
    storage = torch.empty((page + small.size(0)) * stride, dtype=torch.uint8).view(small.dtype)
    stride //= small.element_size()
    pool = storage.as_strided(
        (page + small.size(0), *small.shape[1:]), (stride, *small.stride()[1:])
    )
    pool[page:] = small
    table = inputs.table["block_table"]
    far = torch.where(table >= 0, table + page, table)
    expected = tritonattn.paged_attention(**inputs.arguments())
    got = tritonattn.paged_attention(**{**inputs.arguments(), "kv_cache": pool, "block_table": far})
    assert torch.equal(got, expected)
