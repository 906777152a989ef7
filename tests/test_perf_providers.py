"""Who is measured: that all are there, what they refuse here, and what can be tried on a CPU."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tritonattn import dispatch
from tritonattn.perf import providers
from tritonattn.perf.cases import BLOCK_OPS, BlockCase, StepCase
from tritonattn.perf.measure import measure_case
from tritonattn.perf.providers import ORACLE, OURS, PEER, Provider, all_providers, kind_of, register
from tritonattn.perf.providers import vllm as vllm_providers
from tritonattn.perf.providers.flashinfer_more import XQA_PAGE_SIZES, _lower_triangle
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import BlockStep, Step
from tritonattn.perf.timing import Effort

CPU = torch.device("cpu")
ROLES = {
    "triton": "ours",
    "flashinfer": "peer",
    "flashinfer-tc": "peer",
    "flashinfer-fa2": "peer",
    "flashinfer-fa3": "peer",
    "flashinfer-xqa": "peer",
    "flashinfer-batch": "peer",
    "flashinfer-pod": "peer",
    "flashinfer-cudnn": "peer",
    "fa3": "peer",
    "vllm-triton": "peer",
    "sdpa": "ceiling",
    "sdpa-cudnn": "ceiling",
    "reference": "oracle",
    "torch": "peer",
    "torch-copy": "ceiling",
}
KINDS = {
    "decode": StepCase("decode", "tiny", "2x1x24"),
    "prefill": StepCase("prefill", "tiny", "2x8x12"),
    "mixed": StepCase("mixed", "tiny", "2x1x20+1x6x10"),
    "speculative": StepCase("speculative", "tiny", "2x3x20"),
}
TAKES = {
    "triton": {"decode", "prefill", "mixed", "speculative", "block_copy"},
    "reference": {"decode", "prefill", "mixed", "speculative"},
    "flashinfer": {"decode"},
    "flashinfer-tc": {"decode"},
    "flashinfer-fa2": {"prefill", "mixed", "speculative"},
    "flashinfer-fa3": {"prefill", "mixed", "speculative"},
    "flashinfer-xqa": {"decode", "speculative"},
    "flashinfer-batch": {"decode", "prefill", "mixed", "speculative"},
    "flashinfer-pod": {"mixed"},
    "flashinfer-cudnn": {"prefill"},
    "fa3": {"decode", "prefill", "mixed", "speculative"},
    "vllm-triton": {"decode", "prefill", "mixed", "speculative"},
    "sdpa": {"decode", "prefill", "speculative"},
    "sdpa-cudnn": {"decode", "prefill", "speculative"},
    "torch": {"block_copy"},
    "torch-copy": {"block_copy"},
}
HERE = {"triton", "reference", "sdpa", "torch", "torch-copy"}  # those that a CPU can run


@pytest.fixture
def known() -> dict[str, Provider]:
    return all_providers()


def step_of(case: StepCase) -> Step:
    return Step(case, CPU, cold=False)


def test_all_are_there(known: dict[str, Provider]) -> None:
    assert {name: provider.role for name, provider in known.items()} == ROLES
    assert {name: set(provider.kinds) for name, provider in known.items()} == TAKES
    assert all(provider.name == name for name, provider in known.items())
    # The order of a table: ours first.
    assert next(iter(known)) == "triton"
    assert list(all_providers()) == list(known)


@pytest.mark.parametrize("name", [name for name in ROLES if name not in HERE])
@pytest.mark.parametrize("kind", list(KINDS))
def test_refusals_on_a_cpu_are_sentences(name: str, kind: str) -> None:
    provider = all_providers()[name]
    reason = provider.refuses(step_of(KINDS[kind]))
    assert reason
    assert len(reason.split()) >= 3
    assert not reason.endswith((".", "\n"))
    if kind not in TAKES[name]:
        assert reason.startswith(f"{name} takes ")


def test_every_refusal_is_in_the_table(known: dict[str, Provider]) -> None:
    wanted = {("eager", "warm"): [p for name, p in known.items() if name not in HERE]}
    effort, roofs = Effort("test", 0, 0, 3, 3, 1), Roofs(1.0, 1.0, 1.0)
    for case in KINDS.values():
        rows = list(measure_case(case, wanted, CPU, effort, roofs))
        assert [row["provider"] for row in rows] == [name for name in known if name not in HERE]
        assert {row["status"] for row in rows} == {"unsupported"}
        assert all(row["reason"] for row in rows)


class Cuda:
    """Let a step claim to be on a GPU, up to the point where that is tried."""

    def __init__(self, step: Step, **fields: Any) -> None:
        self._step = step
        self.device = torch.device("cuda")
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a machine with a Hopper GPU, and neither FlashInfer nor vllm."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == "vllm" else find(name, *rest),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    caches = (vllm_providers._load_fa3, vllm_providers._unified_attention)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", [n for n in ROLES if n.startswith(("flashinfer", "fa3", "vllm"))])
def test_a_package_that_is_not_there(name: str, known: dict[str, Provider]) -> None:
    shape = "32/8/128"
    cases = {
        "decode": StepCase("decode", shape, "2x1x24"),
        "prefill": StepCase("prefill", shape, "2x8x12"),
        "mixed": StepCase("mixed", shape, "2x1x20+1x6x10"),
        "speculative": StepCase("speculative", shape, "2x3x20"),
    }
    for kind in TAKES[name]:
        reason = known[name].refusal(Cuda(step_of(cases[kind])))
        assert reason is not None
        assert "flashinfer" in reason.lower() if name.startswith("flash") else "vllm" in reason
        assert "not installed" in reason or "cannot be imported" in reason or "import" in reason


@pytest.mark.usefixtures("without_packages")
def test_vllm_without_its_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A vllm of another version, or half of one, is a reason as well."""
    broken = ModuleType("vllm")
    (tmp_path / "__init__.py").touch()
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})()
    monkeypatch.setitem(sys.modules, "vllm", broken)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: spec)
    assert "has no FlashAttention-3" in str(vllm_providers._load_fa3())
    run, reason = vllm_providers._unified_attention()
    assert run is None
    assert "triton_unified_attention cannot be imported" in reason
    vllm_providers._load_fa3.cache_clear()
    library = tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    library.parent.mkdir()
    library.write_text("no library")
    assert "does not load" in str(vllm_providers._load_fa3())


@pytest.mark.parametrize(
    ("name", "case", "said"),
    [
        ("flashinfer", StepCase("decode", "28/4/128", "1x1x8"), "group sizes .*, not 7"),
        ("flashinfer-tc", StepCase("decode", "32/8/128", "1x1x8", dtype="fp32"), "not float32"),
        ("flashinfer-tc", StepCase("decode", "32/8/80", "1x1x8"), "not 80"),
        ("flashinfer-xqa", StepCase("decode", "32/8/128", "1x1x8", 8), "page sizes .*, not 8"),
        ("flashinfer-xqa", StepCase("speculative", "8/2/64", "1x2x8+1x3x8"), "one query length"),
        ("flashinfer-batch", StepCase("decode", "32/32/128", "1x1x8"), "not 128 and 32"),
        ("flashinfer-batch", StepCase("decode", "8/2/64", "1x1x8"), "not 64 and 2"),
        ("flashinfer-pod", StepCase("mixed", "8/2/128", "1x8x8+2x1x8"), "decodes first"),
        ("flashinfer-pod", StepCase("mixed", "8/2/128", "2x8x8"), "some of both"),
        ("flashinfer-pod", StepCase("mixed", "8/2/128", "1x1x8+1x8x8", causal=False), "causal"),
        ("flashinfer-cudnn", StepCase("prefill", "8/2/128", "1x8x8", 16, "HND"), "only NHD"),
        ("fa3", StepCase("decode", "8/2/128", "1x1x8", dtype="fp32"), "not float32"),
        ("sdpa", StepCase("decode", "8/2/64", "1x1x8+1x1x9"), "one length for all"),
        ("sdpa", StepCase("prefill", "8/2/64", "1x4x8+1x5x8"), "one length for all"),
        ("sdpa-cudnn", StepCase("prefill", "8/2/64", "2x4x8"), "top-left"),
        ("reference", StepCase("decode", "32/8/128", "1x1x131072"), "not timed beyond"),
    ],
)  # fmt: skip
def test_refusals_by_shape(
    monkeypatch: pytest.MonkeyPatch,
    known: dict[str, Provider],
    name: str,
    case: StepCase,
    said: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    small = StepCase("decode", "tiny", "1x1x8") if name == "reference" else case
    fields = {"flops": 4 * 32 * 128 * 131072.0} if name == "reference" else {}
    reason = known[name].refusal(Cuda(step_of(small), **fields))
    assert reason is not None
    assert re.search(said, reason), reason


@pytest.mark.parametrize("name", ["flashinfer-fa3", "fa3"])
def test_hopper_only(
    monkeypatch: pytest.MonkeyPatch, known: dict[str, Provider], name: str
) -> None:
    for capability in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d=None, c=capability: c)
        reason = known[name].refusal(Cuda(step_of(StepCase("prefill", "8/2/128", "1x8x8"))))
        assert "capability 9" in str(reason)


@pytest.mark.parametrize("q_len", range(1, 41))
def test_the_mask_of_xqa(q_len: int) -> None:
    """Each row of a request's queries has a bit for every query up to itself."""
    step = step_of(StepCase("speculative", "tiny", f"3x{q_len}x50", 16))
    mask = _lower_triangle(step)
    words = 2 * ((q_len + 31) // 32)
    assert mask.dtype == torch.uint16
    assert mask.shape == (3, q_len, words)
    assert mask.is_contiguous()
    for request in mask.tolist():
        for i, row in enumerate(request):
            for j in range(16 * words):
                bit = (row[j // 16] >> (j % 16)) & 1
                assert bit == (1 if j <= i else 0), (i, j)


def test_page_sizes_of_xqa() -> None:
    assert XQA_PAGE_SIZES == (16, 32, 64, 128)


def checked(provider: Provider, step: Any) -> None:
    """Plan, bind and call as a measurement does, and check every layer in turn."""
    assert provider.refuses(step) is None
    prepared = provider.prepare(step)
    if prepared.plan is not None:
        prepared.plan()
    for call in [prepared.bind(layer) for layer in step.layers]:
        step.poison()
        accuracy = step.check(call())
        assert accuracy.problem is None, accuracy


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [
        ("3x1x29", True),
        ("3x1x29", False),
        ("1x1x1", True),
        ("2x13x13", True),  # whole prompts
        ("2x5x29", True),  # bottom-right: the first query sees 25 keys
        ("2x5x29", False),
        ("2x16x17", True),
    ],
)
def test_sdpa(
    known: dict[str, Provider], lengths: str, causal: bool, dtype: str, kv_layout: str
) -> None:
    op = "decode" if "x1x" in lengths else "prefill"
    case = StepCase(op, "8/2/32", lengths, 8, kv_layout, dtype, causal)
    step = Step(case, CPU, cold=True)
    checked(known["sdpa"], step)


def test_sdpa_reads_the_layer_that_it_is_bound_to(known: dict[str, Provider]) -> None:
    step = Step(StepCase("decode", "8/2/32", "2x1x20"), CPU, cold=True)
    prepared = known["sdpa"].prepare(step)
    step.layers[1].kv_cache.mul_(-1)
    first, second = (prepared.bind(layer)()[0] for layer in step.layers)
    assert step.check(first).problem is None
    assert torch.allclose(second, -first, atol=1e-2) is False
    assert step.check(second).problem is not None


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_ours_and_the_reference(known: dict[str, Provider], kind: str, kv_layout: str) -> None:
    case = KINDS[kind]
    step = step_of(StepCase(case.op, "tiny", case.lengths, 8, kv_layout))
    checked(known["reference"], step)
    checked(known["triton"], step)


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_all_keys_are_seen_without_causality(known: dict[str, Provider], name: str) -> None:
    case = StepCase("prefill", "tiny", "2x3x12", 8, "HND", causal=False)
    checked(known[name], Step(case, CPU, cold=True))


def test_ours_is_ours(known: dict[str, Provider], monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic choice may be a peer: what is measured is not left to it."""
    asked: list[str] = []
    choose = dispatch.choose

    def noted(spec: Any, backend: str, planned: str | None = None) -> str:
        asked.append(backend)
        return choose(spec, backend, planned)

    monkeypatch.setattr(dispatch, "choose", noted)
    checked(known["triton"], step_of(KINDS["decode"]))
    assert set(asked) == {"triton"}


@pytest.mark.parametrize("what", BLOCK_OPS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_block_ops(known: dict[str, Provider], what: str, kv_layout: str) -> None:
    step = BlockStep(BlockCase(what, "tiny", 2, 3, 8, 8, kv_layout), CPU)
    for name in ("triton", "torch", "torch-copy"):
        provider = known[name]
        assert provider.kinds & {"block_copy"}
        reason = provider.refuses(step)
        if name == "torch" and what.endswith("host"):
            assert reason == "torch has no indexed copy between host and device"
            continue
        checked(provider, step)
    graph = known["triton"].graph_refusal(step)
    assert (graph is None) == (what == "copy_blocks")


def test_kinds() -> None:
    for kind, case in KINDS.items():
        assert kind_of(case) == kind
    assert kind_of(BlockCase("copy_blocks", "tiny", 1, 1, 2)) == "block_copy"
    assert kind_of(StepCase("host", "tiny", "4x1x8")) == "decode"
    assert kind_of(StepCase("host", "tiny", "1x8x8")) == "prefill"
    assert kind_of(StepCase("speculative", "tiny", "4x1x8")) == "decode"
    assert kind_of(StepCase("host", "tiny", "1x1x8+1x2x8")) == "prefill"


def test_a_third_party_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_providers", dict(all_providers()))
    mine = Provider("mine", PEER, frozenset({"decode"}), lambda step: None)  # type: ignore[arg-type,return-value]
    register(mine)
    assert all_providers()["mine"] is mine
    assert mine.refuses(step_of(KINDS["decode"])) is None
    assert str(mine.refuses(step_of(KINDS["prefill"]))).startswith("mine takes decode")
    with pytest.raises(ValueError, match="a provider named 'mine' is registered already"):
        register(mine)
    with pytest.raises(ValueError, match="'triton' is registered already"):
        register(Provider("triton", OURS, frozenset(), lambda step: None))  # type: ignore[arg-type,return-value]
    assert ORACLE != PEER
