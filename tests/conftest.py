"""Where the kernels run: GPU tests on the GPU, all others in Triton's interpreter.

Triton fixes the choice when a kernel is decorated, so one process cannot do both: with a GPU, run
`pytest -m gpu` and `pytest -m "not gpu"`.
"""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Choose before any test module imports Triton."""
    if not torch.cuda.is_available() or config.option.markexpr == "not gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch sees none"))
