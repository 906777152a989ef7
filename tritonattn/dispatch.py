"""Which backend takes a call, and why: a pure function of a frozen request.

The first of these that says something decides: the `backend` argument, `use_backend`,
`TRITONATTN_BACKEND`, the default. All but the default are explicit: they work or raise with the
reason, they never fall back.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from tritonattn import env
from tritonattn.backends import BACKENDS, UnsupportedError, get_backend
from tritonattn.spec import AttentionSpec

_context: ContextVar[str] = ContextVar("tritonattn_backend", default="auto")
_record: ContextVar[list[Choice] | None] = ContextVar("tritonattn_record", default=None)


@dataclass(frozen=True, slots=True)
class Request:
    """All that a choice depends on."""

    spec: AttentionSpec
    asked: str  # a backend, or "auto"
    asked_by: str  # who asked for it, empty for "auto"


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend for a request, and why."""

    backend: str
    reason: str
    refusal: str | None  # why it cannot take the call: then nothing can, the choice stands


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a call, as a capture records it."""

    spec: AttentionSpec
    argument: str  # the call's own `backend`
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
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of {('auto', *BACKENDS)}, got {backend!r}")


def asked(backend: str = "auto") -> tuple[str, str]:
    """Return the backend that is asked for here and now, or "auto", and by whom."""
    if backend != "auto":
        return backend, "the backend argument"
    if _context.get() != "auto":
        return _context.get(), "use_backend"
    named = env.backend()
    if named not in ("auto", *BACKENDS):
        raise ValueError(f"TRITONATTN_BACKEND must be one of {BACKENDS}, got {named!r}")
    return (named, "TRITONATTN_BACKEND") if named != "auto" else ("auto", "")


@functools.lru_cache(maxsize=4096)
def decide(request: Request) -> Decision:
    """Return the choice for a request."""
    if request.asked != "auto":
        name, reason = request.asked, f"chosen by {request.asked_by}"
    else:
        name, reason = _default(request.spec)
    return Decision(name, reason, get_backend(name).refusal(request.spec))


def choose(spec: AttentionSpec, backend: str = "auto") -> str:
    """Return the backend for a call; raise `UnsupportedError` with the reason if it refuses."""
    decision = decide(Request(spec, *asked(backend)))
    if decision.refusal is not None:
        raise UnsupportedError(decision.refusal)
    record = _record.get()
    if record is not None:
        record.append(Choice(spec, backend, decision.backend))
    return decision.backend


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
    decision = decide(Request(spec, *asked(backend)))
    backends = {name: get_backend(name) for name in BACKENDS}
    verdicts = {name: one.refusal(spec) or f"accepts{one.caveat}" for name, one in backends.items()}
    if decision.refusal is not None:
        return Explanation(None, f"{decision.reason}: {decision.refusal}", verdicts)
    return Explanation(decision.backend, decision.reason, verdicts)


def _default(spec: AttentionSpec) -> tuple[str, str]:
    if spec.device.type == "cpu" and not env.INTERPRET:
        return "reference", "auto is the reference for CPU tensors outside Triton's interpreter"
    return "triton", "auto is triton until a measured policy exists"
