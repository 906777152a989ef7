"""Which of FlashInfer's kernels a step gets, and kernels asked for by name; without FlashInfer."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.flashinfer_stand_in import (
    SENTINEL,
    SPEC,
    StandInWrapper,
    check,
    made,
    make_call,
    run,
)
from tritonattn.backends import UnsupportedError, flashinfer, get_backend
from tritonattn.cases import AttentionCase, make_inputs, reference_results

__all__ = ["made"]


@pytest.mark.parametrize(
    ("q_lens", "hopper", "kernel"),
    [((64, 200), True, "fa3"), ((64, 200), False, "fa2"), ((1, 200), True, "fa2"),
     ((5, 5), True, "fa2")],
)  # fmt: skip
def test_the_kernel_for_some_lengths(
    made: list[StandInWrapper], monkeypatch: pytest.MonkeyPatch, q_lens: tuple[int, int],
    hopper: bool, kernel: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(flashinfer, "_is_hopper", lambda device: hopper)
    check(make_inputs(AttentionCase(q_lens, (200, 200), page_size=4)))
    assert [wrapper.backend for wrapper in made] == [kernel]


@pytest.mark.parametrize("kernel", ["decode", "tc", "fa2", "fa3", "xqa"])
@pytest.mark.parametrize("table", ["dense", "csr"])
def test_kernels_by_name(made: list[StandInWrapper], kernel: str, table: Any) -> None:
    inputs = make_inputs(AttentionCase((1, 0, 1, 1), (9, 5, 0, 33), page_size=4, table=table))
    call, _ = make_call(inputs, lse=None)
    run(call, kernel)
    torch.testing.assert_close(call.out[:3], reference_results(inputs)[0][:3].to(call.out.dtype))
    assert (call.out[3:] == SENTINEL).all()
    expected = {
        "decode": [("decode", False, "auto")], "tc": [("decode", True, "auto")], "xqa": [],
        "fa2": [("prefill", False, "fa2")], "fa3": [("prefill", False, "fa3")],
    }  # fmt: skip
    assert [(w.kind, w.use_tensor_cores, w.backend) for w in made] == expected[kernel]
    assert get_backend(f"flashinfer:{kernel}").name == f"flashinfer:{kernel}"


def test_what_a_named_kernel_cannot(made: list[StandInWrapper]) -> None:
    call, _ = make_call(make_inputs(AttentionCase((1, 1), (9, 5), page_size=4)))
    with pytest.raises(UnsupportedError, match="flashinfer:xqa gives no LSE"):
        run(call, "xqa")
    longer, _ = make_call(make_inputs(AttentionCase((2, 1), (9, 5), page_size=4)))
    for kernel in ("decode", "tc"):
        with pytest.raises(UnsupportedError, match=f"flashinfer:{kernel} takes one query token"):
            run(longer, kernel)
    with pytest.raises(ValueError, match=r"backend must be one of .*:fa3.*'flashinfer:x'"):
        get_backend("flashinfer:x")


@pytest.mark.parametrize(
    ("kernel", "changes", "said"),
    [
        ("tc", {"max_q_len": 2}, "tc takes one query token a request: say so with max_q_len=1"),
        ("decode", {"num_qo_heads": 14}, "takes group sizes (1, 2, 3, 4, 8), got 7"),
        ("xqa", {"page_size": 8}, "takes page sizes (16, 32, 64, 128), got 8"),
        ("fa3", {}, "flashinfer:fa3 needs compute capability 9"),
        ("fa2", {"q_dtype": torch.float32}, "the flashinfer:fa2 backend takes float16"),
    ],
)
def test_refusals_of_named_kernels(
    made: list[StandInWrapper], monkeypatch: pytest.MonkeyPatch, kernel: str,
    changes: dict[str, Any], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(flashinfer, "_is_hopper", lambda device: False)
    backend = flashinfer.with_kernel(kernel)
    if kernel != "fa3":
        assert backend.refusal(SPEC) is None
    assert said in str(backend.refusal(replace(SPEC, **changes)))


def test_a_newer_version_with_other_signatures(made: list[StandInWrapper]) -> None:
    module: Any = sys.modules["flashinfer"]
    module.__version__ = "0.7.1"
    assert flashinfer.BACKEND.refusal(SPEC) is None

    class Changed:
        def plan(self, indptr: Any, q_data_type: Any = None, sm_scale: Any = None) -> None: ...

    module.BatchPrefillWithPagedKVCacheWrapper = Changed
    assert flashinfer.BACKEND.refusal(SPEC) == (
        "BatchPrefillWithPagedKVCacheWrapper.plan of flashinfer-python 0.7.1 has no causal, "
        "kv_data_type"
    )
    del module.BatchPrefillWithPagedKVCacheWrapper
    reason = str(flashinfer.BACKEND.refusal(SPEC))
    assert "0.7.1 has no BatchPrefillWithPagedKVCacheWrapper.plan, which 0.6.13 has" in reason
