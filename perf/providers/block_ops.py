"""Block ops: ours, one torch index operation a layer, and the plain copy of as many bytes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import tritonattn
from tritonattn.perf.providers import CEILING, PEER, Call, Pages, Prepared, Provider, register
from tritonattn.perf.steps import BlockStep

BLOCK_KINDS = frozenset({"block_copy"})


def prepare_ours(step: BlockStep) -> Prepared:
    """Set our block op up."""

    def bind(pages: Pages) -> Call:
        if step.case.what == "copy_blocks":
            # On the device the pairs can be captured.
            return partial(tritonattn.copy_blocks, pages.targets, step.on_device)
        return partial(tritonattn.swap_blocks, pages.sources, pages.targets, step.src_to_dst)

    return Prepared(bind)


def _prepare_torch(step: BlockStep) -> Prepared:
    def bind(pages: Pages) -> Call:
        return partial(_move, pages, *step.on_device.unbind(1))

    return Prepared(bind)


def _move(pages: Pages, source_ids: Tensor, target_ids: Tensor) -> None:
    for source, target in zip(pages.sources, pages.targets, strict=True):
        target.index_copy_(0, target_ids, source.index_select(0, source_ids))


def _refuses_bus(step: BlockStep) -> str | None:
    return "torch has no indexed copy between host and device" if step.over_bus else None


def _prepare_plain(step: BlockStep) -> Prepared:
    """Copy as many bytes, contiguous on both sides."""

    def bind(pages: Pages) -> Call:
        shape = (step.case.moved * step.case.num_layers, *pages.sources[0].shape[1:])
        source, target = (
            torch.empty(shape, dtype=side.dtype, device=side.device, pin_memory=side.is_pinned())
            for side in (pages.sources[0], pages.targets[0])
        )
        source.copy_(torch.randn(shape[1:]).expand(shape))

        def call() -> list[Tensor]:
            target.copy_(source, non_blocking=True)
            return [source, target]

        return call

    return Prepared(bind)


register(Provider("torch", PEER, BLOCK_KINDS, _prepare_torch, _refuses_bus))
register(Provider("torch-copy", CEILING, BLOCK_KINDS, _prepare_plain))
