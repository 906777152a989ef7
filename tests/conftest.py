"""Without a GPU the kernels run in Triton's interpreter, and GPU tests say why they do not run."""

import os

import torch

if not torch.cuda.is_available():
    # Triton fixes the choice when a kernel is decorated, so it must stand before the first import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, torch sees none"))
