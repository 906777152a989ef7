"""Torch twins of the kernels, written to be read; none of them imports Triton.

`attention` (the fp64 oracle), `plan` (work lists), `merge` (states), `append` and `block_ops`
(cache bytes).
"""
