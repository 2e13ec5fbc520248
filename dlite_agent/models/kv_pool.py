"""Keys and values of all sessions: a pool of ref-counted pages, and caches that are lists of pages.

A layer's pool is one tensor `[2, K, P, D]` (keys and values, kv heads, rows, head dim) whose P rows
are cut into pages of `PAGE_ROWS`. A `KVCache` holds page numbers; row i of a session stands in page
`i // PAGE_ROWS`. Growth takes the page behind the last one whenever it is free, so a session is
mostly one or two contiguous *spans*, and it never copies.

On a CPU the pool is reserved virtually: memory is committed when it is first written, so the pool
may have the size of the budget rather than of the contexts in use. Large memory pages (2 MiB for a
layer's keys or values of a head) are used where a first session's take a quarter of the budget at
most. `KVPool.close` gives all of it back; single pages are only reused.

    # rows of a cache:  [0, length) committed · [length, length + num_tentative) tentative, gone
    # unless committed
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.kernels.large_pages import LARGE_PAGE_BYTES, prefer_large_pages
from dlite_agent.models.spans import RunViews, Span

if TYPE_CHECKING:
    from dlite_agent.models.target import TargetConfig

__all__ = ["PAGE_ROWS", "KVCache", "KVPool"]

PAGE_ROWS = 256


class KVPool:
    """Memory for the keys and values of every session of one target. Used by one thread at a time.

    Args:
        config: Shape of the target.
        dtype: Type of keys and values.
        device: Where they are.
        max_bytes: Budget; rounded down to whole pages.

    Raises:
        ConfigurationError: Not even one page fits the budget, or the device cannot reserve that
            much.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_bytes: int,
    ) -> None:
        self.page_bytes = PAGE_ROWS * config.kv_bytes_per_token(dtype.itemsize)
        self.num_pages = max_bytes // self.page_bytes
        self.num_layers = config.num_layers
        if self.num_pages < 1:
            raise ConfigurationError(
                f"max_kv_bytes is {max_bytes!r}, but one page of {PAGE_ROWS} tokens takes "
                f"{self.page_bytes} bytes; raise max_kv_bytes"
            )
        rows = self.num_pages * PAGE_ROWS
        shape = (config.num_layers, 2, config.num_kv_heads, rows, config.head_dim)
        try:
            memory = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # what torch's allocators raise
            raise ConfigurationError(
                f"cannot reserve max_kv_bytes={max_bytes!r} on {str(device)!r}: {error}; lower "
                "max_kv_bytes"
            ) from error
        first_write = 2 * config.num_layers * config.num_kv_heads * LARGE_PAGE_BYTES
        if first_write <= max_bytes // 4:
            prefer_large_pages(memory)
        self._keys, self._values = memory.unbind(1)  # [L, K, P, D]
        self.layers = [Span(*layer.unbind(0)) for layer in memory.unbind(0)]  # [K, P, D]
        self._caches: weakref.WeakSet[KVCache] = weakref.WeakSet()
        self._references = np.zeros(self.num_pages, dtype=np.int32)
        self._num_used = 0
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def max_bytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that any cache holds; a shared page counts once."""
        return self._num_used * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that no cache holds."""
        return self.max_bytes - self.used_bytes

    def new_cache(self) -> KVCache:
        """An empty cache; takes no page until it is written to."""
        self._check_open()
        cache = KVCache(self)
        self._caches.add(cache)
        return cache

    def close(self) -> None:
        """Give all memory back and empty every cache. Idempotent."""
        for cache in list(self._caches):
            cache.release()
        self._keys = self._values = torch.empty(0)
        self.layers = []
        self.is_closed = True

    def num_references(self, page: int) -> int:
        """How many caches hold a page."""
        return int(self._references[page])

    def take(self, count: int, after: int | None) -> list[int]:
        """Hand out free pages as contiguous as possible, the ones behind page `after` first.

        Args:
            count: How many.
            after: The last page of the run to extend, or None to start a new run with room to grow.

        Raises:
            CapacityError: Fewer than `count` pages are free; nothing was taken.
        """
        self._check_open()
        num_free = self.num_pages - self._num_used
        if count > num_free:
            raise CapacityError(
                f"{count} more KV pages of {PAGE_ROWS} tokens are needed, but {num_free} of "
                f"{self.num_pages} are free; end a session or raise max_kv_bytes"
            )
        pages: list[int] = []
        while len(pages) < count:
            candidate = self.num_pages if after is None else after + 1
            if candidate >= self.num_pages or self._references[candidate] > 0:
                candidate = self._roomiest_page()
            self._references[candidate] = 1
            self._num_used += 1
            pages.append(candidate)
            after = candidate
        return pages

    def share(self, pages: list[int]) -> None:
        """Add a reference to each page."""
        self._references[pages] += 1

    def drop(self, pages: list[int]) -> None:
        """Take a reference from each page; pages without any are free."""
        if not pages:
            return
        self._references[pages] -= 1
        assert int(self._references[pages].min()) >= 0, "a page was dropped twice"
        self._num_used -= int((self._references[pages] == 0).sum())

    def copy_rows(self, source_page: int, target_page: int, count: int) -> None:
        """Copy the first `count` rows of a page to another, all layers."""
        source, target = source_page * PAGE_ROWS, target_page * PAGE_ROWS
        for memory in (self._keys, self._values):
            memory.narrow(2, target, count).copy_(memory.narrow(2, source, count))

    def views(self, row: int, count: int) -> RunViews:
        """Keys and values [K, count, D] of pool rows [row, row + count), by layer."""
        keys, values = self._keys.narrow(2, row, count), self._values.narrow(2, row, count)
        return RunViews(keys.unbind(0), values.unbind(0))

    def _roomiest_page(self) -> int:
        """Middle of the largest gap, so that the run that ends before the gap can grow too."""
        taken = np.concatenate(([1], self._references, [1])) > 0
        edges = np.flatnonzero(taken[1:] != taken[:-1]).reshape(-1, 2)  # [gaps, (start, end)]
        start, end = edges[int(np.argmax(edges[:, 1] - edges[:, 0]))]
        return int(start) if start == 0 else int((start + end) // 2)

    def _check_open(self) -> None:
        if self.is_closed:
            raise CapacityError("the KV pool is closed; load the model again")


class KVCache:
    """Keys and values of one session, an ordered list of pages; see `KVPool.new_cache` and `fork`.

    Not thread-safe. Always holds exactly the pages that `length + num_tentative` rows need.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._pages: list[int] = []
        self._page_runs: list[tuple[int, int]] = []  # adjacent pages as (first page, pages)
        self._views: list[RunViews] = []  # of all rows, tentative ones included
        self._slots: list[RunViews] = []  # of the tentative rows
        self.length = 0
        self.num_tentative = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    @property
    def pool(self) -> KVPool:
        """The pool that owns the memory."""
        return self._pool

    @property
    def pages(self) -> tuple[int, ...]:
        """Page numbers, in order of the rows."""
        return tuple(self._pages)

    @property
    def nbytes(self) -> int:
        """This cache's share of the pool in bytes: a page that n caches hold counts 1 / n."""
        page_bytes = self._pool.page_bytes
        return round(sum(page_bytes / self._pool.num_references(page) for page in self._pages))

    def reserve(self, count: int) -> None:
        """Make room for `count` tentative rows behind `length`; earlier tentative rows are dropped.

        Costs nothing when that many are reserved already. A last page that another cache also holds
        is copied first, so that nobody else's rows are overwritten.

        Raises:
            CapacityError: The pool has too few free pages; the cache is unchanged.
        """
        assert count >= 1, "at least one row"
        if count == self.num_tentative:
            return
        num_kept = _num_pages(self.length)
        num_needed = _num_pages(self.length + count)
        rest = self.length % PAGE_ROWS  # rows in use of the last page
        must_copy = rest > 0 and self._pool.num_references(self._pages[num_kept - 1]) > 1
        if num_needed > len(self._pages) or must_copy:
            first_new = num_kept - 1 if must_copy else len(self._pages)
            after = self._pages[first_new - 1] if first_new > 0 else None
            new_pages = self._pool.take(num_needed - first_new, after)
            if must_copy:
                self._pool.copy_rows(self._pages[first_new], new_pages[0], rest)
            self._pool.drop(self._pages[first_new:])
            self._set_pages(self._pages[:first_new] + new_pages)
        elif num_needed < len(self._pages):
            self._drop_pages(num_needed)
        self.num_tentative = count
        self._views = []
        self._slots = []

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill a layer's tentative rows with keys and values [K, `num_tentative`, D]; casts."""
        if not self._slots:
            self._slots = self._make_views(self.length, self.length + self.num_tentative)
        done = 0
        for slot in self._slots:
            count = slot.keys[layer].shape[1]
            is_all = count == keys.shape[1]
            slot.keys[layer].copy_(keys if is_all else keys.narrow(1, done, count))
            slot.values[layer].copy_(values if is_all else values.narrow(1, done, count))
            done += count

    def spans(self, layer: int) -> list[Span]:
        """Keys and values of a layer, tentative rows included, in as few views as possible."""
        if not self._views and self.length + self.num_tentative:
            self._views = self._make_views(0, self.length + self.num_tentative)
        return [Span(run.keys[layer], run.values[layer]) for run in self._views]

    def span_rows(self) -> list[int]:
        """Rows of each span, tentative rows included."""
        return [count for _, count in self.runs(0, self.length + self.num_tentative)]

    def commit(self, count: int) -> None:
        """Keep the first `count` tentative rows and drop the others."""
        assert 0 <= count <= self.num_tentative, "only tentative rows can be committed"
        self._set_length(self.length + count)

    def truncate_to(self, length: int) -> None:
        """Keep the first `length` rows; everything behind them, tentative rows too, is dropped."""
        assert 0 <= length <= self.length, "a cache cannot be truncated to more than it has"
        self._set_length(length)

    def fork(self, at: int | None = None) -> KVCache:
        """A cache with the same first `at` rows; full pages are shared, a begun one is copied.

        Raises:
            CapacityError: No page is free for the copy.
        """
        at = self.length if at is None else at
        assert 0 <= at <= self.length, "a fork cannot have more rows than its donor"
        num_full, rest = divmod(at, PAGE_ROWS)
        own = self._pool.take(1, None) if rest else []
        if own:
            self._pool.copy_rows(self._pages[num_full], own[0], rest)
        self._pool.share(self._pages[:num_full])
        other = self._pool.new_cache()
        other._set_pages(self._pages[:num_full] + own)
        other.length = at
        return other

    def release(self) -> None:
        """Drop every row and page. The cache is empty then and may be used again. Idempotent."""
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.num_tentative = 0
        if _num_pages(length) < len(self._pages):
            self._drop_pages(_num_pages(length))
        self._views = []
        self._slots = []

    def _drop_pages(self, num_kept: int) -> None:
        self._pool.drop(self._pages[num_kept:])
        self._set_pages(self._pages[:num_kept])

    def _set_pages(self, pages: list[int]) -> None:
        self._pages = pages
        self._page_runs = []
        for page in pages:
            first, count = self._page_runs[-1] if self._page_runs else (page, 0)
            if page == first + count and count:
                self._page_runs[-1] = (first, count + 1)
            else:
                self._page_runs.append((page, 1))

    def _make_views(self, start: int, end: int) -> list[RunViews]:
        return [self._pool.views(row, count) for row, count in self.runs(start, end)]

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Rows [start, end) of this cache as (first row in the pool, rows)."""
        runs: list[tuple[int, int]] = []
        offset = 0  # of the run in this cache
        for page, num_pages in self._page_runs:
            rows = num_pages * PAGE_ROWS
            low, high = max(start, offset), min(end, offset + rows)
            if low < high:
                runs.append((page * PAGE_ROWS + low - offset, high - low))
            offset += rows
        return runs


def _num_pages(rows: int) -> int:
    return -(-rows // PAGE_ROWS)
