"""Rows of a KV cache as one tensor in host memory, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.models.kv_pool import KVCache

__all__ = ["append_rows", "rows_to_host"]


def rows_to_host(kv: KVCache, start: int, end: int) -> Tensor:
    """Copy rows [start, end) of a cache, tentative ones included.

    Returns:
        Keys and values [L, 2, K, end - start, D] in the pool's type, contiguous, on the host.
    """
    pool = kv.pool
    num_heads, _, head_dim = pool.layers[0].keys.shape
    shape = (pool.num_layers, 2, num_heads, end - start, head_dim)
    rows = torch.empty(shape, dtype=pool.layers[0].keys.dtype)
    done = 0
    for first, count in kv.runs(start, end):
        run = pool.views(first, count)
        for layer in range(pool.num_layers):
            rows[layer, 0].narrow(1, done, count).copy_(run.keys[layer])
            rows[layer, 1].narrow(1, done, count).copy_(run.values[layer])
        done += count
    return rows


def append_rows(kv: KVCache, rows: Tensor) -> None:
    """Write rows behind the last one of a cache, and commit them.

    Args:
        kv: Grows by `n` rows.
        rows: As `rows_to_host` gives them, [L, 2, K, n, D] with n >= 1, of any device.

    Raises:
        CapacityError: The pool has too few free pages; the cache is unchanged.
    """
    count = rows.shape[3]
    kv.reserve(count)
    for layer, (keys, values) in enumerate(rows):
        kv.write(layer, keys, values)
    kv.commit(count)
