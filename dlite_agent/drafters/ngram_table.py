"""Where n-grams stood: hash buckets of newest positions, and chains to the older ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import mul

import numpy as np
import numpy.typing as npt

from dlite_agent.kernels.ngram_kernels import NgramKernels, NgramStruct

__all__ = ["NgramTable", "hash_ngram"]

Ids = npt.NDArray[np.int32]

_MIN_BUCKETS = 256
_MAX_LOAD = 3
_GROWTH = 1.25
_SCALAR_TOKENS = 16
_MASK = (1 << 64) - 1
# Odd multipliers of a multilinear hash: powers of the golden ratio's, Knuth's choice, mod 2 ** 64.
_MULTIPLIERS = [pow(0x9E3779B97F4A7C15, 2 * place + 1, 1 << 64) for place in range(32)]
_NUMPY_MULTIPLIERS = np.array(_MULTIPLIERS, dtype=np.uint64)


def hash_ngram(token_ids: Sequence[int]) -> int:
    """Hash up to 32 ids to 64 bits, of which the upper ones are the better."""
    hashed: int = sum(map(mul, token_ids, _MULTIPLIERS)) & _MASK
    return hashed


class NgramTable:
    """For each n-gram size, chains of the positions in [start, stop) whose n-grams share a bucket.

    An n-gram is known by the position of its last token, and may begin before `start`. A row `g`
    maps a bucket to the newest position of size `sizes[g]`, and a position to the next older one of
    its bucket. Appending is amortised O(1) a token and popping undoes it. The table holds no ids:
    whoever reads a chain compares the tokens, so other n-grams in it cost time and nothing else.

    The number of buckets is a power of two and doubles when a bucket has three positions on
    average. Chains are left as they are then: a position's chain holds those of the old, larger
    bucket, so nothing is lost.

    Args:
        sizes: n-gram sizes, at most 32.
        start: First position.
        num_tokens: Room for that many at once.
        kernels: Enter n-grams; None does so in Python and numpy.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        start: int,
        num_tokens: int = 0,
        kernels: NgramKernels | None = None,
    ) -> None:
        self.sizes = sizes
        self.start = start
        self.stop = start
        self._kernels = kernels
        self._sizes = np.array(sizes, dtype=np.int64)
        self._struct = NgramStruct(
            sizes=self._sizes.ctypes.data,
            multipliers=_NUMPY_MULTIPLIERS.ctypes.data,
            num_sizes=len(sizes),
            start=start,
        )
        self.address = ctypes.addressof(self._struct)
        """Of the `NgramStruct`; stays the same."""
        self._reserve_previous(num_tokens)
        self._set_buckets(num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays: for each size 4 a token and 1.3 to 2.7 for buckets, and slack."""
        return self._last.nbytes + self._previous.nbytes

    def __len__(self) -> int:
        return self.stop - self.start

    def newest(self, row: int, ngram_hash: int) -> int:
        """The newest position in the bucket of an n-gram, or -1."""
        position: int = self._last_views[row][ngram_hash >> self._shift]
        return position

    def older(self, row: int, position: int) -> int:
        """The next older position in the chain of one, or -1."""
        found: int = self._previous_views[row][position - self.start]
        return found

    def append(self, ids: Ids, view: memoryview, address: int, stop: int) -> None:
        """Enter the n-grams that end in [self.stop, stop).

        Args:
            ids: All ids of the timeline; those before `stop` are read.
            view: The same memory, for reading one by one.
            address: The same memory, for kernels.
            stop: End of what is entered; the table's new end.
        """
        first, self.stop = self.stop, stop
        self._reserve_previous(stop - self.start)
        if len(self) > _MAX_LOAD * self._num_buckets:
            self._grow_buckets(ids, first)
        if self._kernels is not None:
            self._kernels.enter(self.address, address, first, stop)
            return
        for row, size in enumerate(self.sizes):
            begin = max(first, size - 1)
            if stop - begin > _SCALAR_TOKENS:
                self._enter(row, begin, self._buckets(ids, size, begin, stop))
            else:
                self._enter_each(row, begin, view)

    def truncate_to(self, ids: Ids, stop: int) -> None:
        """Take out the n-grams that end at `stop` or later; `ids` still holds them."""
        for row, size in enumerate(self.sizes):
            begin = max(stop, size - 1)
            if begin < self.stop:
                buckets = self._buckets(ids, size, begin, self.stop)
                older = self._previous[row, begin - self.start : self.stop - self.start]
                # newest first: where a bucket repeats, what preceded the oldest is written last
                self._last[row, buckets[::-1]] = older[::-1]
        self.stop = max(self.start, min(self.stop, stop))

    def _reserve_previous(self, num_tokens: int) -> None:
        held = getattr(self, "_previous", None)
        if held is not None and num_tokens <= held.shape[1]:
            return
        capacity = num_tokens if held is None else max(num_tokens, int(held.shape[1] * _GROWTH))
        self._previous: Ids = np.full(
            (len(self.sizes), max(capacity, _MIN_BUCKETS)), -1, dtype=np.int32
        )
        if held is not None:
            self._previous[:, : held.shape[1]] = held
        self._previous_views = [row.data for row in self._previous]
        self._struct.previous = self._previous.ctypes.data
        self._struct.capacity = self._previous.shape[1]

    def _set_buckets(self, num_tokens: int) -> None:
        bits = (_MIN_BUCKETS - 1).bit_length()
        while num_tokens > _MAX_LOAD << bits:
            bits += 1
        self._num_buckets = 1 << bits
        self._shift = 64 - bits
        self._last: Ids = np.full((len(self.sizes), self._num_buckets), -1, dtype=np.int32)
        self._last_views = [row.data for row in self._last]
        self._struct.last, self._struct.shift = self._last.ctypes.data, self._shift

    def _grow_buckets(self, ids: Ids, stop: int) -> None:
        """More buckets for [start, stop), newest positions only."""
        self._set_buckets(len(self))
        for row, size in enumerate(self.sizes):
            begin = max(self.start, size - 1)
            if begin < stop:
                buckets = self._buckets(ids, size, begin, stop)
                # where a bucket repeats, the newest is written last
                self._last[row, buckets] = np.arange(begin, stop, dtype=np.int32)

    def _enter(self, row: int, begin: int, buckets: npt.NDArray[np.int64]) -> None:
        positions = np.arange(begin, begin + buckets.shape[0], dtype=np.int32)
        order = np.argsort(buckets, kind="stable")
        grouped = buckets[order]
        older = self._last[row, grouped]
        is_repeat = grouped[1:] == grouped[:-1]
        older[1:][is_repeat] = positions[order[:-1]][is_repeat]
        self._previous[row, positions[order] - self.start] = older
        self._last[row, buckets] = positions

    def _enter_each(self, row: int, begin: int, view: memoryview) -> None:
        """The same for a few tokens, without the cost of starting array operations."""
        last, previous, size = self._last_views[row], self._previous_views[row], self.sizes[row]
        for position in range(begin, self.stop):
            bucket = hash_ngram(view[position - size + 1 : position + 1]) >> self._shift
            previous[position - self.start] = last[bucket]
            last[bucket] = position

    def _buckets(self, ids: Ids, size: int, begin: int, stop: int) -> npt.NDArray[np.int64]:
        """Buckets of the n-grams of one size that end in [begin, stop)."""
        read = ids[begin - size + 1 : stop].astype(np.uint64)
        count = stop - begin
        hashes = np.zeros(count, dtype=np.uint64)
        for place in range(size):
            hashes += read[place : place + count] * _NUMPY_MULTIPLIERS[place]
        return (hashes >> np.uint64(self._shift)).astype(np.int64)
