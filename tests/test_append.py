"""`reshape_and_cache` and the append kernels: slots get their tokens, bit for bit, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import block_ops, env
from tritonattn.cases import STORAGES, AttentionCase, empty_cache
from tritonattn.kernels import append as kernels
from tritonattn.layout import PagedKVCache
from tritonattn.reference import append as twins

PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8
SENTINEL = 7.0


@pytest.fixture(params=["kernels", "twins"] if env.INTERPRET else ["twins"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels in the interpreter and with the torch twins."""
    monkeypatch.setattr(env, "INTERPRET", request.param == "kernels")


pytestmark = pytest.mark.usefixtures("implementation")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Draw random bytes: every bit pattern of the dtype, its NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def memory(cache: Any) -> list[Tensor]:
    """Return the whole buffers that a cache lies in, padding included."""
    views = cache if isinstance(cache, tuple) else (cache,)
    return [view if view._base is None else view._base for view in views]


def check(
    cache: Any, key: Tensor, value: Tensor, slots: Tensor, kv_layout: str = "NHD"
) -> PagedKVCache:
    """Append, and compare all of the memory with plain indexing."""
    assert all(buffer.is_contiguous() for buffer in memory(cache))
    before = [bits(buffer).clone() for buffer in memory(cache)]
    block_ops.reshape_and_cache(key, value, cache, slots, kv_layout=kv_layout)
    after = [bits(buffer).clone() for buffer in memory(cache)]
    for buffer, old in zip(memory(cache), before, strict=True):
        bits(buffer).copy_(old)
    views = PagedKVCache.of(cache, kv_layout)
    live = slots.long()[slots >= 0]
    at = (live // views.page_size, live % views.page_size)
    for view, new in ((views.k, key), (views.v, value)):
        view[at] = new[: slots.numel()][slots >= 0]
    for buffer, now in zip(memory(cache), after, strict=True):
        assert torch.equal(bits(buffer), now)
    return views


def plain_cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return random(*shape, dtype=dtype, seed=9)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_slots_follow_strides(storage: Any, kv_layout: Any) -> None:
    """Padded pages, cross-layer, interleaved, tuples, as many heads as K and V."""
    case = AttentionCase(
        (), (), 4, HEADS, DIM, page_size=PAGE, kv_layout=kv_layout, storage=storage
    )
    cache = empty_cache(case, PAGES, "cpu", fill=SENTINEL)
    slots = torch.tensor([19, 0, -1, 6, 13])
    check(cache, random(5, HEADS, DIM), random(5, HEADS, DIM, seed=1), slots, kv_layout)


def test_fi_919_padded_tokens_are_skipped() -> None:
    """Also FI 616: nnz_max 8 with 5 valid tokens; what the padding holds does not matter."""
    cache = plain_cache(PAGES, 2, PAGE, HEADS, DIM)
    slots = torch.tensor([3, 4, 9, 12, 19, -1, -1, -(1 << 40)])
    check(cache, random(8, HEADS, DIM), random(8, HEADS, DIM, seed=1), slots)
    check(cache, random(3, HEADS, DIM), random(3, HEADS, DIM), torch.full((3,), -1))


def test_slots_outside_the_pool_are_skipped() -> None:
    cache = plain_cache(PAGES, 2, PAGE, HEADS, DIM)
    before = cache.clone()
    slots = torch.tensor([PAGES * PAGE, 1 << 40])
    block_ops.reshape_and_cache(random(2, HEADS, DIM), random(2, HEADS, DIM), cache, slots)
    assert torch.equal(bits(cache), bits(before))


@pytest.mark.parametrize("page_size", [1, 272, 544, 1072])
def test_vllm_25811_page_sizes(page_size: int) -> None:
    cache = plain_cache(3, 2, page_size, 1, 16)
    slots = torch.tensor([3 * page_size - 1, 0, page_size], dtype=torch.int32)
    check(cache, random(3, 1, 16), random(3, 1, 16, seed=1), slots)


@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 1), (3, 5), (2, 80), (3, 96), (1, 250), (72, 128), (8, 1032)]
)
def test_any_heads_and_dim(heads: int, dim: int) -> None:
    """Tokens of more elements than a tile (9216, 8256), and dims that fit no vector."""
    cache = plain_cache(3, 2, PAGE, heads, dim)
    check(cache, random(2, heads, dim), random(2, heads, dim, seed=1), torch.tensor([7, 2]))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
    ],
    ids=str,
)
def test_any_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    cache = plain_cache(3, 2, PAGE, HEADS, DIM, dtype=dtype)
    key, value = (random(2, HEADS, DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    raw, slots = cache.clone(), torch.tensor([7, 2])
    block_ops.reshape_and_cache(key, value, cache, slots)
    for token, (page, offset) in enumerate([(1, 3), (0, 2)]):
        bits(raw)[page, 0, offset] = bits(key)[token]
        bits(raw)[page, 1, offset] = bits(value)[token]
    assert torch.equal(bits(cache), bits(raw))


def test_tokens_may_be_slices_of_a_fused_projection() -> None:
    """Rows of q, k and v side by side, and a head-major key."""
    qkv = random(6, 4 * HEADS * DIM)
    _, key, value = qkv.split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], dim=1)
    key, value = (t.unflatten(1, (HEADS, DIM)) for t in (key, value))
    cache, slots = plain_cache(PAGES, 2, PAGE, HEADS, DIM), torch.tensor([3, 8, 1, 19, -1, 0])
    check(cache, key, value, slots)
    check(cache, random(HEADS, 6, DIM).transpose(0, 1), value, slots)
    check(cache, random(1, HEADS, DIM).expand(6, -1, -1), value[:, :1].expand(-1, HEADS, -1), slots)


def test_a_mapping_shorter_than_the_key_decides() -> None:
    """As engines pad: rows past the mapping are not read (here they are not even there)."""
    cache = plain_cache(PAGES, 2, PAGE, HEADS, DIM)
    check(cache, random(9, HEADS, DIM), random(5, HEADS, DIM), torch.tensor([3, 17]))


def test_nothing_to_write() -> None:
    cache = plain_cache(PAGES, 2, PAGE, HEADS, DIM)
    check(cache, random(0, HEADS, DIM), random(0, HEADS, DIM), torch.empty(0, dtype=torch.int64))
    check(cache, random(4, HEADS, DIM), random(4, HEADS, DIM), torch.empty(0, dtype=torch.int32))


def test_value_dim_may_differ() -> None:
    cache = plain_cache(PAGES, PAGE, HEADS, 24), plain_cache(PAGES, PAGE, HEADS, 16)
    check(cache, random(3, HEADS, 24), random(3, HEADS, 16), torch.tensor([0, 19, 5]))


def test_vllm_40737_degenerate_stride_of_a_single_head() -> None:
    base = plain_cache(PAGES, 2, PAGE, 1, DIM)
    cache = base.as_strided(base.shape, (2 * PAGE * DIM, PAGE * DIM, DIM, 1, 1))
    key = random(2, 1, DIM).as_strided((2, 1, DIM), (DIM, 1, 1))
    check(cache, key, random(2, 1, DIM, seed=1), torch.tensor([18, 3]))


def test_fi_3130_page_offset_past_32_bits() -> None:
    """Also vLLM 50427: page 65536 x stride 65536. Untouched memory costs nothing."""
    pages = 65536
    cache = torch.empty(pages + 2, 2, 16, 4, 512, dtype=torch.uint8)
    cache[pages:] = 7
    key, value = (random(2, 4, 512, dtype=torch.uint8, seed=seed) for seed in (1, 2))
    slots = torch.tensor([pages * 16 + 3, pages * 16 + 31])
    block_ops.reshape_and_cache(key, value, cache, slots)
    expected = torch.full((2, 2, 16, 4, 512), 7, dtype=torch.uint8)
    expected[0, :, 3], expected[1, :, 15] = (torch.stack((key[i], value[i])) for i in (0, 1))
    assert torch.equal(cache[pages:], expected)


def test_sgl_20389_offsets_of_tokens_and_heads_past_32_bits() -> None:
    """Strides of 2^30 elements, in the input and in the cache: the third token or head is past."""
    far = 1 << 30
    wide = torch.empty((1 << 32) + 4096, dtype=torch.uint8)
    key = wide.as_strided((3, 3, 8), (far, far + 64, 1))
    cache = wide[1024:].as_strided((2, 2, 2, 3, 8), (32, 8, 16, far + 128, 1))
    key.copy_(random(3, 3, 8, dtype=torch.uint8, seed=3))
    cache.fill_(7)
    value, saved = random(3, 3, 8, dtype=torch.uint8, seed=4), key.clone()
    block_ops.reshape_and_cache(key, value, cache, torch.tensor([3, -1, 0]))
    assert torch.equal(key, saved)
    assert torch.equal(cache[1, :, 1], torch.stack((saved[0], value[0])))
    assert torch.equal(cache[0, :, 0], torch.stack((saved[2], value[2])))
    assert (cache[0, :, 1] == 7).all()
    assert (cache[1, :, 0] == 7).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data(), heads=st.sampled_from([1, 3]), dim=st.sampled_from([3, 16]))
def test_slots_equal_the_twin(data: st.DataObject, heads: int, dim: int) -> None:
    """Distinct slots in any order, padding anywhere, both index dtypes."""
    slots = data.draw(st.lists(st.integers(0, PAGES * PAGE - 1), max_size=6, unique=True))
    for _ in range(data.draw(st.integers(0, 3))):
        slots.insert(data.draw(st.integers(0, len(slots))), data.draw(st.integers(-9, -1)))
    mapping = torch.tensor(slots, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    key, value = random(len(slots), heads, dim, seed=1), random(len(slots), heads, dim, seed=2)
    ours, theirs = (plain_cache(PAGES, 2, PAGE, heads, dim) for _ in range(2))
    block_ops.reshape_and_cache(key, value, ours, mapping)
    twins.append_to_slots(key, value, PagedKVCache.of(theirs), mapping)
    assert torch.equal(bits(ours), bits(theirs))


TOKENS = {"key": torch.ones(3, HEADS, DIM), "value": torch.ones(3, HEADS, DIM)}
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "key must have the cache's dtype torch.float32, got torch.bfloat16",
         {"key": TOKENS["key"].bfloat16()}),
        (TypeError, "value must have the cache's dtype torch.float32, got torch.int32",
         {"value": TOKENS["value"].int()}),
        (ValueError, r"key must be \[num_tokens, 2, 8\].*got shape \(3, 8, 2\)",
         {"key": torch.ones(3, DIM, HEADS)}),
        (ValueError, r"value must be \[num_tokens, 2, 8\].*got shape \(3, 16\)",
         {"value": torch.ones(3, 16)}),
        (ValueError, "last dimension of key must have stride 1, got 2",
         {"key": torch.ones(3, HEADS, 2 * DIM)[..., ::2]}),
        (ValueError, "slot_mapping names 3 tokens, value has only 2 rows",
         {"value": TOKENS["value"][:2]}),
        (ValueError, "key must be on cpu, got meta", {"key": torch.ones(3, HEADS, DIM).to("meta")}),
        (TypeError, "key must be a torch.Tensor, got NoneType", {"key": None}),
        (TypeError, "slot_mapping must be int32 or int64, got torch.float32",
         {"slot_mapping": torch.ones(3)}),
        (ValueError, "slot_mapping must have one dimension",
         {"slot_mapping": torch.zeros(3, 1).long()}),
        (ValueError, "slot_mapping must be contiguous, got stride 2",
         {"slot_mapping": torch.zeros(6).long()[::2]}),
        (ValueError, "slot_mapping must be on cpu",
         {"slot_mapping": torch.ones(3).long().to("meta")}),
        (ValueError, "kv_layout must be 'NHD' or 'HND', got 'NDH'", {"kv_layout": "NDH"}),
        (ValueError, "k_scale must be None, got 0.5.*not supported yet", {"k_scale": 0.5}),
        (ValueError, "v_scale must be None", {"v_scale": torch.ones(())}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    cache = torch.full((PAGES, 2, PAGE, HEADS, DIM), SENTINEL)
    call = {**TOKENS, "kv_cache": cache, "slot_mapping": torch.tensor([1, 2, 3]), **changes}
    with pytest.raises(error, match=message):
        block_ops.reshape_and_cache(**call)
    assert (cache == SENTINEL).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_fi_append_into_fp8_is_never_a_reinterpretation(dtype: torch.dtype) -> None:
    """FlashInfer copies the bytes of bf16 tokens into an fp8 cache as they are."""
    cache = torch.full((PAGES, 2, PAGE, HEADS, DIM), SENTINEL).to(FP8)
    tokens = torch.ones(3, HEADS, DIM).to(dtype)
    with pytest.raises(TypeError, match=f"dtype torch.float8_e4m3fn, got {dtype}"):
        block_ops.reshape_and_cache(tokens, tokens, cache, torch.tensor([1, 2, 3]))
    assert (cache.float() == SENTINEL).all()


@pytest.mark.parametrize(
    ("slots", "message"),
    [([1, PAGES * PAGE], "slot 20, allowed are 0 to 19"), ([4, -1, 4], "each slot once, got 4")],
)
def test_values_are_checked_on_request(
    slots: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TRITONATTN_VALIDATE=1`: slots outside the pool, and named twice (no order says who wins)."""
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    cache = torch.full((PAGES, 2, PAGE, HEADS, DIM), SENTINEL)
    with pytest.raises(ValueError, match=f"slot_mapping.*{message}"):
        block_ops.reshape_and_cache(
            TOKENS["key"], TOKENS["value"], cache, torch.tensor(slots, dtype=torch.int32)
        )
    assert (cache == SENTINEL).all()
    check(cache, TOKENS["key"], TOKENS["value"], torch.tensor([-1, 0, 19]))


def test_tiles_cover_a_token() -> None:
    """A token wider than a tile takes several programs, each within 4 KiB of K and of V."""
    wide = PagedKVCache.of(torch.empty(1, 2, 1, 72, 128, dtype=torch.bfloat16))
    assert kernels._tile(wide) == (2048, 5)
    narrow = PagedKVCache.of(torch.empty(1, 2, 1, 3, 5, dtype=torch.uint8))
    assert kernels._tile(narrow) == (16, 1)
