"""The runs of `tests/seeds.py` on a GPU, at batch 256."""

import pytest

from tests import seeds

pytestmark = pytest.mark.gpu

SHAPE = seeds.Shape(8, 2, 128, page_size=16, max_batch=256, max_pages=6, prompt=40)


def test_profile_run_then_prefill_then_decode() -> None:
    seeds.profile_prefill_decode(SHAPE, "cuda")


def test_block_ops_between_the_steps_of_a_decode() -> None:
    seeds.block_ops_between_steps(SHAPE, "cuda")
