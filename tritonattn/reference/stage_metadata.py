"""Metadata of a step at a stage's capacity: `kernels/stage_metadata.py` in a loop over requests."""

from __future__ import annotations

from torch import Tensor

from tritonattn.layout import PageTable


def stage_metadata(
    qo_indptr: Tensor,
    table: PageTable,
    qo_indptr_out: Tensor,
    seq_lens_out: Tensor,
    table_out: Tensor,
) -> None:
    """Write the targets, padded: no query tokens and no keys past the batch, -1 past a row."""
    batch_size = table.batch_size
    qo_indptr_out[: batch_size + 1] = qo_indptr
    qo_indptr_out[batch_size:] = qo_indptr[batch_size]
    seq_lens_out.zero_()
    # A length beyond its own row is clamped: the wider target no longer tells.
    room = table_out.size(1) * table.page_size
    seq_lens_out[:batch_size] = table.kv_lens().clamp(max=room).int()
    table_out.fill_(-1)
    for request in range(batch_size):
        row = table.row(request)[: table_out.size(1)]
        table_out[request, : row.numel()] = row
