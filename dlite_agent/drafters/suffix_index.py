"""Everything a session has held, found again by its last tokens; forks share what they have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dlite_agent.drafters.ngram_table import Ids, NgramTable, hash_ngram
from dlite_agent.kernels.ngram_kernels import MAX_PROBES, NgramKernels

__all__ = ["Match", "SuffixIndex"]

_MIN_CAPACITY = 256
_GROWTH = 1.25
# A rewound table has positions that are no longer ours; so many times the probes are walked past.
_WALK = 8
_EVERYTHING = 2**62


class Match(NamedTuple):
    """An earlier occurrence of the last tokens.

    Attributes:
        length: How many tokens agree, counted backwards; at most what the search looked at.
        position: Where the last of them stands; what followed begins one later.
    """

    length: int
    position: int


class _Tokens:
    """Ids in one array. A timeline may add to it in place where nobody else reads behind it."""

    def __init__(self, held: Ids, capacity: int) -> None:
        self.ids: Ids = np.zeros(capacity, dtype=np.int32)
        self.ids[: held.shape[0]] = held
        self.view = self.ids.data
        self.address = self.ids.ctypes.data
        self.is_shared = False
        self.used = held.shape[0]


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A table that never changes again, of which positions before `stop` are ours."""

    table: NgramTable
    stop: int

    def __len__(self) -> int:
        return self.stop - self.table.start


class SuffixIndex:
    """Token ids and an index of their n-grams.

    The index is a table that grows with the session, and frozen tables that forks share. A fork
    freezes the table as it is; rewinding into a frozen one only lowers where it ends. Tables are
    merged so that each is more than twice as long as the next, so there are few. Ids are copied
    when the second of two forks appends, 4 bytes a token.

    Args:
        sizes: n-gram sizes, longest first.
        kernels: Enter and find n-grams; None does so in Python and numpy.
    """

    def __init__(self, sizes: tuple[int, ...], kernels: NgramKernels | None = None) -> None:
        self.sizes = sizes
        self._kernels = kernels
        self._structs: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64], int]
        self._has_structs = False
        self._length = 0
        self._tokens = _Tokens(np.zeros(0, dtype=np.int32), _MIN_CAPACITY)
        self._frozen: tuple[_Frozen, ...] = ()
        self._tail = NgramTable(sizes, 0, kernels=kernels)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; what forks share counts in each."""
        return self._tokens.ids.nbytes + sum(table.nbytes for table in self.tables)

    @property
    def tables(self) -> tuple[NgramTable, ...]:
        """The tables of the index, the oldest first."""
        return (*(frozen.table for frozen in self._frozen), self._tail)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        start, end = self._length, self._length + len(token_ids)
        self._own_tokens(end)
        if end - start == 1:
            self._tokens.view[start] = token_ids[0]  # without the cost of an array operation
        else:
            self._tokens.ids[start:end] = token_ids
        self._tokens.used = self._length = end
        if self._tail.stop == self._tail.start:
            self._replace_tail(start, end - start)
        self._tail.append(self._tokens.ids, self._tokens.view, self._tokens.address, end)

    def truncate_to(self, length: int) -> None:
        """Forget tokens from `length` on."""
        if length >= self._length:
            return
        if length > self._tail.start:
            self._tail.truncate_to(self._tokens.ids, length)
        else:
            self._replace_tail(length)
            self._frozen = tuple(
                _Frozen(frozen.table, min(frozen.stop, length))
                for frozen in self._frozen
                if frozen.table.start < length
            )
        self._length = length

    def fork(self) -> SuffixIndex:
        """An independent copy that shares the arrays; amortised O(tokens since the last fork)."""
        self._freeze()
        self._tokens.is_shared = True
        other = SuffixIndex.__new__(SuffixIndex)
        other.sizes, other._kernels = self.sizes, self._kernels
        other._length, other._tokens, other._frozen = self._length, self._tokens, self._frozen
        other._replace_tail(self._length)
        return other

    def token(self, position: int) -> int:
        """The id at a position."""
        found: int = self._tokens.view[position]
        return found

    def last(self, count: int) -> list[int]:
        """The last `count` ids, or all."""
        found: list[int] = self._tokens.view[max(0, self._length - count) : self._length].tolist()
        return found

    def search(self, max_probes: int, max_length: int, ahead: Sequence[int] = ()) -> list[Match]:
        """Earlier occurrences of the last tokens, the newest first.

        All share the longest n-gram size of which there is one. Chains hold other n-grams as well:
        after `max_probes` positions the search of a size gives up.

        Args:
            max_probes: Most positions to look at for each size.
            max_length: Most tokens to compare; at least the longest size.
            ahead: Tokens that would follow the last one; they are taken for the end.
        """
        if not ahead and self._kernels is not None and max_probes <= MAX_PROBES:
            count = min(max_length, self._length)
            end = self._tokens.address + self._tokens.ids.itemsize * (self._length - count)
            return self._find_natively((end, count), max_probes, self._length - 1)
        context = self.last(max(0, max_length - len(ahead)))
        context.extend(ahead[-max_length:])
        return self.find(context, max_probes, before=self._length - (not ahead))

    def find(
        self, context: Sequence[int], max_probes: int, before: int | None = None
    ) -> list[Match]:
        """Occurrences of the end of a context, as `search`; it may be another timeline's.

        Args:
            context: Tokens, the newest last; all of them are compared at most.
            max_probes: Most positions to look at for each size.
            before: Only positions before this one.
        """
        limit = self._length if before is None else before
        if self._kernels is not None and max_probes <= MAX_PROBES:
            ids = np.array(context, dtype=np.int32)
            return self._find_natively((ids.ctypes.data, len(ids)), max_probes, limit)
        recent = list(reversed(context))
        for row, size in enumerate(self.sizes):
            if len(recent) < size:
                continue
            positions = self._probe(row, hash_ngram(context[-size:]), max_probes, limit)
            matches = [Match(self._matched(position, recent), position) for position in positions]
            if found := [match for match in matches if match.length >= size]:
                return found
        return []

    def match_at(self, position: int, max_length: int) -> Match:
        """How many tokens that end at a position agree with the end."""
        return Match(self._matched(position, self.last(max_length)[::-1]), position)

    def same_as_last(self, start: int, stop: int) -> list[int]:
        """Positions in [start, stop), before the last token, that hold the same id as it."""
        start, stop = max(0, start), min(stop, self._length - 1)
        if start >= stop:
            return []
        last = self._tokens.view[self._length - 1]
        found = self._tokens.view[start:stop].tolist()
        return [start + i for i, token_id in enumerate(found) if token_id == last]

    def common_run(self, first: int, second: int, max_length: int) -> int:
        """How many tokens agree from two positions on."""
        view, length = self._tokens.view, self._length
        count = 0
        while count < max_length and second + count < length:
            if view[first + count] != view[second + count]:
                break
            count += 1
        return count

    def continuation(self, position: int, count: int, ahead: Sequence[int] = ()) -> list[int]:
        """The `count` tokens after `position`; past the end, the copy repeats itself.

        Args:
            position: Of the last token of a match.
            count: How many.
            ahead: Tokens taken for the end, as in `search`.
        """
        stop = min(position + 1 + count, self._length)
        found: list[int] = self._tokens.view[position + 1 : stop].tolist()
        found.extend(ahead[: count - len(found)])
        period = self._length + len(ahead) - 1 - position
        while len(found) < count:
            found.append(found[len(found) - period])
        return found

    def _find_natively(self, context: tuple[int, int], max_probes: int, limit: int) -> list[Match]:
        """`find` through the kernels; a context by its address and length."""
        assert self._kernels is not None, "whoever asks has looked"
        if not self._has_structs:
            ordered = self._ordered_tables()
            count, newest = len(ordered), _EVERYTHING  # the tail only has what is ours
            addresses = (ctypes.c_void_p * count)(*[table.address for table, _ in ordered])
            stops = (ctypes.c_int64 * count)(newest, *[stop for _, stop in ordered[1:]])
            self._structs, self._has_structs = (addresses, stops, count), True
        address = self._tokens.address
        found = self._kernels.find(self._structs, address, context, limit, max_probes)
        return [Match(*place) for place in found]

    def _replace_tail(self, start: int, num_tokens: int = 0) -> None:
        self._tail = NgramTable(self.sizes, start, num_tokens, self._kernels)
        self._has_structs = False

    def _probe(self, row: int, ngram_hash: int, max_probes: int, limit: int) -> list[int]:
        """Positions before `limit` in the buckets of an n-gram, the newest first."""
        found: list[int] = []
        for table, stop in self._ordered_tables():
            end = min(stop, limit)
            position = table.newest(row, ngram_hash)
            for _ in range(_WALK * max_probes):
                if position < 0 or len(found) == max_probes:
                    break
                if position < end:
                    found.append(position)
                position = table.older(row, position)
        return found

    def _ordered_tables(self) -> list[tuple[NgramTable, int]]:
        tables = [(frozen.table, frozen.stop) for frozen in reversed(self._frozen)]
        return [(self._tail, self._tail.stop), *tables]

    def _matched(self, position: int, recent: list[int]) -> int:
        view, count = self._tokens.view, 0
        for token_id in recent:
            if count > position or view[position - count] != token_id:
                break
            count += 1
        return count

    def _own_tokens(self, length: int) -> None:
        """Make the array ours to write from `self.length` on, with room for `length`."""
        tokens = self._tokens
        may_write = not tokens.is_shared or tokens.used == self._length
        capacity = tokens.ids.shape[0]
        if length > capacity:
            capacity = max(length, int(capacity * _GROWTH))
        elif may_write:
            return
        self._tokens = _Tokens(tokens.ids[: self._length], capacity)

    def _freeze(self) -> None:
        if self._tail.stop == self._tail.start:
            return
        kept = [*self._frozen, _Frozen(self._tail, self._tail.stop)]
        while len(kept) > 1 and len(kept[-2]) <= 2 * len(kept[-1]):
            last, before = kept.pop(), kept.pop()
            start, tokens = before.table.start, self._tokens
            table = NgramTable(self.sizes, start, last.stop - start, self._kernels)
            table.append(tokens.ids, tokens.view, tokens.address, last.stop)
            kept.append(_Frozen(table, last.stop))
        self._frozen = tuple(kept)
        self._replace_tail(self._length)
