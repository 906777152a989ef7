"""The sweep on a GPU: modes and L2 states, and what only shows in a graph or in full memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from tritonattn.cases import reference_results
from tritonattn.perf import schema, stages
from tritonattn.perf.cases import BlockCase, Case, StepCase
from tritonattn.perf.measure import measure_case
from tritonattn.perf.providers import Call, Layer, Prepared, Provider, all_providers
from tritonattn.perf.roofs import Roofs, measure_roofs
from tritonattn.perf.steps import Step
from tritonattn.perf.sweep import Settings, sweep
from tritonattn.perf.timing import Effort, call_ms, host_us, interleave, make_unit

pytestmark = pytest.mark.gpu

BRIEF = Effort("test", warmup_ms=2, sample_ms=2, min_samples=3, max_samples=5, host_rounds=3)
ROOFS = Roofs(copy_gbps=4000.0, read_gbps=4000.0, matmul_tflops=700.0)
VARIANTS = [(mode, l2) for mode in ("graph", "eager") for l2 in ("cold", "warm")]
DECODE = StepCase("decode", "8/2/128", "8x1x1024")
CASES: list[Case] = [
    DECODE,
    StepCase("mixed", "8/2/128", "4x1x200+1x64x128", kv_layout="HND"),
    BlockCase("copy_blocks", "8/2/128", 2, 20, 64),
]
KINDS = frozenset({"decode"})


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def right_rows(step: Step) -> Tensor:
    return reference_results(step.inputs, step.dtype)[0][: sum(step.q_lens)]


def fake(name: str, make: Callable[[Layer, Tensor], Call]) -> Provider:
    def prepare(step: Step) -> Prepared:
        rows = right_rows(step)
        return Prepared(lambda layer: make(layer, rows))

    return Provider(name, "peer", KINDS, prepare)


def good(layer: Layer, rows: Tensor) -> Call:
    return lambda: layer.out.copy_(rows)


def measured(device: torch.device, *chosen: Provider) -> dict[tuple[str, str, str], Any]:
    wanted = {variant: list(chosen) for variant in VARIANTS}
    rows = list(measure_case(DECODE, wanted, device, BRIEF, ROOFS))
    found = {(row["provider"], row["mode"], row["l2"]): row for row in rows}
    assert len(found) == len(rows) == len(chosen) * len(VARIANTS)
    return found


def test_a_small_sweep(tmp_path: Path, device: torch.device) -> None:
    known = all_providers()
    # The paths of FlashInfer's that are quick to build where they are not prebuilt.
    names = ("triton", "flashinfer-tc", "flashinfer-fa2", "torch", "sdpa")
    settings = Settings(
        suite="small", cases=CASES, providers=[known[name] for name in names], variants=VARIANTS,
        device=device, effort=BRIEF, budget_s=None,
    )  # fmt: skip
    frame = sweep(settings, tmp_path)
    assert len(frame) == len(names) * (4 + 4 + 2)
    assert not frame[list(schema.KEY)].duplicated().any()
    ours = frame[frame["provider"] == "triton"]
    assert set(ours["status"]) == {"ok"}, ours[["case", "status", "reason"]].to_string()
    assert len(ours) == 10
    assert (ours["launch_us"].notna() == (ours["mode"] == "eager")).all()
    attention = ours[ours["op"] != "block_copy"]
    assert attention["plan_us"].notna().all()
    assert (attention["worst_row"] < 0.03).all()
    peers = frame[frame["provider"].str.startswith("flashinfer") & (frame["op"] == "decode")]
    if known["flashinfer-tc"].refuses(Step(DECODE, device, cold=False)) is None:
        tensor_cores = peers[peers["provider"] == "flashinfer-tc"]
        assert set(tensor_cores["status"]) == {"ok"}, tensor_cores["reason"].tolist()
    else:
        assert set(peers["status"]) == {"unsupported"}
    ok = frame[frame["status"] == "ok"]
    assert (ok["ms_p20"] <= ok["ms_p50"]).all()
    assert (ok["ms_p50"] <= ok["ms_p80"]).all()
    assert (ok["ms_p50"] > 0.0005).all(), "less than any kernel takes"
    assert (ok["gbps"] < 1.5e5).all()
    # A GPU does not beat its own roof from cold memory; 105 leaves room for the clocks.
    cold = ok[(ok["l2"] == "cold") & (ok["role"] != "ceiling")]
    assert (cold["pct_roof"] < 105).all()
    assert set(frame["device"]) == {"cuda"}
    assert frame[["gpu", "sm", "driver", "cuda"]].notna().all().all()
    # The same command has nothing left to do.
    assert sweep(settings, tmp_path).equals(frame)


def test_a_graph_that_captures_another_kernel(device: torch.device) -> None:
    def make(layer: Layer, rows: Tensor) -> Call:
        def call() -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                return layer.out.copy_(-rows)
            return layer.out.copy_(rows)

        return call

    def nothing(layer: Layer, rows: Tensor) -> Call:
        def call() -> Tensor:
            if not torch.cuda.is_current_stream_capturing():
                layer.out.copy_(rows)
            return layer.out

        return call

    found = measured(device, fake("wrong", make), fake("nothing", nothing), fake("good", good))
    for (name, mode, _), row in found.items():
        expected = "wrong" if mode == "graph" and name != "good" else "ok"
        assert row["status"] == expected, (name, mode, row.get("reason"))
        if expected == "wrong":
            assert row["reason"].startswith("in a CUDA graph: ")
            assert "ms_p50" not in row


def test_out_of_memory_is_one_s_own(device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info()

    def greedy(layer: Layer, rows: Tensor) -> Call:
        torch.empty(4 * free, dtype=torch.uint8, device=rows.device)
        return good(layer, rows)

    kept = []

    def slowly(layer: Layer, rows: Tensor) -> Call:
        def call() -> Tensor:
            if len(kept) < 4:
                kept.append(None)
                return layer.out.copy_(rows)
            torch.empty(4 * free, dtype=torch.uint8, device=rows.device)
            raise AssertionError("there is no such memory")

        return call

    found = measured(device, fake("first", good), fake("greedy", greedy), fake("slowly", slowly),
                     fake("last", good))  # fmt: skip
    for (name, _, _), row in found.items():
        expected = "ok" if name in ("first", "last") else "out of memory"
        assert row["status"] == expected, (name, row.get("reason"))


def test_cold_is_cold(device: torch.device) -> None:
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step = Step(DECODE, device, cold=True)
    assert torch.cuda.memory_allocated() - before > 3 * l2
    starts = sorted(layer.kv_cache.data_ptr() for layer in step.layers)
    size = step.layers[0].kv_cache.nbytes
    assert all(b - a >= size for a, b in itertools.pairwise(starts))
    # A kernel that goes through a layer takes longer when that is not in the cache.
    calls = [layer.kv_cache.neg_ for layer in step.layers]
    units = {
        "cold": make_unit(calls, device, graph=True),
        "warm": make_unit(calls[:1], device, graph=True),
    }
    times = interleave(units, device, Effort("test", 5, 5, 9, 9, 1))
    assert times["cold"].p50 > times["warm"].p50


def test_times_of_known_length(device: torch.device) -> None:
    clock = 1e6  # cycles; some 0.5 to 0.8 ms

    def sleep() -> None:
        torch.cuda._sleep(int(clock))

    alone = min(call_ms(sleep, device) for _ in range(5))
    for graph in (False, True):
        unit = make_unit([sleep] * 4, device, graph=graph)
        times = interleave({"sleep": unit}, device, BRIEF)["sleep"]
        assert times.calls % 4 == 0
        # Of one call, not of a sample; other processes may share the GPU.
        assert 0.5 * alone < times.p50 < 3 * alone
    waiting = host_us(sleep, device, wait=True, rounds=3)
    returning = host_us(sleep, device, wait=False, rounds=3)
    assert waiting > 0.5e3 * alone
    assert returning < waiting / 2


def test_roofs(device: torch.device) -> None:
    roofs = measure_roofs(device, rounds=3)
    assert 100 < roofs.copy_gbps < 2e4
    assert 0.5 * roofs.copy_gbps < roofs.read_gbps < 3 * roofs.copy_gbps
    assert 10 < roofs.matmul_tflops < 1e4


def test_a_call_that_cannot_be_captured(device: torch.device) -> None:
    def make(layer: Layer, rows: Tensor) -> Call:
        def call() -> Tensor:
            assert float(rows[0, 0, 0]) == float(rows[0, 0, 0])  # waits for the GPU
            return layer.out.copy_(rows)

        return call

    found = measured(device, fake("waits", make), fake("good", good))
    for (name, mode, _), row in found.items():
        failed = name == "waits" and mode == "graph"
        assert row["status"] == ("failed" if failed else "ok"), row.get("reason")
    # What a broken capture leaves behind in the allocator must not end the sweep.
    assert {row["status"] for row in measured(device, fake("next", good)).values()} == {"ok"}


def test_costs_of_stages(tmp_path: Path) -> None:
    file = tmp_path / "stages.csv"
    assert stages.main(["--out", str(file), "--stages", "2", "--quick"]) == 0
    table = pd.read_csv(file).set_index("backend")
    assert list(table.index) == ["triton", "flashinfer"]
    assert (table["sizes"] == 3).all()
    assert (table["stages"] == 2).all()
    figures = table[list(stages.FIGURES)]
    assert (figures > 0).all(axis=None)
    # Its plan waits for the device and is made on the host.
    assert table["replay_us"]["flashinfer"] > table["replay_us"]["triton"]
