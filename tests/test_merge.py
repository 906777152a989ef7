"""Merge functions: kernels (in the interpreter) and twins, against attention over all keys."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from tritonattn import merge
from tritonattn.kernels import merge as kernels
from tritonattn.merge import merge_state, merge_state_in_place, merge_states
from tritonattn.reference import attention as oracle
from tritonattn.reference import merge as reference

BOTH = pytest.mark.parametrize("implementation", [kernels, reference], ids=["kernel", "twin"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)
SENTINEL = 7.0


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, implementation: ModuleType) -> None:
    """Send the public functions to one implementation."""
    monkeypatch.setattr(merge, "implementation", lambda op, device: implementation)


def attention_states(
    parts: list[int], q_len: int = 5, heads: int = 3, dim: int = 16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return fp64 states of key ranges, stacked in dimension 1, and the state over all keys."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(q_len, heads, dim, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, sum(parts), heads, dim, generator=generator, dtype=torch.float64)

    def state(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(q_len, k.size(0), dtype=torch.bool)
        out, lse = oracle.attention(q, k, v, mask, sm_scale=1.0)
        return out, lse * math.log2(math.e)

    states = [state(*pair) for pair in zip(k.split(parts), v.split(parts), strict=True)]
    stacked = (torch.stack([s[i] for s in states], 1) for i in (0, 1))
    return *stacked, *state(k, v)


def assert_state(got: tuple[torch.Tensor, torch.Tensor], v: torch.Tensor, s: torch.Tensor) -> None:
    """Assert a state up to the rounding of v's dtype, and of its LSE, an exponent, in float32."""
    assert got[1].dtype == torch.float32
    eps = torch.finfo(got[0].dtype).eps
    from_lse = torch.finfo(torch.float32).eps * s.abs().max().item()
    torch.testing.assert_close(
        got[0].double(), v, rtol=0, atol=(2 * eps + from_lse) * v.abs().max().item()
    )
    torch.testing.assert_close(got[1].double(), s, rtol=1e-6, atol=1e-5)


@BOTH
@DTYPES
@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("dim", [1, 16, 40, 80, 576])
def test_two_parts_give_the_whole(dtype: torch.dtype, dim: int) -> None:
    v, s, v_all, s_all = attention_states([7, 30], dim=dim)
    v = v.to(dtype)
    assert_state(merge_state(v[:, 0], s[:, 0].float(), v[:, 1], s[:, 1].float()), v_all, s_all)
    assert_state(merge_states(v, s.float()), v_all, s_all)
    v_a, s_a = v[:, 0].clone(), s[:, 0].float()
    merge_state_in_place(v_a, s_a, v[:, 1], s[:, 1].float())
    assert_state((v_a, s_a), v_all, s_all)


@BOTH
@pytest.mark.usefixtures("use")
@pytest.mark.parametrize("num_states", [1, 3, 17, 150])
def test_any_number_of_states(num_states: int) -> None:
    v, s, v_all, s_all = attention_states([1 + i % 4 for i in range(num_states)], q_len=2, dim=24)
    merged = merge_states(v.float(), s.float())
    assert_state(merged, v_all, s_all)
    again = merge_states(v.float(), s.float())
    assert all(torch.equal(a, b) for a, b in zip(merged, again, strict=True))


@BOTH
@pytest.mark.usefixtures("use")
def test_fi_4051_two_empty_states() -> None:
    """FI 4051: merging two states that saw no key gives 0 and -inf, whatever their v holds."""
    v = torch.full((4, 3, 16), math.nan)
    s = torch.full((4, 3), -math.inf)
    merged = merge_state(v, s, v.clone(), s.clone())
    in_place = (v.clone(), s.clone())
    merge_state_in_place(*in_place, v, s)
    many = merge_states(torch.stack([v] * 3, 1), torch.stack([s] * 3, 1))
    for got_v, got_s in (merged, in_place, many):
        assert (got_v == 0).all()
        assert (got_s == -math.inf).all()


@BOTH
@DTYPES
@pytest.mark.usefixtures("use")
def test_an_empty_state_changes_nothing(dtype: torch.dtype) -> None:
    """NaN and inf in an empty state's v do not leak, on either side and between others."""
    v, s, v_all, s_all = attention_states([9, 4])
    v, s = v.to(dtype), s.float()
    v_a, s_a = v[:, 0], s[:, 0]
    for garbage in (math.nan, math.inf):
        nothing, no_key = torch.full_like(v_a, garbage), torch.full_like(s_a, -math.inf)
        for got in (merge_state(v_a, s_a, nothing, no_key), merge_state(nothing, no_key, v_a, s_a)):
            assert torch.equal(got[0], v_a)
            torch.testing.assert_close(got[1], s_a)
        between = torch.stack((nothing, v_a, nothing, v[:, 1], nothing), 1)
        lses = torch.stack((no_key, s_a, no_key, s[:, 1], no_key), 1)
        assert_state(merge_states(between, lses), v_all, s_all)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.usefixtures("use")
def test_fi_4054_in_place_with_a_mask(dtype: torch.dtype) -> None:
    """FI 4054: rows outside the mask stay untouched, empty rows within it are defined."""
    v, s, v_all, s_all = attention_states([7, 30], q_len=6)
    v_a, s_a = v[:, 0].float(), s[:, 0].float()
    v_b, s_b = v[:, 1].float(), s[:, 1].float()
    for state in ((v_a, s_a), (v_b, s_b)):
        state[0][4] = math.nan
        state[1][4] = -math.inf
    v_a[1], s_a[1] = SENTINEL, math.nan
    mask = torch.tensor([1, 0, 1, 0, 1, 0]).to(dtype)
    before = v_a.clone(), s_a.clone()
    merge_state_in_place(v_a, s_a, v_b, s_b, mask=mask)
    live = torch.tensor([0, 2])
    assert_state((v_a[live], s_a[live]), v_all[live], s_all[live])
    assert (v_a[4] == 0).all()
    assert (s_a[4] == -math.inf).all()
    for got, old in zip((v_a, s_a), before, strict=True):
        assert torch.equal(got[mask == 0].nan_to_num(), old[mask == 0].nan_to_num())


@BOTH
@pytest.mark.usefixtures("use")
def test_fi_5262_zero_states_and_zero_rows() -> None:
    """FI 5262: of no states the result is 0 and -inf; of no rows it is empty."""
    v, s = merge_states(torch.empty(3, 0, 2, 16, dtype=torch.float16), torch.empty(3, 0, 2))
    assert v.shape == (3, 2, 16)
    assert v.dtype == torch.float16
    assert (v == 0).all()
    assert (s == -math.inf).all()
    v, s = merge_states(torch.empty(0, 4, 2, 16), torch.empty(0, 4, 2))
    assert (v.shape, s.shape) == ((0, 2, 16), (0, 2))
    no_rows, no_lse = torch.empty(0, 2, 16), torch.empty(0, 2)
    v, s = merge_state(no_rows, no_lse, no_rows, no_lse)
    assert (v.shape, s.shape) == ((0, 2, 16), (0, 2))
    merge_state_in_place(no_rows, no_lse, no_rows, no_lse, torch.empty(0, dtype=torch.bool))


@BOTH
@pytest.mark.usefixtures("use")
def test_fi_2113_lse_is_base_two() -> None:
    """FI 2113, SGL 35045: a prefix of 4096 keys and a suffix; natural logs would be wrong."""
    v, s, v_all, s_all = attention_states([4096, 32], q_len=2, heads=2)
    assert_state(merge_states(v.float(), s.float()), v_all, s_all)
    natural = merge_states(v.float(), (s * math.log(2.0)).float())
    assert (natural[0].double() - v_all).abs().max() > 1e-3


@BOTH
@pytest.mark.usefixtures("use")
def test_states_far_apart() -> None:
    """Differences and magnitudes of LSEs beyond the exponents of float32."""
    v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(1, 2, 1, 16).contiguous()
    for s_a, s_b, expected in (
        (-66854.0, 5.0, 3.0),
        (1e5, -1e5, 1.0),
        (-1e5, -1e5, 2.0),
        (3e38, 1.0, 1.0),
    ):
        s = torch.tensor([s_a, s_b]).view(1, 2, 1)
        got_v, got_s = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        assert (got_v == expected).all()
        assert got_s.item() == pytest.approx(max(s_a, s_b) + (s_a == s_b))
        assert (merge_states(v, s)[0] == expected).all()


@BOTH
@pytest.mark.usefixtures("use")
def test_strided_states() -> None:
    """v as a slice of a larger tensor, s transposed, as kernels with head-major LSE leave it."""
    v, s, v_all, s_all = attention_states([5, 6])
    wide = torch.full((5, 2, 4, 40), math.nan)
    wide[:, :, 1:, 8:24] = v
    head_major = s.float().permute(2, 1, 0).contiguous().permute(2, 1, 0)
    v = wide[:, :, 1:, 8:24]
    assert_state(merge_states(v, head_major), v_all, s_all)
    assert_state(merge_state(v[:, 0], head_major[:, 0], v[:, 1], head_major[:, 1]), v_all, s_all)
    merge_state_in_place(v[:, 0], head_major[:, 0], v[:, 1], head_major[:, 1])
    assert_state((v[:, 0], head_major[:, 0]), v_all, s_all)
    wide[:, 0, 1:, 8:24] = math.nan
    assert wide[:, 0].isnan().all()


def test_other_lse_dtypes_are_converted() -> None:
    v, s, v_all, s_all = attention_states([5, 6])
    got_v, got_s = merge_states(v.float(), s)
    assert_state((got_v, got_s), v_all, s_all)
    assert_state(merge_state(v[:, 0].float(), s[:, 0], v[:, 1].float(), s[:, 1]), v_all, s_all)


V, S = torch.ones(4, 3, 16), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "v must be a torch.Tensor, got list", ([1], S, V, S)),
        (TypeError, "v must be float16, bfloat16 or float32, got torch.float64",
         (V.double(), S, V, S)),
        (ValueError, r"v must be \[n, num_heads, head_dim\], got shape \(4, 3\)", (S, S, V, S)),
        (ValueError, "last dimension of v must have stride 1, got 3",
         (V.mT.contiguous().mT, S, V, S)),
        (ValueError, r"v_other must have shape \(4, 3, 16\), got \(4, 3, 8\)",
         (V, S, V[..., :8], S)),
        (TypeError, "v_other must be torch.float32 like", (V, S, V.half(), S)),
        (TypeError, "s is written in place and must be float32, got torch.float64",
         (V, S.double(), V, S)),
        (ValueError, r"s_other must have shape \(4, 3\), got \(3, 4\)", (V, S, V, S.T)),
        (TypeError, "s_other must be float32, got torch.int64", (V, S, V, S.long())),
        (TypeError, "mask must be bool or uint8, got torch.float32", (V, S, V, S, torch.ones(4))),
        (ValueError, r"mask must have shape \(4,\), got \(3,\)", (V, S, V, S, torch.ones(3) > 0)),
        (ValueError, "v_other must be on cpu, got meta", (V, S, V.to("meta"), S)),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], match: str, arguments: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(error, match=match):
        merge_state_in_place(*arguments)
    assert (V == 1).all()
    assert (S == 1).all()
