"""FlashInfer's append API: the same names, arguments and results, without its known faults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritonattn import env, page
from tritonattn.cases import STORAGES, AttentionCase, empty_cache
from tritonattn.kernels import append as kernels
from tritonattn.layout import PagedKVCache
from tritonattn.reference import append as twins

PAGES, PAGE, HEADS, DIM = 7, 4, 2, 8
SENTINEL = 7.0


@pytest.fixture(params=["kernels", "twins"] if env.INTERPRET else ["twins"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels in the interpreter and with the torch twins."""
    monkeypatch.setattr(env, "INTERPRET", request.param == "kernels")


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def make_cache(storage: Any = "combined", kv_layout: Any = "NHD") -> Any:
    case = AttentionCase(
        (), (), 4, HEADS, DIM, page_size=PAGE, kv_layout=kv_layout, storage=storage,
        dtype=torch.float32,
    )  # fmt: skip
    return empty_cache(case, PAGES, "cpu", fill=SENTINEL)


# Three requests, of 6, 0 and 9 tokens, as a slice of a larger table with a surplus page at its end.
TABLE = {
    "kv_indices": ints(0, 5, 2, 6, 1, 3, 0),
    "kv_indptr": ints(1, 3, 3, 6),
    "kv_last_page_len": ints(2, 0, 1),
}
# (token, page, offset) of the rows below; the others have no place.
ROWS = {"batch_indices": ints(0, -1, 2, 2, 0, -1, 2), "positions": ints(5, 3, 0, 8, 4, 0, 7)}
PLACES = [(0, 2, 1), (2, 6, 0), (3, 3, 0), (4, 2, 0), (6, 1, 3)]


def assert_only(cache: Any, kv_layout: str, key: Tensor, value: Tensor, places: Any) -> None:
    """Assert that the places hold their tokens and that the rest holds the sentinel."""
    views = PagedKVCache.of(cache, kv_layout)
    for view, new in ((views.k, key), (views.v, value)):
        expected = torch.full(view.shape, SENTINEL)
        for token, at, offset in places:
            expected[at, offset] = new[token]
        assert torch.equal(view, expected)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_fi_527_append_follows_strides(storage: Any, kv_layout: Any) -> None:
    """Non-contiguous caches, a table whose indptr begins at 1, FI 919, 616: -1 is skipped."""
    cache = make_cache(storage, kv_layout)
    key, value = tokens(7), tokens(7, 1)
    assert page.append_paged_kv_cache(key, value, **ROWS, paged_kv_cache=cache, **TABLE,
                                      kv_layout=kv_layout) is None  # fmt: skip
    assert_only(cache, kv_layout, key, value, PLACES)


@pytest.mark.usefixtures("implementation")
def test_fi_919_padded_batch() -> None:
    """nnz_max 8 with 5 valid rows, out of `get_batch_indices_positions`."""
    cache, key, value = make_cache(), tokens(8), tokens(8, 1)
    lengths = page.get_seq_lens(TABLE["kv_indptr"], TABLE["kv_last_page_len"], PAGE)
    assert lengths.tolist() == [6, 0, 9]
    rows = page.get_batch_indices_positions(ints(0, 2, 2, 5), lengths, 8)
    assert rows[0].tolist() == [0, 0, 2, 2, 2, -1, -1, -1]
    assert rows[1].tolist() == [4, 5, 6, 7, 8, 0, 0, 0]
    page.append_paged_kv_cache(key, value, *rows, cache, *TABLE.values())
    assert_only(cache, "NHD", key, value, [(0, 2, 0), (1, 2, 1), (2, 1, 2), (3, 1, 3), (4, 3, 0)])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_places_that_do_not_exist_are_skipped(dtype: torch.dtype) -> None:
    """Positions past a request's row (which another's pages follow), requests past the batch."""
    cache, key, value = make_cache(), tokens(6), tokens(6, 1)
    rows = (ints(0, 1, 3, 2, 0, 99, dtype=dtype), ints(8, 0, 0, -1, 7, 0, dtype=dtype))
    table = [tensor.to(dtype) for tensor in TABLE.values()]
    page.append_paged_kv_cache(key, value, *rows, cache, *table)
    assert_only(cache, "NHD", key, value, [(4, 2, 3)])
    # A row that claims more than the table has, and page ids outside the pool.
    page.append_paged_kv_cache(
        key[:3],
        value[:3],
        ints(0, 0, 0),
        ints(0, 4, 8),
        cache,
        ints(PAGES, -1),
        ints(0, 9),
        ints(1),
    )
    assert_only(cache, "NHD", key, value, [(4, 2, 3)])


@pytest.mark.usefixtures("implementation")
def test_no_tokens_and_no_requests() -> None:
    cache, none = make_cache(), ints()
    page.append_paged_kv_cache(tokens(0), tokens(0), none, none, cache, *TABLE.values())
    page.append_paged_kv_cache(tokens(4), tokens(4), none, none, cache, *TABLE.values())
    page.append_paged_kv_cache(tokens(1), tokens(1), ints(0), ints(0), cache, none, ints(0), none)
    assert_only(cache, "NHD", tokens(0), tokens(0), [])


@pytest.mark.skipif(not env.INTERPRET, reason="kernels take CPU tensors in the interpreter only")
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_table_equals_the_twin(data: st.DataObject) -> None:
    """Ids and rows in and out of range; no two tokens share a place, so the order is free."""
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    start = data.draw(st.integers(0, 2))
    ends = [start + sum(lengths[:i]) for i in range(len(lengths) + 1)]
    indices = data.draw(st.permutations([*range(PAGES), -1, -1, PAGES, PAGES]))[: ends[-1]]
    places = st.tuples(st.integers(-2, len(lengths)), st.integers(-1, 3 * PAGE))
    rows = data.draw(st.lists(places, max_size=6, unique=True))
    metadata = [
        ints(*(request for request, _ in rows)),
        ints(*(position for _, position in rows)),
        ints(*indices),
        ints(*ends),
    ]
    key, value = tokens(len(rows)), tokens(len(rows), 1)
    ours, theirs = make_cache(), make_cache()
    if rows:
        kernels.append_to_table(key, value, PagedKVCache.of(ours), *metadata)
    twins.append_to_table(key, value, PagedKVCache.of(theirs), *metadata)
    assert torch.equal(ours, theirs)


BATCHES: list[tuple[list[int], list[int], int]] = [
    ([0, 2, 2, 5], [6, 0, 9], 8),
    ([0, 1, 2, 3], [1, 100, 4096], 3),
    ([0, 0, 0, 4], [3, 0, 4], 4),
    ([3, 5, 9], [2, 12], 12),
    ([0, 4, 9], [4, 5], 6),
    ([0], [], 3),
    ([0, 3], [7], 0),
]


@pytest.mark.parametrize(("indptr", "lengths", "nnz"), BATCHES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batch_indices_and_positions(
    indptr: list[int], lengths: list[int], nnz: int, dtype: torch.dtype
) -> None:
    """Row i of request b stands at i + seq_lens[b] - append_indptr[b + 1]; others are -1 and 0."""
    expected: list[tuple[int, int]] = []
    for row in range(nnz):
        owner = [b for b in range(len(lengths)) if indptr[b] <= row < indptr[b + 1]]
        at = (owner[0], row + lengths[owner[0]] - indptr[owner[0] + 1]) if owner else (-1, 0)
        expected.append(at)
    arguments = ints(*indptr, dtype=dtype), ints(*lengths, dtype=dtype), nnz
    got = page.get_batch_indices_positions(*arguments)
    assert [tensor.dtype for tensor in got] == [torch.int32, torch.int32]
    assert list(zip(*(tensor.tolist() for tensor in got), strict=True)) == expected

    # Given buffers are written in place, up to their end.
    outs = torch.full((nnz + 3,), 99, dtype=torch.int32), torch.full((nnz,), 99, dtype=torch.int32)
    again = page.get_batch_indices_positions(*arguments, *outs)
    assert again[0] is outs[0]
    assert again[1] is outs[1]
    assert outs[0].tolist() == [request for request, _ in expected] + [-1] * 3
    assert outs[1].tolist() == [position for _, position in expected]


def test_seq_lens_of_requests_without_pages() -> None:
    """FlashInfer's answer is `last_page_len`; a request without pages has no tokens."""
    got = page.get_seq_lens(ints(2, 4, 4, 7), ints(5, 9, 3), 16)
    assert got.dtype == torch.int32
    assert got.tolist() == [21, 0, 35]
    assert page.get_seq_lens(ints(0), ints(), 16).tolist() == []


@pytest.mark.parametrize(
    ("name", "names", "defaults"),
    [
        ("append_paged_kv_cache",
         "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr "
         "kv_last_page_len kv_layout", {"kv_layout": "NHD"}),
        ("get_batch_indices_positions", "append_indptr seq_lens nnz batch_indices positions",
         {"batch_indices": None, "positions": None}),
        ("get_seq_lens", "kv_indptr kv_last_page_len page_size", {}),
    ],
)  # fmt: skip
def test_signatures_are_flashinfers(name: str, names: str, defaults: dict[str, Any]) -> None:
    """Those of flashinfer-python 0.6.13."""
    parameters = inspect.signature(getattr(page, name)).parameters
    assert list(parameters) == names.split()
    assert {k: p.default for k, p in parameters.items() if p.default is not p.empty} == defaults


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "append_key must have the cache's dtype torch.float32, got torch.bfloat16",
         {"append_key": tokens(7).bfloat16()}),
        (ValueError, r"append_value must be \[num_tokens, 2, 8\]",
         {"append_value": torch.ones(7, DIM, HEADS)}),
        (ValueError, "batch_indices names 7 tokens, append_key has only 6 rows",
         {"append_key": tokens(6)}),
        (ValueError, "batch_indices and positions must have one length, got 7 and 6",
         {"positions": ROWS["positions"][:6]}),
        (ValueError, r"kv_indptr must have batch \+ 1 = 4 entries.*got 3",
         {"kv_indptr": TABLE["kv_indptr"][1:]}),
        (ValueError, r"kv_indptr must have batch \+ 1 = 4 entries.*got 1", {"kv_indptr": ints(0)}),
        (TypeError, "kv_indices must be int32 or int64", {"kv_indices": torch.ones(7)}),
        (TypeError, "positions must be a torch.Tensor, got list", {"positions": [0] * 7}),
        (ValueError, "batch_indices must be contiguous", {"batch_indices": ints(*range(14))[::2]}),
        (ValueError, "kv_last_page_len must be on cpu, got meta",
         {"kv_last_page_len": ints(2, 0, 1).to("meta")}),
        (ValueError, "kv_layout must be", {"kv_layout": "LAYOUT"}),
        (ValueError, "paged_kv_cache: kv_cache must be",
         {"paged_kv_cache": torch.zeros(2, 5, PAGE, HEADS, DIM)}),
        (ValueError, r"append_key must be \[num_tokens, 4, 8\].*4 heads \(HND\)",
         {"kv_layout": "HND"}),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    cache = make_cache()
    call = {"append_key": tokens(7), "append_value": tokens(7), "paged_kv_cache": cache}
    with pytest.raises(error, match=message):
        page.append_paged_kv_cache(**{**call, **ROWS, **TABLE, **changes})
    assert (cache == SENTINEL).all()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("last_page_len > page_size 4: request 2 has 5", {"kv_last_page_len": ints(2, 0, 5)}),
        ("request 2 names pages from 1 to 7", {"kv_indices": ints(0, 5, 2, 7, 1, 3, 0)}),
        ("positions names 6 of request 0, which has 6 tokens", {"positions": ints(6, *[0] * 6)}),
        ("batch_indices names request 3", {"batch_indices": ints(0, 3, *[-1] * 5)}),
        ("position 0 of request 2 is named twice",
         {"batch_indices": ints(2, 2, *[-1] * 5), "positions": ints(*[0] * 7)}),
    ],
)  # fmt: skip
def test_fi_320_values_are_checked_on_request(
    message: str, changes: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last_page_len > page_size` and other contradictions, with `TRITONATTN_VALIDATE=1`."""
    monkeypatch.setenv("TRITONATTN_VALIDATE", "1")
    cache, call = (
        make_cache(),
        {"append_key": tokens(7), "append_value": tokens(7), **ROWS, **TABLE},
    )
    page.append_paged_kv_cache(**call, paged_kv_cache=make_cache())
    with pytest.raises(ValueError, match=message):
        page.append_paged_kv_cache(**{**call, "paged_kv_cache": cache, **changes})
    assert (cache == SENTINEL).all()


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"append_indptr must have batch \+ 1 = 3 entries.*got 2",
         {"seq_lens": ints(1, 2)}),
        (ValueError, "nnz must be at least 0, got -1", {"nnz": -1}),
        (TypeError, "append_indptr must be int32 or int64", {"append_indptr": torch.ones(2)}),
        (TypeError, "positions is written in place and must be int32, got torch.int64",
         {"positions": torch.zeros(4).long()}),
        (ValueError, "batch_indices must have at least nnz = 4 entries, got 3",
         {"batch_indices": ints(0, 0, 0)}),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(
    error: type[Exception], message: str, changes: dict[str, Any]
) -> None:
    call = {"append_indptr": ints(0, 4), "seq_lens": ints(4), "nnz": 4, **changes}
    with pytest.raises(error, match=message):
        page.get_batch_indices_positions(**call)


def test_bad_seq_lens_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        page.get_seq_lens(ints(0, 1), ints(1), 0)
    with pytest.raises(ValueError, match=r"kv_indptr must have batch \+ 1 = 2 entries.*got 3"):
        page.get_seq_lens(ints(0, 1, 2), ints(1), 16)
