"""Torch twins of the kernels, written to be read; none of them imports Triton.

Each has the name of its kernel file; `attention`, the fp64 oracle, stands for decode and prefill.
"""
