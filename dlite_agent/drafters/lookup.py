# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""Prompt lookup: what followed the last time that the session held the same few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["LookupDrafter", "LookupState"]

_MIN_CAPACITY = 1024
# Knuth's multiplicative hash, 64 bits: the golden ratio, made odd.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Ids = npt.NDArray[np.int32]


class LookupState:
    """Token ids and, for each n-gram size, chains of the positions whose n-grams share a hash.

    An n-gram is known by the position of its last token. `_last[g]` maps a hash bucket to the
    newest such position of size g and `_previous[g]` a position to the next older one of its
    bucket, so appending is amortised O(1) a token, truncation undoes it, and a lookup follows a
    bounded chain: nothing here grows with the context.

    Args:
        sizes: n-gram sizes, longest first.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._length = 0
        self._allocate(_MIN_CAPACITY)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: 4 a token and 8 a token and size; twice that after they grew."""
        return self._ids.nbytes + self._last.nbytes + self._previous.nbytes

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    def append(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        start, end = self._length, self._length + len(token_ids)
        if end > self._ids.shape[0]:
            self._grow(end)
        self._ids[start:end] = token_ids
        self._length = end
        self._index(start)

    def truncate_to(self, length: int) -> None:
        """Forget tokens from `length` on."""
        for row, size in enumerate(self._sizes):
            first = max(length, size - 1)
            if first < self._length:
                buckets = self._buckets(size, first)
                # newest first: where a bucket repeats, what preceded the oldest is written last
                self._last[row, buckets[::-1]] = self._previous[row, first : self._length][::-1]
        self._length = min(self._length, length)

    def copy(self) -> LookupState:
        """An independent copy; two array copies and no hashing."""
        other = LookupState.__new__(LookupState)
        other._sizes = self._sizes
        other._length = self._length
        other._shift = self._shift
        other._ids, other._last, other._previous = (
            self._ids.copy(),
            self._last.copy(),
            self._previous.copy(),
        )
        return other

    def find(self, max_probes: int) -> tuple[int, int]:
        """Where the newest earlier occurrence of the last n-gram ends, longest size first.

        Args:
            max_probes: Most chain entries to look at for each size; other n-grams of the bucket
                count.

        Returns:
            (position of its last token, size), or (-1, 0).
        """
        end = self._length
        for row, size in enumerate(self._sizes):
            if end <= size:
                continue
            wanted = self._ids[end - size : end].tolist()
            position = int(self._previous[row, end - 1])
            for _ in range(max_probes):
                if position < 0:
                    break
                if self._ids[position - size + 1 : position + 1].tolist() == wanted:
                    return position, size
                position = int(self._previous[row, position])
        return -1, 0

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """The `count` tokens after `position`; past the end, the copy repeats itself."""
        period = self._length - 1 - position
        found: list[int] = self._ids[
            position + 1 : min(position + 1 + count, self._length)
        ].tolist()
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)

    def _allocate(self, capacity: int) -> None:
        """Empty arrays for `capacity` tokens, a power of two."""
        self._ids: Ids = np.zeros(capacity, dtype=np.int32)
        self._last: Ids = np.full((len(self._sizes), capacity), -1, dtype=np.int32)
        self._previous: Ids = np.full((len(self._sizes), capacity), -1, dtype=np.int32)
        self._shift = np.uint64(64 - (capacity.bit_length() - 1))

    def _grow(self, length: int) -> None:
        held = self._ids[: self._length].copy()
        self._allocate(1 << (length - 1).bit_length())
        self._ids[: held.shape[0]] = held
        self._index(0)

    def _index(self, start: int) -> None:
        """Enter the n-grams that end in [start, length)."""
        for row, size in enumerate(self._sizes):
            first = max(start, size - 1)
            if first >= self._length:
                continue
            buckets = self._buckets(size, first)
            positions = np.arange(first, self._length, dtype=np.int32)
            order = np.argsort(buckets, kind="stable")
            grouped = buckets[order]
            previous = self._last[row, grouped]
            is_repeat = grouped[1:] == grouped[:-1]
            previous[1:][is_repeat] = positions[order[:-1]][is_repeat]
            self._previous[row, positions[order]] = previous
            # where a bucket repeats, the newest is written last
            self._last[row, buckets] = positions

    def _buckets(self, size: int, first: int) -> npt.NDArray[np.int64]:
        """Hash buckets of the n-grams of one size that end in [first, length)."""
        ids = self._ids[first - size + 1 : self._length].astype(np.uint64)
        count = self._length - first
        hashed = np.zeros(count, dtype=np.uint64)
        for offset in range(size):
            hashed = (hashed ^ ids[offset : offset + count]) * _MULTIPLIER
            hashed ^= hashed >> np.uint64(29)
        return (hashed * _MULTIPLIER >> self._shift).astype(np.int64)


class LookupDrafter:
    """Drafts what followed the newest earlier occurrence of the session's last tokens.

    The longest n-gram wins, and a match of n tokens is continued for at most 2n - 1. Agents repeat
    themselves: file contents, paths, identifiers and calls come back word for word. Costs no
    forward of its own and no memory of another session.

    On three SWE-agent transcripts (Qwen3's tokenizer, 4-, 3- and 2-grams) the slots after a 4-gram
    hit at 0.66, 0.46, 0.36, 0.35, and those after a 2-gram at 0.37, 0.22, 0.17, 0.12. Against seven
    tokens for every match, 2n - 1 forwards a quarter fewer rows for 3 % less acceptance length.

    Args:
        sizes: n-gram sizes to look for, in descending order.
        max_block: Most tokens to propose.
        max_probes: Most chain entries to follow for each size.

    Raises:
        ConfigurationError: A value is out of range.
    """

    name = "lookup"
    requires = Requires()

    def __init__(
        self, *, sizes: tuple[int, ...] = (4, 3, 2), max_block: int = 7, max_probes: int = 8
    ) -> None:
        if not sizes or min(sizes) < 1 or tuple(sorted(set(sizes), reverse=True)) != sizes:
            raise ConfigurationError(
                f"sizes is {sizes!r}; use positive n-gram sizes in descending order, e.g. (4, 3, 2)"
            )
        if max_block < 1 or max_probes < 1:
            raise ConfigurationError(
                f"max_block is {max_block!r} and max_probes {max_probes!r}; use at least 1"
            )
        self._sizes = sizes
        self._max_block = max_block
        self._max_probes = max_probes

    def start(self, token_ids: list[int]) -> LookupState:
        """Index a session's tokens; about a microsecond a token."""
        state = LookupState(self._sizes)
        state.append(token_ids)
        return state

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """A continuation, or nothing where the last tokens are new to the session."""
        found, size = _own(state).find(self._max_probes)
        count = min(budget, self._max_block, 2 * size - 1)
        token_ids = _own(state).continuation(found, count) if count > 0 else ()
        return DraftBlock(token_ids, source=self.name)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids."""
        _own(state).append(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on."""
        _own(state).truncate_to(length)

    def fork(self, state: DraftState | None) -> LookupState:
        """An independent copy."""
        return _own(state).copy()


def _own(state: DraftState | None) -> LookupState:
    assert isinstance(state, LookupState), "the state of another drafter"
    return state
