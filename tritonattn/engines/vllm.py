"""vLLM: `--attention-backend CUSTOM`, registered by the entry point `vllm.general_plugins`.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `register` in each of its processes. The classes are in `vllm_backend`, which is imported
when vLLM asks for them: without the flag nothing of this library is.
"""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(f"vllm.{__name__}")
# The interface of attention backends changes from release to release.
_RELEASE = "0.25"


def register() -> None:
    """Make `CUSTOM` known to vLLM; called by vLLM in each of its processes.

    Never raises: vLLM would stop there, for those too who do not use this backend. A problem is
    told when the backend is asked for, or logged where it cannot be.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")
    except Exception as error:  # another release may have moved any of it
        _log.warning(
            "tritonattn knows the attention backends of vLLM %s and could not register CUSTOM: %r",
            _RELEASE, error,
        )  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `Backend` when it is asked for.

    Of an `ImportError` vLLM would show the name alone, so a problem becomes a `RuntimeError`.
    """
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    if not __version__.startswith(f"{_RELEASE}."):
        raise RuntimeError(
            f"tritonattn knows the attention backends of vLLM {_RELEASE}, got {__version__}: "
            f"pip install 'vllm~={_RELEASE}.0', or choose another --attention-backend"
        )
    try:
        from tritonattn.engines.vllm_backend import TritonAttnBackend
    except ImportError as error:
        raise RuntimeError(f"tritonattn cannot serve as vLLM's CUSTOM backend: {error}") from error
    return TritonAttnBackend
