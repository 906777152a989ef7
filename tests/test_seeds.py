"""The runs of `tests/seeds.py` on the CPU."""

from tests import seeds

SHAPE = seeds.Shape(4, 2, 16, page_size=4, max_batch=8, max_pages=6, prompt=11)


def test_profile_run_then_prefill_then_decode() -> None:
    seeds.profile_prefill_decode(SHAPE, "cpu")


def test_block_ops_between_the_steps_of_a_decode() -> None:
    seeds.block_ops_between_steps(SHAPE, "cpu")
