"""Measure one case: prepare every provider, check its result, time those that are right."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tritonattn.backends import UnsupportedError
from tritonattn.perf import schema
from tritonattn.perf.cases import BlockCase, Case, StepCase, heads_of
from tritonattn.perf.providers import Call, Provider
from tritonattn.perf.roofs import Roofs
from tritonattn.perf.steps import Accuracy, AnyStep, make_step
from tritonattn.perf.timing import (
    Effort,
    SideError,
    Times,
    Unit,
    host_us,
    interleave,
    make_unit,
    synchronize,
)

Row = dict[str, Any]
Variant = tuple[str, str]  # mode, l2
MODES = ("graph", "eager")
L2_STATES = ("cold", "warm")


class DeviceLostError(RuntimeError):
    """The GPU does not answer this process any more; a new one may go on."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something has no time."""

    status: str
    reason: str
    accuracy: Accuracy | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """A provider whose result is right, and its calls, one a layer."""

    provider: Provider
    calls: list[Call]
    accuracy: Accuracy
    plan_us: float | None
    launch_us: float


def variants_of(case: Case, device: torch.device) -> list[Variant]:
    """Return what can be measured of a case: (mode, l2)."""
    if device.type != "cuda":
        return [("eager", "warm")]
    # Block ops and steps that measure the host have one set of buffers.
    one_set = isinstance(case, BlockCase) or case.op == "host"
    return [(mode, l2) for mode in MODES for l2 in (("warm",) if one_set else L2_STATES)]


def measure_case(
    case: Case,
    wanted: dict[Variant, list[Provider]],
    device: torch.device,
    effort: Effort,
    roofs: Roofs,
) -> Iterator[Row]:
    """Yield a row for each wanted provider and variant, as soon as it is known.

    Raises
    ------
    DeviceLostError
        After the row of the failure, if the GPU cannot be used any more.
    """
    providers = {p.name: p for variant in wanted.values() for p in variant}
    facts = _facts(case)
    # Measured rows must not keep the memory of a case that is done.
    gc.collect()
    if device.type == "cuda":
        _empty_cache()
    try:
        step = make_step(case, device, cold=any(l2 == "cold" for _, l2 in wanted))
    except Exception as error:
        failure = _failure(error)
        for variant, provider in _pairs(wanted):
            yield facts | _identity(provider, variant) | _failed(failure)
        _check_device(device)
        return
    facts |= step.columns()
    sides: dict[str, Side] = {}
    for provider in providers.values():
        outcome = _prepare(provider, step, effort)
        if isinstance(outcome, Side):
            sides[provider.name] = outcome
            continue
        for variant, asked_for in _pairs(wanted):
            if asked_for is provider:
                yield facts | _identity(provider, variant) | _failed(outcome)
        if outcome.status != schema.UNSUPPORTED:
            _check_device(device)
    for variant, names in wanted.items():
        asked = {p.name: sides[p.name] for p in names if p.name in sides}
        for name, times in _time(step, asked, variant, effort):
            identity = facts | _identity(providers[name], variant)
            if isinstance(times, Failure):
                yield identity | _failed(times)
                _check_device(device)
            else:
                yield identity | _measured(step, sides[name], times, variant, roofs)


def _pairs(wanted: dict[Variant, list[Provider]]) -> Iterator[tuple[Variant, Provider]]:
    for variant, providers in wanted.items():
        for provider in providers:
            yield variant, provider


def _prepare(provider: Provider, step: AnyStep, effort: Effort) -> Side | Failure:
    """Set a provider up and check its result of the first layer against the oracle."""
    try:
        reason = provider.refuses(step)
        if reason:
            return Failure(schema.UNSUPPORTED, reason)
        prepared = provider.prepare(step)
        plan_us = None
        if prepared.plan is not None:
            prepared.plan()
            plan_us = host_us(prepared.plan, step.device, wait=True, rounds=effort.host_rounds)
        calls = [prepared.bind(layer) for layer in step.layers]
        step.poison()
        result = calls[0]()
        accuracy = step.check(result)
        if accuracy.problem:
            return Failure(schema.WRONG, accuracy.problem, accuracy)
        launch_us = host_us(calls[0], step.device, wait=False, rounds=effort.host_rounds)
        return Side(provider, calls, accuracy, plan_us, launch_us)
    except Exception as error:
        return _failure(error)


def _time(
    step: AnyStep, sides: dict[str, Side], variant: Variant, effort: Effort
) -> Iterator[tuple[str, Times | Failure]]:
    """Time one variant of all sides together."""
    mode, l2 = variant
    units: dict[str, Unit] = {}
    if l2 == "cold" and not step.leaves_l2:
        reason = f"{len(step.layers)} layers of {step.bytes} bytes stay in the L2 cache"
        yield from ((name, Failure(schema.UNSUPPORTED, reason)) for name in sides)
        return
    for name, side in sides.items():
        outcome = _unit(step, side, graph=mode == "graph", cold=l2 == "cold")
        if isinstance(outcome, Failure):
            yield name, outcome
        else:
            units[name] = outcome
    while units:
        try:
            times = interleave(units, step.device, effort)
        except SideError as error:
            del units[error.name]
            yield error.name, _failure(error.cause)
        else:
            yield from times.items()
            return


def _unit(step: AnyStep, side: Side, graph: bool, cold: bool) -> Unit | Failure:
    """Make a unit; a graph must give the right result as well."""
    calls = side.calls if cold else side.calls[:1]
    results: list[Any] = [None]

    def first() -> None:
        # The graph writes to what its own call returned, which need not be what an eager one did.
        results[0] = calls[0]()

    try:
        if not graph:
            return make_unit(calls, step.device, graph=False)
        reason = side.provider.graph_refusal(step)
        if reason:
            return Failure(schema.UNSUPPORTED, reason)
        unit = make_unit([first, *calls[1:]], step.device, graph=True)
        step.poison()
        unit.run()
        synchronize(step.device)
        accuracy = step.check(results[0])
    except Exception as error:
        return _failure(error)
    if accuracy.problem:
        return Failure(schema.WRONG, f"in a CUDA graph: {accuracy.problem}", accuracy)
    return unit


def _failure(error: Exception) -> Failure:
    # FlashInfer puts the place in its generated source before what it has to say.
    text = re.sub(r"^Error in function .* at \S+:\d+: ", "", str(error)).strip()
    reason = f"{type(error).__name__}: {text}"[:400]
    if isinstance(error, torch.OutOfMemoryError):
        return Failure(schema.OUT_OF_MEMORY, reason)
    if isinstance(error, UnsupportedError | NotImplementedError):
        return Failure(schema.UNSUPPORTED, text[:400] or type(error).__name__)
    return Failure(schema.FAILED, reason)


def _empty_cache() -> None:
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        # A capture that failed leaves the allocator waiting for its end.
        raise DeviceLostError(str(error)) from error


def _check_device(device: torch.device) -> None:
    try:
        synchronize(device)
    except Exception as error:
        raise DeviceLostError(str(error)) from error


def describe(case: Case, provider: Provider, variant: Variant) -> Row:
    """Return what a row says of a case before anything is measured."""
    return _facts(case) | _identity(provider, variant)


def _facts(case: Case) -> Row:
    num_qo_heads, num_kv_heads, head_dim = heads_of(case.model)
    row: Row = {
        "op": case.op,
        "case": case.name,
        "model": case.model,
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "lengths": case.lengths,
        "page_size": case.page_size,
        "kv_layout": case.kv_layout,
        "dtype": case.dtype,
    }
    if isinstance(case, StepCase):
        row |= {"causal": case.causal, "features": case.features or None}
    return row


def _identity(provider: Provider, variant: Variant) -> Row:
    mode, l2 = variant
    return {"provider": provider.name, "role": provider.role, "mode": mode, "l2": l2}


def _failed(failure: Failure) -> Row:
    return {"status": failure.status, "reason": failure.reason} | _errors(failure.accuracy)


def _errors(accuracy: Accuracy | None) -> Row:
    if accuracy is None:
        return {}
    return {"rms_rel": accuracy.rms_rel, "worst_row": accuracy.worst_row}


def _measured(step: AnyStep, side: Side, times: Times, variant: Variant, roofs: Roofs) -> Row:
    seconds = times.p50 / 1e3
    roof_s = step.roof_s(roofs)
    return {
        "status": schema.OK,
        "ms_p20": times.p20,
        "ms_p50": times.p50,
        "ms_p80": times.p80,
        "n": times.n,
        "calls": times.calls,
        "plan_us": side.plan_us,
        "launch_us": side.launch_us if variant[0] == "eager" else None,
        "gbps": step.bytes / seconds / 1e9,
        "tflops": step.flops / seconds / 1e12 if step.flops else None,
        "pct_roof": 100 * roof_s / seconds if roof_s == roof_s else None,
        **_errors(side.accuracy),
    }
