"""Keys and values of all sessions: a pool of ref-counted pages, and caches that are lists of pages.

A layer's pool is one tensor `[2, K, P, D]` (keys and values, kv heads, rows, head dim) whose P rows
are cut into pages of `PAGE_ROWS`. A `KVCache` holds page numbers; row i of a session stands in page
`i // PAGE_ROWS`. Growth takes the page behind the last one whenever it is free, so a session is
mostly one or two contiguous *spans*, and it never copies.

On a CPU the pool is reserved virtually: memory is committed when a page is first written, so the
pool may have the size of the budget rather than of the contexts in use. `KVPool.close` gives all of
it back; single pages are only reused.

    # rows of a cache:  [0, length) committed · [length, length + num_tentative) tentative, gone
    # unless committed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dlite_agent.errors import CapacityError, ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.models.target import TargetConfig

__all__ = ["PAGE_ROWS", "KVCache", "KVPool", "Span"]

PAGE_ROWS = 256


class Span(NamedTuple):
    """Contiguous keys and values [K, S, D]; views of the pool, valid until the cache changes."""

    keys: Tensor
    values: Tensor


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
        shape = (2, config.num_kv_heads, self.num_pages * PAGE_ROWS, config.head_dim)
        try:
            layers = [
                torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
            ]
        except RuntimeError as error:  # what torch's allocators raise
            raise ConfigurationError(
                f"cannot reserve max_kv_bytes={max_bytes!r} on {str(device)!r}: {error}; lower "
                "max_kv_bytes"
            ) from error
        self.keys: list[Tensor] = [layer[0] for layer in layers]  # L times [K, P, D]
        self.values: list[Tensor] = [layer[1] for layer in layers]
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
        return KVCache(self)

    def close(self) -> None:
        """Give the memory back. Caches of this pool must not be used any more. Idempotent."""
        self.keys = []
        self.values = []
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
        if not pages or self.is_closed:
            return
        self._references[pages] -= 1
        assert int(self._references[pages].min()) >= 0, "a page was dropped twice"
        self._num_used -= int((self._references[pages] == 0).sum())

    def copy_rows(self, source_page: int, target_page: int, count: int) -> None:
        """Copy the first `count` rows of a page to another, all layers."""
        source, target = source_page * PAGE_ROWS, target_page * PAGE_ROWS
        for layer in (*self.keys, *self.values):
            layer[:, target : target + count] = layer[:, source : source + count]

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
        # Contiguous rows as (first row in the pool, count): of all rows, and of the tentative ones.
        self._runs: list[tuple[int, int]] = []
        self._slots: list[tuple[int, int]] = []
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

        A last page that another cache also holds is copied first, so that nobody else's rows are
        overwritten.

        Raises:
            CapacityError: The pool has too few free pages; the cache is unchanged.
        """
        assert count >= 1, "at least one row"
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
            self._pages[first_new:] = new_pages
        elif num_needed < len(self._pages):
            self._drop_pages(num_needed)
        self.num_tentative = count
        self._index()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill the tentative rows of a layer.

        Args:
            layer: Layer number.
            keys: [K, Q, D] with Q = `num_tentative`; cast to the pool's type.
            values: [K, Q, D].
        """
        pool_keys, pool_values = self._pool.keys[layer], self._pool.values[layer]
        if len(self._slots) == 1:
            row, count = self._slots[0]
            pool_keys.narrow(1, row, count).copy_(keys)
            pool_values.narrow(1, row, count).copy_(values)
            return
        done = 0
        for row, count in self._slots:
            pool_keys.narrow(1, row, count).copy_(keys[:, done : done + count])
            pool_values.narrow(1, row, count).copy_(values[:, done : done + count])
            done += count

    def spans(self, layer: int) -> list[Span]:
        """Keys and values of a layer, tentative rows included, in as few views as possible."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        return [
            Span(keys.narrow(1, row, count), values.narrow(1, row, count))
            for row, count in self._runs
        ]

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
        other = KVCache(self._pool)
        other._pages = self._pages[:num_full] + own
        self._pool.share(self._pages[:num_full])
        other.length = at
        other._index()
        return other

    def release(self) -> None:
        """Drop every row and page. The cache is empty then and may be used again. Idempotent."""
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.num_tentative = 0
        if _num_pages(length) < len(self._pages):
            self._drop_pages(_num_pages(length))
        self._index()

    def _drop_pages(self, num_kept: int) -> None:
        self._pool.drop(self._pages[num_kept:])
        del self._pages[num_kept:]

    def _index(self) -> None:
        """Note the runs and the tentative slots that the pages and lengths make."""
        total = self.length + self.num_tentative
        self._runs = _runs(self._pages, 0, total)
        self._slots = _runs(self._pages, self.length, total) if self.num_tentative else []


def _num_pages(rows: int) -> int:
    return -(-rows // PAGE_ROWS)


def _runs(pages: list[int], start: int, end: int) -> list[tuple[int, int]]:
    """Rows [start, end) of a session as (first row in the pool, rows), adjacent pages joined."""
    runs: list[tuple[int, int]] = []
    row = start
    while row < end:
        number, offset = divmod(row, PAGE_ROWS)
        count = min(PAGE_ROWS - offset, end - row)
        place = pages[number] * PAGE_ROWS + offset
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((place, count))
        row += count
    return runs
