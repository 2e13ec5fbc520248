"""What followed, in a session's own ids, the last time that it held the tokens before a slot.

The taps of one position hold what a target is about to say, and not the rest of a name that it
copies out of its history. The ids of that history hold it: a block's head may look there (ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_MATCH", "NO_HINT", "CopyCursor", "Hint", "TokenHistory", "copy_hints"]

MAX_MATCH = 8
"""Longest match that is told apart; longer ones count as this."""

_BACK = np.arange(MAX_MATCH)
_MANY = 64

Ids = npt.NDArray[np.int32]


class Hint(NamedTuple):
    """A candidate for the next token.

    Attributes:
        token_id: What followed the newest of the longest matches; -1: the last token is new.
        matched: How many tokens agree, from 0 to `MAX_MATCH`.
    """

    token_id: int
    matched: int


NO_HINT = Hint(-1, 0)


class TokenHistory:
    """The ids of a session, 4 bytes each; nothing else is remembered.

    Args:
        token_ids: Those that there are.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids: Ids = np.zeros(max(256, 2 * len(token_ids)), dtype=np.int32)
        self.length = 0
        self.append(token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return 4 * self.length

    def append(self, token_ids: Sequence[int]) -> None:
        """Add ids at the end."""
        end = self._room(len(token_ids))
        self._ids[self.length : end] = token_ids
        self.length = end

    def truncate_to(self, length: int) -> None:
        """Forget ids from `length` on."""
        self.length = min(self.length, length)

    def fork(self) -> TokenHistory:
        """An independent copy."""
        return TokenHistory(self._ids[: self.length])  # type: ignore[arg-type]  # an array is read

    def with_room(self, ahead: int) -> Ids:
        """All ids, and behind them room for at least `ahead` tokens."""
        self._room(ahead)
        return self._ids

    def cursor(self, ahead: int) -> CopyCursor:
        """Begin to look behind the last id, and behind up to `ahead` tokens after it.

        The tokens lie in the room behind the session's ids until it grows: one cursor at a time.
        """
        self._room(ahead)
        return CopyCursor(self._ids, self.length)

    def _room(self, count: int) -> int:
        """Make room for more ids, and return where they would end."""
        end = self.length + count
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[: self.length], np.zeros(end, dtype=np.int32)])
        return end


class CopyCursor:
    """Hints for one slot after another, as its tokens are chosen.

    Args:
        ids: With room behind `length` for what is pushed.
        length: Ids that count.
    """

    def __init__(self, ids: Ids, length: int) -> None:
        self._ids, self._length = ids, length
        self._place = -1
        self.hint = self._find()

    def push(self, token_id: int) -> None:
        """Take a token as the next one."""
        ids, hint = self._ids, self.hint
        ids[self._length] = token_id
        self._length += 1
        if token_id == hint.token_id and hint.matched < MAX_MATCH:  # the longest match goes on
            self._place += 1
            self.hint = Hint(int(ids[self._place + 1]), hint.matched + 1)
        else:
            self.hint = self._find()

    def _find(self) -> Hint:
        """Look for the newest of the longest matches."""
        ids, last = self._ids, self._length - 1
        places = (ids[:last] == ids[last]).nonzero()[0]
        if len(places) > _MANY and last:
            longer = places[(places > 0) & (ids[places - 1] == ids[last - 1])]
            places = longer if len(longer) else places[-1:]
        if not len(places):
            return NO_HINT
        agree = ids[places[:, None] - _BACK] == ids[last - _BACK]
        agree &= places[:, None] >= _BACK
        lengths = agree[:, : last + 1].cumprod(axis=1).sum(axis=1)
        newest = len(places) - 1 - int(lengths[::-1].argmax())
        self._place = int(places[newest])
        return Hint(int(ids[self._place + 1]), int(lengths[newest]))


def copy_hints(token_ids: Sequence[int], rows: Sequence[int]) -> Ids:
    """Hints for the tokens behind some rows, each from the ids up to its row alone.

    Args:
        token_ids: Of a whole transcript.
        rows: Positions whose next token is asked for, ascending.

    Returns:
        Candidates (0 where there is none) and lengths of the matches, [len(rows), 2].
    """
    ids = np.asarray([*token_ids, 0], dtype=np.int32)
    hints: list[Hint] = []
    cursor, at = None, -1
    for row in rows:
        if cursor is not None and row == at + 1:
            cursor.push(int(ids[row]))
        else:
            cursor = CopyCursor(ids, row + 1)
        at = row
        hints.append(cursor.hint)
    return np.maximum(np.asarray(hints, dtype=np.int32).reshape(-1, 2), 0)
