"""Case files: what `dump_case` saves comes back the same."""

from __future__ import annotations

import math

import pytest
import torch

from tritonattn.diff import compare, dump_case, load_case

NAN = math.nan
FLOATS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def assert_same(loaded: torch.Tensor, saved: torch.Tensor) -> None:
    assert loaded.shape == saved.shape
    assert loaded.stride() == saved.stride()
    assert loaded.dtype == saved.dtype
    loaded, saved = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (loaded, saved))
    assert torch.equal(loaded, saved)


def views() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(6, 3, 2, 4, 2, 8, generator=generator)  # pages, layers, K/V, ...
    return {
        "contiguous": pool[0].clone(),
        "cross_layer": pool[:, 1],
        "keys": pool[:, 1, 0],
        "permuted": pool.permute(5, 0, 2, 1, 4, 3),
        "expanded": pool[0, 0, 0, 0, 0].expand(5, 8),
        "expanded_gaps": pool[:, 0, 0, 0, 0].expand(4, 6, 8),
        "stepped": pool[::2, ..., ::3],
        "overlapping": pool.view(-1).as_strided((5, 3), (2, 1)),
        "size_one": pool[:1, 0].as_strided((1, 2, 4, 1, 8), (384, 64, 16, 1, 1)),
        "padded_bool": (pool > 0)[..., :5],
        "fp8": pool.to(torch.float8_e4m3fn)[..., :4],
        "int32": torch.arange(20, dtype=torch.int32)[3:9:2],
        "scalar": torch.tensor(0.5),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "empty_expanded": torch.empty(1, 0).expand(7, 0),
    }


@pytest.mark.parametrize("key", sorted(views()))
def test_case_file_keeps_strides(key, tmp_path):
    saved = views()[key]
    dump_case(tmp_path / "case.pt", tensor=saved)
    assert_same(load_case(tmp_path / "case.pt")["tensor"], saved)


def test_case_file_keeps_structure_and_values(tmp_path):
    params = {
        "kv_layout": "NHD",
        "causal": True,
        "sm_scale": 0.125,
        "window_left": -1,
        "lse": None,
        "dtype": torch.bfloat16,
        "shape": (1, 2),
        "lens": [3, 0],
        "logits": {"cap": math.inf, "kind": "tensor"},
    }
    cache = (torch.ones(2, 3), torch.zeros(2, 3))
    dump_case(tmp_path / "case.pt", kv_cache=cache, path="not the file", **params)
    loaded = load_case(str(tmp_path / "case.pt"))
    assert isinstance(loaded["kv_cache"], tuple)
    assert_same(loaded["kv_cache"][0], cache[0])
    assert_same(loaded["kv_cache"][1], cache[1])
    assert {key: loaded[key] for key in params} == params
    assert isinstance(loaded["shape"], tuple)
    assert loaded["path"] == "not the file"


def test_a_small_view_makes_a_small_file(tmp_path):
    pool = torch.zeros(1000, 8, 16, 64)
    dump_case(tmp_path / "slice.pt", view=pool[10:12])
    dump_case(tmp_path / "gaps.pt", view=pool[:, 3, :, :1])
    assert (tmp_path / "slice.pt").stat().st_size < 100_000  # 2 pages of 32 KiB
    assert (tmp_path / "gaps.pt").stat().st_size < 100_000  # 16,000 elements


def test_memory_between_elements_is_poisoned(tmp_path):
    pool = torch.ones(4, 2, 8)
    dump_case(tmp_path / "case.pt", view=pool[:, 0], ids=torch.ones(6, dtype=torch.int32)[::2])
    loaded = load_case(tmp_path / "case.pt")
    between = loaded["view"].as_strided((3, 8), (16, 1), 8)
    assert between.isnan().all()
    assert loaded["ids"].as_strided((2,), (2,), 1).tolist() == [-1, -1]


def test_case_file_rejects_what_would_not_load(tmp_path):
    with pytest.raises(TypeError, match=r"q\[1\] must be a tensor, None, bool.*got object"):
        dump_case(tmp_path / "case.pt", q=[1, object()])
    with pytest.raises(TypeError, match="d must have string keys"):
        dump_case(tmp_path / "case.pt", d={1: 2})
    with pytest.raises(TypeError, match="s must be a strided tensor"):
        dump_case(tmp_path / "case.pt", s=torch.eye(2).to_sparse())
    assert not (tmp_path / "case.pt").exists()


def test_other_files_and_versions_are_refused(tmp_path):
    torch.save({"weights": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a case file"):
        load_case(tmp_path / "other.pt")
    torch.save({"format": "tritonattn-case", "version": 99, "values": {}}, tmp_path / "new.pt")
    with pytest.raises(ValueError, match="of version 99; this release reads version 1"):
        load_case(tmp_path / "new.pt")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.bool], ids=str
)
def test_device_tensors_give_the_report_of_host_tensors(dtype, tmp_path):
    oracle = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(2)).double() * 4
    expected = oracle.to(dtype)
    actual = expected.clone()
    actual[3, 1, 2] = 0
    if dtype.is_floating_point:
        actual[4, 2, 1] = NAN
    on_host = compare(actual, expected, oracle, qo_indptr=[0, 4, 9])
    indptr = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    # The oracle may stay on the host.
    on_device = compare(actual.cuda(), expected.cuda(), oracle, qo_indptr=indptr)
    host, device = on_host.to_dict(), on_device.to_dict()
    assert host.keys() == device.keys()
    for key, value in host.items():
        expected_value = pytest.approx(value, rel=1e-12) if isinstance(value, float) else value
        if key != "reason":
            assert device[key] == expected_value, key
    dump_case(tmp_path / "case.pt", q=actual.cuda()[:, 1])
    assert_same(load_case(tmp_path / "case.pt")["q"], actual[:, 1])
    assert load_case(tmp_path / "case.pt", device="cuda")["q"].is_cuda
