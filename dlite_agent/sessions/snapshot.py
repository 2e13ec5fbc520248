"""A session's KV as it is now, for another thread to write while the session goes on.

Nothing is copied but the last, begun page: full pages are held, and who writes behind them or
rewinds takes other pages, as with a fork.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.models.kv_pool import PAGE_ROWS, KVCache
from dlite_agent.models.kv_rows import rows_to_host

__all__ = ["KVSnapshot"]


class KVSnapshot:
    """Rows of a cache. Made and released by the cache's thread; `rows` may be called by any.

    Args:
        kv: Is not changed; takes no page of the pool.
    """

    def __init__(self, kv: KVCache) -> None:
        num_full = kv.length - kv.length % PAGE_ROWS
        self.length = kv.length
        """How many rows there are."""
        self._num_full = num_full
        self._tail = rows_to_host(kv, num_full, kv.length)
        self._pages = kv.fork(num_full)
        # Views are made here: the cache belongs to this thread.
        runs = self._pages.runs(0, num_full)
        self._runs = [(count, self._pages.pool.views(first, count)) for first, count in runs]

    def rows(self, start: int, end: int) -> Tensor:
        """Copy rows [start, end); see `models.kv_rows.rows_to_host`."""
        shape = list(self._tail.shape)
        shape[3] = end - start
        copy = torch.empty(shape, dtype=self._tail.dtype)
        offset = 0  # of the run among the rows
        for count, views in self._runs:
            low, high = max(start, offset), min(end, offset + count)
            if low < high:
                place = copy.narrow(3, low - start, high - low)
                for layer, (keys, values) in enumerate(zip(views.keys, views.values, strict=True)):
                    place[layer, 0].copy_(keys.narrow(1, low - offset, high - low))
                    place[layer, 1].copy_(values.narrow(1, low - offset, high - low))
            offset += count
        if end > self._num_full:
            low = max(start, self._num_full)
            copy.narrow(3, low - start, end - low).copy_(
                self._tail.narrow(3, low - self._num_full, end - low)
            )
        return copy

    def release(self) -> None:
        """Let go of the pages; nobody calls `rows` any more. Idempotent."""
        self._runs = []
        self._pages.release()
