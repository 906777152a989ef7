"""Work lists of a step, written to be read: `kernels/plan.py` in Python loops over requests."""

from __future__ import annotations

from torch import Tensor

from tritonattn.layout import PageTable

Record = tuple[int, ...]


def plan(
    table: PageTable,
    qo_indptr: Tensor,
    *,
    total_q: int,
    num_kv_heads: int,
    group_size: int,
    causal: bool,
    programs: int,
    max_decode_q_len: int,
    decode_block_m: int,
    decode_block_n: int,
    prefill_block_m: int,
) -> tuple[list[Record], list[Record], list[Record]]:
    """Return the live records of the split, merge and prefill lists, in order.

    Parameters
    ----------
    table : PageTable
    qo_indptr : Tensor, shape [batch + 1], int32
    programs : int
        How many (request, KV head, chunk) programs to fill.

    Returns
    -------
    split, merge, prefill : list of tuple of int
        Fields as in `kernels/plan.py`.
    """
    ends = qo_indptr.tolist()
    requests = []
    for request, kv_len in enumerate(table.kv_lens().tolist()):
        q_start = max(ends[request], 0)
        q_len = max(min(ends[request + 1], total_q) - q_start, 0)
        requests.append((request, q_start, q_len, kv_len))

    tiles = sum(
        _cdiv(q_len * group_size, decode_block_m) * _cdiv(kv_len, decode_block_n)
        for _, _, q_len, kv_len in requests
        if q_len <= max_decode_q_len
    )
    chunk_tiles = max(_cdiv(tiles * num_kv_heads, programs), 1)

    split: list[Record] = []
    merge: list[Record] = []
    prefill: list[Record] = []
    slots = 0
    for request, q_start, q_len, kv_len in requests:
        rows = q_len * group_size
        if q_len > max_decode_q_len:
            for q_tile in reversed(range(_cdiv(rows, prefill_block_m))):
                last_token = (min((q_tile + 1) * prefill_block_m, rows) - 1) // group_size
                kv_end = max(kv_len - q_len + last_token + 1, 0) if causal else kv_len
                prefill.append((q_start, q_len, q_tile, 0, kv_end, kv_len, request, -1))
            continue
        kv_tiles = _cdiv(kv_len, decode_block_n)
        splits = max(_cdiv(kv_tiles, chunk_tiles), 1)
        size = _cdiv(kv_tiles, splits) * decode_block_n
        for q_tile in range(_cdiv(rows, decode_block_m)):
            if splits > 1:
                merge.append((q_start, q_len, q_tile, slots, splits, 0, 0, 0))
            for chunk in range(splits):
                kv_start = chunk * size
                kv_end = min(kv_start + size, kv_len)
                slot = slots + chunk if splits > 1 else -1
                split.append((q_start, q_len, q_tile, kv_start, kv_end, kv_len, request, slot))
            slots += splits if splits > 1 else 0
    return split, merge, prefill


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
