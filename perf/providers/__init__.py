"""Who is measured: ours, the peers, what bounds them, and the oracle.

A provider is a record: a name, a role, which kinds of step it takes, why it cannot take one, and
`prepare`, which returns how to plan a step and how to call a layer. Packages are imported when a
provider is first asked for its refusal. Third parties add theirs with `register`, in a module that
`tritonattn sweep --plugin MODULE` imports.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tritonattn.perf.cases import BlockCase, Case
from tritonattn.perf.steps import AnyStep, Layer, Pages, Result

OURS = "ours"
PEER = "peer"
CEILING = "ceiling"  # takes other inputs (no pages): a bound, not a peer
ORACLE = "oracle"

_MODULES = ("ours", "flashinfer", "flashinfer_more", "vllm", "sdpa")
_providers: dict[str, Provider] = {}

Call = Callable[[], Result | None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A provider set up for a step."""

    bind: Callable[[Any], Call]  # a layer -> its call; what the call returns is checked once
    plan: Callable[[], Any] | None = None  # the work of a step that its layers share; timed apart


@dataclass(frozen=True, slots=True)
class Provider:
    """Something that can be measured."""

    name: str
    role: str
    kinds: frozenset[str]  # of step: decode, prefill, mixed, speculative, block_copy
    prepare: Callable[[Any], Prepared]
    refusal: Callable[[Any], str | None] = lambda step: None
    graph_refusal: Callable[[Any], str | None] = lambda step: None  # of a CUDA graph of it

    def refuses(self, step: AnyStep) -> str | None:
        """Return why the provider does not take a step, as a sentence, or None."""
        kind = kind_of(step.case)
        if kind not in self.kinds:
            return f"{self.name} takes {', '.join(sorted(self.kinds))}"
        return self.refusal(step)


def register(provider: Provider) -> None:
    """Add a provider; a name stands for one provider only."""
    if provider.name in _providers:
        raise ValueError(f"a provider named {provider.name!r} is registered already")
    _providers[provider.name] = provider


def all_providers(plugins: Sequence[str] = ()) -> dict[str, Provider]:
    """Return all providers by name, those of some modules of third parties included."""
    for module in (*(f"{__name__}.{name}" for name in _MODULES), *plugins):
        importlib.import_module(module)
    ordered = sorted(_providers.values(), key=lambda provider: provider.role != OURS)
    return {provider.name: provider for provider in ordered}


def kind_of(case: Case) -> str:
    """Return what a case is, whatever its op is called (`host` has steps of all kinds)."""
    if isinstance(case, BlockCase):
        return case.op
    if max(case.tokens()[0]) == 1:
        return "decode"
    return case.op if case.op in ("mixed", "speculative") else "prefill"


ATTENTION_KINDS = frozenset({"decode", "prefill", "mixed", "speculative"})

__all__ = [
    "ATTENTION_KINDS",
    "CEILING",
    "ORACLE",
    "OURS",
    "PEER",
    "Call",
    "Layer",
    "Pages",
    "Prepared",
    "Provider",
    "all_providers",
    "kind_of",
    "register",
]
