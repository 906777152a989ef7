"""Which backend takes a call, and why: a pure function of the spec and the caller's choice."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tritonattn.backends import BACKENDS, UnsupportedError, get_backend
from tritonattn.env import INTERPRET
from tritonattn.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choice for a call, its reason, and each backend's verdict."""

    backend: str | None  # None: every candidate refuses
    reason: str
    verdicts: dict[str, str]  # backend -> "accepts", with what to know of it, or why it refuses

    def __str__(self) -> str:
        """Return one line for the choice and one for each backend."""
        lines = [f"{self.backend or 'none'}: {self.reason}"]
        lines += [f"  {name}: {verdict}" for name, verdict in self.verdicts.items()]
        return "\n".join(lines)


def explain_spec(spec: AttentionSpec, backend: str = "auto") -> Explanation:
    """Return what `choose` would do, without raising for a refusal."""
    if backend != "auto":
        get_backend(backend)
    backends = {name: get_backend(name) for name in BACKENDS}
    refusals = {name: backends[name].refusal(spec) for name in BACKENDS}
    verdicts = {name: refusals[name] or f"accepts{backends[name].caveat}" for name in BACKENDS}
    name, reason = (backend, "chosen by the caller") if backend != "auto" else _default(spec)
    if refusals[name] is not None:
        return Explanation(None, verdicts[name], verdicts)
    return Explanation(name, reason, verdicts)


@functools.lru_cache(maxsize=4096)
def choose(spec: AttentionSpec, backend: str = "auto") -> str:
    """Return the backend for a call; raise `UnsupportedError` with the reason if it refuses."""
    name = backend if backend != "auto" else _default(spec)[0]
    reason = get_backend(name).refusal(spec)
    if reason is not None:
        raise UnsupportedError(reason)
    return name


def _default(spec: AttentionSpec) -> tuple[str, str]:
    if spec.device.type == "cpu" and not INTERPRET:
        return "reference", "auto is the reference for CPU tensors outside Triton's interpreter"
    return "triton", "auto is triton until a measured policy exists"
