"""Which backend takes a call, and why: a pure function of a frozen request.

The first of these that says something decides: the `backend` argument, `use_backend`,
`TRITONATTN_BACKEND`, a measured policy, the default. The first three are explicit: they work or
raise with the reason, they never fall back. A policy's choice that cannot take a call gives way to
the default, which is logged once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from tritonattn import env, graph_step
from tritonattn.backends import (
    BACKENDS,
    FLASHINFER_KERNELS,
    NAMES,
    UnsupportedError,
    get_backend,
    is_backend,
)
from tritonattn.policy import Policy, environment_of, read_policy
from tritonattn.spec import AttentionSpec
from tritonattn.staging import is_capturing

_log = logging.getLogger(__name__)
_installed: list[Policy] = []  # at most one

_context: ContextVar[str] = ContextVar("tritonattn_backend", default="auto")
_record: ContextVar[list[Choice] | None] = ContextVar("tritonattn_record", default=None)


Graph = Literal["", "plain", "replanned"]


class Request(NamedTuple):
    """All that a choice depends on."""

    spec: AttentionSpec
    asked: str  # a backend, or "auto"
    asked_by: str  # who asked for it, empty for "auto"
    policy: Policy | None = None  # for "auto"
    # A CUDA graph that is being captured; "replanned": with plans that its replays make anew.
    graph: Graph = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend for a request, and why."""

    backend: str
    reason: str
    refusal: str | None = None  # why it cannot take the call: then nothing can, the choice stands


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a call, as a capture records it."""

    asked: tuple[str, str]  # what was asked for, and by whom
    backend: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choice for a call, its reason, and each backend's verdict."""

    backend: str | None  # None: the one that was chosen refuses
    reason: str
    verdicts: dict[str, str]  # backend -> "accepts", with what to know of it, or why it refuses

    def __str__(self) -> str:
        """Return one line for the choice and one for each backend."""
        lines = [f"{self.backend or 'none'}: {self.reason}"]
        lines += [f"  {name}: {verdict}" for name, verdict in self.verdicts.items()]
        return "\n".join(lines)


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of all calls inside a `with` block that do not name one themselves.

    Parameters
    ----------
    name : {"triton", "flashinfer", "reference", "auto"}
        "auto" takes back what an outer block chose. Of this thread, or task, only.

    Raises
    ------
    ValueError
        For another name. In the block a call raises if the backend cannot take it.
    """
    check_backend_name(name)
    token = _context.set(name)
    try:
        yield
    finally:
        _context.reset(token)


def check_backend_name(backend: str) -> None:
    """Raise unless `backend` is "auto" or the name of one."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend != "auto":
        get_backend(backend)


def asked(backend: str = "auto") -> tuple[str, str]:
    """Return the backend that is asked for here and now, or "auto", and by whom."""
    if backend != "auto":
        return backend, "the backend argument"
    if _context.get() != "auto":
        return _context.get(), "use_backend"
    named = env.backend()
    if named != "auto" and not is_backend(named):
        raise ValueError(f"TRITONATTN_BACKEND must be one of {NAMES}, got {named!r}")
    return (named, "TRITONATTN_BACKEND") if named != "auto" else ("auto", "")


@functools.lru_cache(maxsize=4096)
def decide(request: Request) -> Decision:
    """Return the choice for a request."""
    if request.asked != "auto":
        name, reason = request.asked, f"chosen by {request.asked_by}"
    elif request.spec.device.type == "cpu" and not env.INTERPRET:
        name = "reference"
        reason = "auto is the reference for CPU tensors outside Triton's interpreter"
    elif request.policy is None:
        name, reason = "triton", "auto is triton without a measured policy"
    else:
        name, reason = _by_policy(request, request.policy)
    return Decision(name, reason, _refusal(request, name))


def _refusal(request: Request, name: str) -> str | None:
    backend = get_backend(name)
    refusal = backend.refusal(request.spec)
    if refusal is None and request.graph:
        return backend.graph_refusal(request.spec, request.graph == "replanned")
    return refusal


def _by_policy(request: Request, policy: Policy) -> tuple[str, str]:
    mismatch = policy.mismatch(environment_of(request.spec.device))
    if mismatch is not None:
        return "triton", f"auto is triton: {mismatch}"
    entry = policy.nearest(request.spec)
    if entry is None:
        return "triton", f"auto is triton: {policy.source} has no case near this one"
    name, margin = entry.winner
    measured = (
        f"{name} was {margin:.2f} times as fast in the nearest case of {policy.source}, {entry}"
    )
    refusals = []
    for candidate in (*entry.ranking, "triton"):
        refusal = None if candidate == "triton" else _refusal(request, candidate)
        if refusal is None:
            break
        refusals.append(refusal)
    if not refusals:
        return name, measured
    reason = f"auto falls back to {candidate}: {'; '.join(refusals)}; {measured}"
    _log_once(reason)
    return candidate, reason


@functools.cache
def _log_once(message: str) -> None:
    _log.warning(message)


def load_policy(path: str | Path | None) -> Policy | None:
    """Install a table of which backend is faster where, for all calls that choose none.

    Parameters
    ----------
    path : str or Path, optional
        What `tritonattn tune` wrote, or the name of one that ships: "h200". None takes the
        installed one out again.

    Returns
    -------
    Policy, or None

    Raises
    ------
    ValueError
        If the file is no policy, or was measured on another GPU or with other versions.
    """
    policy = None if path is None else read_policy(Path(path).expanduser())
    if policy is not None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        mismatch = policy.mismatch(environment_of(device))
        if mismatch is not None:
            raise ValueError(mismatch)
    install_policy(policy)
    return policy


def install_policy(policy: Policy | None) -> None:
    """Install a policy as it is."""
    _installed[:] = [] if policy is None else [policy]


def installed_policy() -> Policy | None:
    """Return the installed policy; that of the environment is not one."""
    return _installed[0] if _installed else None


def current_policy() -> Policy | None:
    """Return the installed policy, or that of `TRITONATTN_POLICY`, or None."""
    return installed_policy() or _policy_of_environment()


@functools.cache
def _policy_of_environment() -> Policy | None:
    # Once: unlike a name, a file is not looked for in every call.
    path = env.policy()
    if path is None:
        return None
    try:
        return read_policy(path)
    except ValueError as error:
        return Policy(str(path), {}, (), problem=f"TRITONATTN_POLICY is ignored: {error}")


def _decide_now(spec: AttentionSpec, name: str, by: str) -> Decision:
    """Decide for a call here and now, from what is asked for, and by whom."""
    request = Request(spec, name, by, current_policy() if name == "auto" else None)
    decision = decide(request)
    # Any graph holds triton's calls, and to ask about a capture costs more than the rest.
    if decision.backend != "triton":
        graph = _graph(spec)
        if graph:
            decision = decide(request._replace(graph=graph))
    return decision


def _graph(spec: AttentionSpec) -> Graph:
    step = graph_step.current()
    if step is not None:
        return "replanned" if step.can_plan else "plain"
    return "plain" if is_capturing(spec.device) else ""


def choose(spec: AttentionSpec, backend: str = "auto", planned: str | None = None) -> str:
    """Return the backend for a call; raise `UnsupportedError` with the reason if it refuses.

    `planned`: that which has planned the call's step. It stays unless another is asked for.
    """
    name, by = asked(backend)
    if planned is not None and name in ("auto", planned):
        chosen = planned
    else:
        decision = _decide_now(spec, name, by)
        if decision.refusal is not None:
            raise UnsupportedError(decision.refusal)
        chosen = decision.backend
    record = _record.get()
    if record is not None:
        record.append(Choice((name, by), chosen))
    return chosen


@contextlib.contextmanager
def record() -> Iterator[list[Choice]]:
    """Collect what is chosen inside a `with` block."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)


def explain_spec(spec: AttentionSpec, backend: str = "auto") -> Explanation:
    """Return what `choose` would do, without raising for a refusal."""
    decision = _decide_now(spec, *asked(backend))
    call = Request(spec, "auto", "", graph=_graph(spec))
    every = {name: get_backend(name) for name in (*BACKENDS, *FLASHINFER_KERNELS)}
    verdicts = {n: _refusal(call, n) or f"accepts{one.caveat}" for n, one in every.items()}
    if decision.refusal is not None:
        return Explanation(None, f"{decision.reason}: {decision.refusal}", verdicts)
    return Explanation(decision.backend, decision.reason, verdicts)
