"""Merge functions on a GPU: against fp64 and FlashInfer, captured, past 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch

from tritonattn.merge import merge_state, merge_state_in_place, merge_states
from tritonattn.reference import merge as reference

pytestmark = pytest.mark.gpu

State = tuple[torch.Tensor, torch.Tensor]


def make_states(
    n: int, num_states: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> State:
    """Return v [n, num_states, heads, dim] and base-2 LSEs spread over some tens of units."""
    generator = torch.Generator("cuda").manual_seed(seed)
    kwargs = {"device": "cuda", "generator": generator}
    v = torch.randn(n, num_states, heads, dim, **kwargs).to(dtype)
    return v, 8 * torch.randn(n, num_states, heads, **kwargs)


def in_double(v: torch.Tensor, s: torch.Tensor) -> State:
    """Merge in fp64, not rounded."""
    out = v.new_empty((v.size(0), *v.shape[2:]), dtype=torch.float64)
    lse = s.new_empty((s.size(0), s.size(2)), dtype=torch.float64)
    reference.merge_many(v, s, out, lse)
    return out, lse


def errors(got: State, expected: State) -> tuple[float, float]:
    """Return the largest absolute errors of v and s."""
    v, s = ((a.double() - b).abs().max().item() for a, b in zip(got, expected, strict=True))
    return v, s


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("num_states", [2, 7, 100])
def test_as_close_as_flashinfer(num_states: int, dim: int, dtype: torch.dtype) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="FlashInfer is the peer")
    v, s = make_states(515, num_states, 9, dim, dtype)
    expected = in_double(v, s)
    band = torch.finfo(dtype).eps, 1e-5
    pairs = [(merge_states(v, s), flashinfer.merge_states(v, s))]
    if num_states == 2:
        parts = [t[:, i].contiguous() for i in (0, 1) for t in (v, s)]
        pairs.append((merge_state(*parts), flashinfer.merge_state(*parts)))
        ours, theirs = ([t.clone() for t in parts] for _ in range(2))
        merge_state_in_place(*ours)
        flashinfer.merge_state_in_place(*theirs)
        pairs.append((tuple(ours[:2]), tuple(theirs[:2])))
    for ours, theirs in pairs:
        for error, other, rounding in zip(
            errors(ours, expected), errors(theirs, expected), band, strict=True
        ):
            assert error <= 2 * other + rounding
    again = merge_states(v, s)
    assert all(torch.equal(a, b) for a, b in zip(again, pairs[0][0], strict=True))


@pytest.mark.parametrize("dim", [1, 40, 80, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_head_dim(dim: int, dtype: torch.dtype) -> None:
    v, s = make_states(33, 5, 3, dim, dtype)
    s[::3, ::2] = -math.inf
    v[::3, ::2] = math.nan
    s[7] = -math.inf
    expected = in_double(v, s)
    got = merge_states(v, s)
    torch.testing.assert_close(
        got[0].double(), expected[0], rtol=0, atol=8 * torch.finfo(dtype).eps + 1e-5
    )
    torch.testing.assert_close(got[1].double(), expected[1], rtol=0, atol=1e-4)
    assert (got[0][7] == 0).all()
    assert (got[1][7] == -math.inf).all()


def test_fi_4054_mask_and_lengths_change_under_a_graph() -> None:
    """FI 4054: the mask is read at replay; masked rows stay, empty states stay defined."""
    v, s = make_states(64, 2, 8, 128, torch.bfloat16)
    parts = [t[:, i].contiguous() for i in (0, 1) for t in (v, s)]
    mask = torch.ones(64, dtype=torch.bool, device="cuda")
    live = [t.clone() for t in parts]
    merge_state_in_place(*live, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_state_in_place(*live, mask=mask)
        many = merge_states(v, s)
    for step in range(3):
        for target, source in zip(live, parts, strict=True):
            target.copy_(source)
        mask.copy_(torch.arange(64) % (step + 2) == 0)
        s[:, step % 2] = -math.inf
        live[1][::4] = live[3][::4] = -math.inf
        live[0][::4] = math.nan
        before = [t.clone() for t in live]
        graph.replay()
        expected = in_double(torch.stack(before[::2], 1), torch.stack(before[1::2], 1))
        torch.testing.assert_close(live[0][mask].double(), expected[0][mask], rtol=0, atol=4e-2)
        torch.testing.assert_close(live[1][mask].double(), expected[1][mask], rtol=0, atol=1e-4)
        for got, old in zip(live[:2], before[:2], strict=True):
            assert torch.equal(got[~mask].nan_to_num(), old[~mask].nan_to_num())
        assert all(torch.equal(a, b) for a, b in zip(many, merge_states(v, s), strict=True))


def test_states_past_31_bits() -> None:
    """More than 2^31 elements of v: the last rows are right."""
    n = 2**31 // (32 * 128) + 3
    v = torch.zeros(n, 2, 32, 128, dtype=torch.bfloat16, device="cuda")
    s = torch.zeros(n, 2, 32, device="cuda")
    v[-1, 0], v[-1, 1], s[-1, 1] = 1.0, 4.0, 1.0
    for got_v, got_s in (merge_states(v, s), merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])):
        assert (got_v[-1] == 3).all()
        assert (got_v[:-1] == 0).all()
        torch.testing.assert_close(got_s[-1], torch.full_like(got_s[-1], math.log2(3.0)))
