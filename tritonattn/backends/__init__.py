"""Backends behind one Protocol: `triton` (ours), `flashinfer` (the peer), `reference` (fp64).

A backend is a module-level object with a name, a verdict, a per-step plan and a per-layer run. Each
lives in the module of its name and is imported when first asked for.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tritonattn.layout import PagedKVCache, PageTable
from tritonattn.spec import AttentionSpec

BACKENDS = ("triton", "flashinfer", "reference")
TRITON_KERNELS = ("triton:stream",)
# "flashinfer" takes the one that suits a step; these are for who wants to know it better.
FLASHINFER_KERNELS = tuple(f"flashinfer:{name}" for name in ("decode", "tc", "fa2", "fa3", "xqa"))
NAMES = (*BACKENDS, *TRITON_KERNELS, *FLASHINFER_KERNELS)


class UnsupportedError(ValueError):
    """A backend lacks something that the call asks for; the message says what and what to do."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call: the tensors that `AttentionSpec` describes."""

    spec: AttentionSpec
    q: Tensor  # [total_q, num_qo_heads, head_dim_qk], device
    cache: PagedKVCache
    table: PageTable
    qo_indptr: Tensor  # [batch + 1] int32, device
    out: Tensor  # [total_q, num_qo_heads, head_dim_vo], device
    lse: Tensor | None  # [total_q, num_qo_heads] float32, device
    sm_scale: float
    lse_base: str  # "log2" or "e"


class WorkspaceBytes(NamedTuple):
    """How much memory a backend needs, in bytes."""

    step: int  # from the plan to the last layer of a step
    call: int  # within one run: planned steps may share it in stream order


@dataclass(frozen=True, slots=True)
class Workspace:
    """A caller's memory, uint8 on the device; where it is None the backend takes its own."""

    step: Tensor | None = None
    call: Tensor | None = None
    # What a backend takes beside these and keeps as long, by names of its own.
    kept: dict[str, Any] = field(default_factory=dict, compare=False)

    def check(self, spec: AttentionSpec, needed: WorkspaceBytes) -> None:
        """Raise `ValueError` if it is smaller than a backend needs."""
        for have, need in ((self.step, needed.step), (self.call, needed.call)):
            if have is not None and have.numel() < need:
                raise ValueError(
                    f"the workspace buffer must have at least {need} bytes for {spec.num_qo_heads}/"
                    f"{spec.num_kv_heads} heads of {spec.head_dim_vo} and batch {spec.batch_size}, "
                    f"got {have.numel()}"
                )


class GraphPlan(Protocol):
    """A plan that a CUDA graph holds and the host makes anew, in place, before each replay."""

    @property
    def state(self) -> Any:
        """Return what `run` needs."""

    def replan(self) -> None:
        """Plan for the metadata that stands on the device now."""


class Backend(Protocol):
    """What dispatch needs from a backend."""

    name: str
    caveat: str  # what `explain` adds to "accepts"

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the backend cannot take the call, as a sentence, or None."""

    def graph_refusal(self, spec: AttentionSpec, replans: bool) -> str | None:
        """Return why a CUDA graph cannot hold the call, or None.

        `replans`: what is planned outside the graph is planned anew before each replay.
        """

    def workspace_bytes(self, spec: AttentionSpec) -> WorkspaceBytes:
        """Return what a call needs, and any with fewer requests, rows or query tokens."""

    def plan(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> Any:
        """Do the work that all layers of a step share; return what `run` needs of it."""

    def plan_for_graph(
        self, spec: AttentionSpec, table: PageTable, qo_indptr: Tensor, workspace: Workspace
    ) -> GraphPlan | None:
        """Plan outside a CUDA graph what it cannot plan inside; None if `plan` can be captured."""

    def run(self, call: AttentionCall, state: Any) -> None:
        """Write the rows of `call.out` (and `call.lse`) that belong to requests."""


def is_backend(name: str) -> bool:
    """Return whether a name is a backend's, or has one of its kernels behind a colon."""
    return name in NAMES


@functools.cache
def get_backend(name: str) -> Backend:
    """Return a backend by name; raise `ValueError` for an unknown one."""
    if not is_backend(name):
        raise ValueError(f"backend must be one of {('auto', *NAMES)}, got {name!r}")
    base, _, kernel = name.partition(":")
    module = importlib.import_module(f"tritonattn.backends.{base}")
    backend: Backend = module.with_kernel(kernel) if kernel else module.BACKEND
    return backend


def missing_features(spec: AttentionSpec, name: str) -> str | None:
    """Refuse every optional feature: none is built yet for this backend."""
    if not spec.features:
        return None
    return f"the {name} backend does not support {', '.join(spec.features)} yet"
