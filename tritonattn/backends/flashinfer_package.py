"""Whether the installed flashinfer-python is one that the backend can trust."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

VERSIONS = ("0.6.", "0.7.")
TESTED = "0.6.13"
# What is called by keyword, looked for in other versions before they are trusted.
_PLANNED = {"q_data_type", "kv_data_type", "sm_scale"}
_RUN = {"q_scale", "out", "lse", "return_lse"}
_CALLED = {
    "BatchDecodeWithPagedKVCacheWrapper.plan": _PLANNED,
    "BatchDecodeWithPagedKVCacheWrapper.run": _RUN,
    "BatchPrefillWithPagedKVCacheWrapper.plan": _PLANNED | {"causal"},
    "BatchPrefillWithPagedKVCacheWrapper.run": _RUN,
}


def import_problem() -> str | None:
    """Return why FlashInfer cannot be used in this process, or None."""
    try:
        module = importlib.import_module("flashinfer")
    except Exception as error:  # a broken installation fails in many ways
        return (
            f"flashinfer-python cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'tritonattn[flashinfer]'"
        )
    version = str(getattr(module, "__version__", "of unknown number"))
    if not version.startswith(VERSIONS):
        return f"flashinfer-python must be {' or '.join(v + 'x' for v in VERSIONS)}, got {version}"
    return None if version.startswith(TESTED) else _signature_problem(module, version)


def _signature_problem(module: Any, version: str) -> str | None:
    """Return what a version that was not tested lacks of what is called here, or None."""
    for path, names in _CALLED.items():
        called = module
        for part in path.split("."):
            called = getattr(called, part, None)
        if called is None:
            return f"flashinfer-python {version} has no {path}, which {TESTED} has"
        parameters = inspect.signature(called).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            continue
        missing = sorted(names - set(parameters))
        if missing:
            return f"{path} of flashinfer-python {version} has no {', '.join(missing)}"
    return None
