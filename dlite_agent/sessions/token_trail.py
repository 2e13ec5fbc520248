"""Token ids of a session as an array that grows, so that prefixes are compared at memory speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenTrail"]

_BLOCK = 4096  # tokens compared at once: a difference near the start ends the search early


class TokenTrail:
    """A copy of some token ids, 4 bytes each; extending it costs the new tokens only.

    Args:
        token_ids: Initial ids.

    Raises:
        OverflowError: An id does not fit 32 bits.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._buffer: NDArray[np.int32] = np.array(token_ids, dtype=np.int32)
        self._length = len(self._buffer)

    def __len__(self) -> int:
        """How many ids it holds."""
        return self._length

    @property
    def token_ids(self) -> list[int]:
        """All ids."""
        ids: list[int] = self._buffer[: self._length].tolist()
        return ids

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append ids; amortised over calls, nothing before them is copied."""
        length = self._length + len(token_ids)
        if length > len(self._buffer):
            buffer = np.empty(max(length, 2 * len(self._buffer)), dtype=np.int32)
            buffer[: self._length] = self._buffer[: self._length]
            self._buffer = buffer
        self._buffer[self._length : length] = token_ids
        self._length = length

    def truncate_to(self, length: int) -> None:
        """Forget the ids from `length` on; a longer `length` changes nothing."""
        self._length = min(self._length, length)

    def common_prefix(self, other: TokenTrail, *, more_than: int = 0) -> int:
        """How many ids the two share from the start, if those are more than `more_than`, else 0.

        The common case of a search, a trail that cannot beat the best one, costs one comparison.
        """
        limit = min(self._length, other._length)
        left, right = self._buffer, other._buffer
        if limit <= more_than or left[more_than] != right[more_than]:
            return 0
        for start in range(0, limit, _BLOCK):
            stop = min(start + _BLOCK, limit)
            differs = left[start:stop] != right[start:stop]
            first = int(differs.argmax())
            if differs[first]:
                shared = start + first
                return shared if shared > more_than else 0
        return limit
