"""Where a session copied from lately, and so where it may go on after an edit."""

from __future__ import annotations

from dataclasses import dataclass

from dlite_agent.drafters.suffix_index import Match, SuffixIndex

__all__ = ["CopyTrail"]

_MAX_COPIES = 4
_WINDOW = 16
"""How far beside a copy's place, in tokens, it may go on: the length of a span that was replaced,
in the source or here."""
_MAX_GAP = 64
_MIN_LENGTH = 3
_MAX_CREDIT = 12.0
_CREDIT = 0.5
_GAP_PRICE = 0.2
_MAX_CATCH_UP = 64


@dataclass(slots=True)
class _Copy:
    """A run of tokens that equals an earlier one.

    Attributes:
        shift: How much later it stands than its source.
        end: Its last token.
        length: Its tokens.
    """

    shift: int
    end: int
    length: int


class CopyTrail:
    """The last few copies of a session.

    An edit ends a copy, and behind it the copy often goes on: the same call with another value, the
    same line with another name. The n-gram that stands behind the edit is short by then, and stands
    in many places. Those near the place that the copy had reached get credit for its length: half a
    token for each of its tokens, at most 12, less 0.2 for each token of edit and of displacement.

    Only says where to look. Whatever it holds after a rewind, its places are compared with the
    session's tokens.
    """

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def copy(self) -> CopyTrail:
        """An independent copy."""
        other = CopyTrail()
        other._copies = [_Copy(held.shift, held.end, held.length) for held in self._copies]
        return other

    def follow(self, index: SuffixIndex) -> None:
        """Let each copy end where it does by now, and forget those that ended long ago."""
        newest = index.length - 1
        for held in self._copies:
            grown = index.common_run(held.end + 1 - held.shift, held.end + 1, _MAX_CATCH_UP)
            held.end += grown
            held.length += grown
        self._copies = [held for held in self._copies if newest - held.end <= _MAX_GAP]

    def places(self, index: SuffixIndex) -> list[int]:
        """Positions near the copies' places that hold the session's last token."""
        newest = index.length - 1
        found: list[int] = []
        for held in self._copies:
            if held.length >= _MIN_LENGTH and held.end < newest:
                place = newest - held.shift
                found += index.same_as_last(place - _WINDOW, place + _WINDOW + 1)
        return found

    def credit(self, index: SuffixIndex, match: Match) -> float:
        """Tokens of match length that a match is worth more, as it may continue a copy."""
        newest, best = index.length - 1, 0.0
        for held in self._copies:
            displaced = abs(newest - match.position - held.shift)
            gap = newest - match.length - held.end
            if held.length >= _MIN_LENGTH and displaced <= _WINDOW and gap >= 0:
                earned = min(_CREDIT * held.length, _MAX_CREDIT)
                best = max(best, earned - _GAP_PRICE * (displaced + gap))
        return best

    def note(self, index: SuffixIndex, match: Match, worth: float) -> None:
        """Remember that the session was taken to copy from a match."""
        newest = index.length - 1
        shift = newest - match.position
        for held in self._copies:
            if held.shift == shift:
                if newest - match.length > held.end:  # it went on behind an edit
                    held.length = match.length + min(held.length, _WINDOW)
                held.end = newest
                return
        self._copies.append(_Copy(shift, newest, max(match.length, int(worth))))
        self._copies.sort(key=lambda held: min(held.length, 16) - 0.25 * (newest - held.end))
        del self._copies[:-_MAX_COPIES]
