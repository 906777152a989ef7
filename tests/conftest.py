"""Where the kernels run: GPU tests on the GPU, all others in Triton's interpreter.

Triton fixes the choice when a kernel is decorated, so one process cannot do both: with a GPU, run
`pytest -m gpu` and `pytest -m "not gpu"`.
"""

import os
from typing import Any

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Choose before any test module imports Triton."""
    if not torch.cuda.is_available() or config.option.markexpr == "not gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        _mend_interpreter()


def _mend_interpreter() -> None:
    """Let Triton 3.6 interpret loops beside numpy 2.4 and newer.

    It turns arrays of one element into ints with int(), which numpy no longer does (triton#9171).
    """
    import triton
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None or not triton.__version__.startswith("3.6."):
        return

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch sees none"))
