"""A cache's rows as they were, whatever becomes of the cache."""

from __future__ import annotations

import pytest
import torch

from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.kv_rows import append_rows, rows_to_host
from dlite_agent.sessions.snapshot import KVSnapshot
from dlite_agent.testing import tiny_qwen3


@pytest.mark.parametrize("length", [1, 40, PAGE_ROWS, 2 * PAGE_ROWS + 40])
def test_a_snapshot_keeps_the_rows_and_takes_no_page(length: int) -> None:
    target = tiny_qwen3(dtype="float64")
    kv, pool = target.new_cache(), target.new_cache().pool
    num_heads, _, head_dim = pool.layers[0].keys.shape
    shape = (pool.num_layers, 2, num_heads, length, head_dim)
    append_rows(kv, torch.randn(shape, generator=torch.Generator().manual_seed(1)).double())
    was, used = rows_to_host(kv, 0, length), pool.used_bytes
    snapshot = KVSnapshot(kv)
    assert (snapshot.length, pool.used_bytes) == (length, used)
    kv.truncate_to(length // 2)
    append_rows(kv, torch.zeros(shape, dtype=torch.float64))
    for start in (0, length // 3, length - 1):
        for end in (start + 1, (start + length + 1) // 2, length):
            if start < end:
                assert torch.equal(snapshot.rows(start, end), was[:, :, :, start:end])
    kv.release()
    assert pool.used_bytes == length // PAGE_ROWS * pool.page_bytes
    snapshot.release()
    snapshot.release()
    assert pool.used_bytes == 0
