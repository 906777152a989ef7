"""A user's own cases, from a file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tritonattn.perf.cases import BlockCase, StepCase, load_cases

YAML = """
- op: decode
  model: 8/2/64
  lengths: [4x1x100, "2x1xuniform(1,50,7)"]
  page_size: [8, 16]
  causal: no
- {op: prefill, model: tiny, lengths: 1x8x8, dtype: fp16}
- op: block_copy
  what: [copy_blocks, swap_blocks to host]
  model: tiny
  num_layers: 2
  moved: 3
  pool: 8
  kv_layout: HND
"""
EXPECTED = [
    *(StepCase("decode", "8/2/64", lengths, page, causal=False)
      for lengths, page in itertools.product(("4x1x100", "2x1xuniform(1,50,7)"), (8, 16))),
    StepCase("prefill", "tiny", "1x8x8", dtype="fp16"),
    BlockCase("copy_blocks", "tiny", 2, 3, 8, kv_layout="HND"),
    BlockCase("swap_blocks to host", "tiny", 2, 3, 8, kv_layout="HND"),
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_own_cases(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"mine{suffix}"
    entries = [
        {"op": "decode", "model": "8/2/64", "lengths": ["4x1x100", "2x1xuniform(1,50,7)"],
         "page_size": [8, 16], "causal": False},
        {"op": "prefill", "model": "tiny", "lengths": "1x8x8", "dtype": "fp16"},
        {"op": "block_copy", "what": ["copy_blocks", "swap_blocks to host"], "model": "tiny",
         "num_layers": 2, "moved": 3, "pool": 8, "kv_layout": "HND"},
    ]  # fmt: skip
    file.write_text(YAML if suffix != ".json" else json.dumps(entries))
    assert load_cases(file) == EXPECTED


def test_an_axis_of_ops(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('[{"op": ["decode", "host"], "model": "tiny", "lengths": "1x1x8"}]')
    assert [case.op for case in load_cases(file)] == ["decode", "host"]


STEP = {"op": "decode", "model": "tiny", "lengths": "1x1x8"}
BLOCK = {"op": "block_copy", "what": "copy_blocks", "model": "tiny", "num_layers": 1, "moved": 2,
         "pool": 4}  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (STEP | {"pages": 16}, r"unknown fields \['pages'\].*allowed are op, model, lengths, page"),
        (STEP | {"op": "decoding"}, "op must be one of"),
        (STEP | {"model": "llama"}, "model must be one of"),
        (STEP | {"model": "8/3/64"}, "num_qo_heads must be a multiple of num_kv_heads"),
        (STEP | {"model": "8/0/64"}, "model must be one of"),
        (STEP | {"lengths": "1x1"}, "lengths must be groups"),
        (STEP | {"lengths": 1024}, "lengths must be of type str, got 1024"),
        (STEP | {"lengths": None}, "lengths must be of type str, got None"),
        (STEP | {"lengths": "1x1xcycle(1,1,0)"}, "modulo"),
        (STEP | {"lengths": "9x1xlognormal(1,1e9,0)"}, "range"),
        (STEP | {"page_size": 0}, "page_size must be at least 1, got 0"),
        (STEP | {"page_size": "16"}, "page_size must be of type int, got '16'"),
        (STEP | {"page_size": [16, 16.0]}, "page_size must be of type int, got 16.0"),
        (STEP | {"page_size": True}, "page_size must be of type int, got True"),
        (STEP | {"causal": "false"}, "causal must be of type bool, got 'false'"),
        (STEP | {"window_left": None}, "window_left must be of type int, got None"),
        (STEP | {"window_left": -2}, "window_left must be at least -1, got -2"),
        (STEP | {"logits_soft_cap": -1}, "logits_soft_cap must be at least 0, got -1"),
        (STEP | {"dtype": "int4"}, "dtype must be one of"),
        (STEP | {"kv_layout": {"a": 1}}, "kv_layout must be of type str"),
        ({"op": "decode", "model": "tiny"}, "missing 1 required positional argument: 'lengths'"),
        (BLOCK | {"pool": 3}, r"at least 2 \* moved = 4 pages, got 3"),
        (BLOCK | {"moved": 0}, "at least 2"),
        (BLOCK | {"what": "move_blocks"}, "what must be one of"),
        (BLOCK | {"dtype": "int4"}, "dtype must be one of"),
        (BLOCK | {"kv_layout": "NDH"}, "kv_layout must be one of"),
        (BLOCK | {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (BLOCK | {"lengths": "1x1x8"}, r"unknown fields \['lengths'\]"),
    ],
)
def test_own_cases_that_are_none(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([STEP | {"lengths": "2x1x9"}, entry]))
    with pytest.raises(ValueError, match=said) as error:
        load_cases(file)
    assert str(file) in str(error.value)
    assert str(json.loads(json.dumps(entry))) in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"op": "decode"}', "must hold a list of cases"),
        ("a.json", '["decode"]', "must hold a list of cases"),
        ("a.json", "[", "cannot be read"),
        ("a.yaml", "op: [", "cannot be read"),
        ("a.yaml", "", "must hold a list of cases"),
        ("a.json", json.dumps([STEP, STEP]), "names cases twice: decode-tiny-1x1x8-p16-NHD-bf16"),
    ],
)
def test_files_that_hold_no_cases(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        load_cases(file)
    assert str(file) in str(error.value)
