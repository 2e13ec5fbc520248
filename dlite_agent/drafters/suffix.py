# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""Suffix drafting: the session's own past, wherever it held the last tokens before, copied on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.history import Match, TokenHistory
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["SuffixDrafter", "SuffixState"]

_SIZES = (8, 3, 1)
_MAX_PROBES = 16
_MAX_LENGTH = 32


@dataclass(slots=True)
class SuffixState:
    """One session's tokens and their index.

    Attributes:
        history: The tokens.
        match_length: How many tokens the match of the last proposal agreed in; 0 without one.
    """

    history: TokenHistory
    match_length: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the index; what forks share counts in each."""
        return self.history.nbytes

    def match(self, ahead: Sequence[int] = ()) -> Match:
        """The earlier occurrence that shares most tokens with the end; of several, the newest.

        Args:
            ahead: Drafted tokens that are taken for the end, so that a match can extend them.

        Returns:
            How many tokens agree (0: none, and no position), and where the last of them stands.
        """
        matches = self.history.search(_MAX_PROBES, _MAX_LENGTH, ahead)
        return max(matches, default=Match(0, -1))

    def continuation(self, position: int, count: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """The `count` tokens after a match."""
        return tuple(self.history.continuation(position, count, ahead))


class SuffixDrafter:
    """Drafts what followed the longest earlier occurrence of the session's last tokens.

    Args:
        max_block: Most tokens to propose.

    Raises:
        ConfigurationError: A value is out of range.
    """

    name = "suffix"
    requires = Requires()

    def __init__(self, *, max_block: int = 16) -> None:
        if max_block < 1:
            raise ConfigurationError(f"max_block is {max_block!r}; use at least 1")
        self._max_block = max_block

    def start(self, token_ids: list[int]) -> SuffixState:
        """Index a session's tokens; about half a microsecond a token."""
        state = SuffixState(TokenHistory(_SIZES))
        state.history.append(token_ids)
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
        """A continuation, or nothing where the last token is new to the session."""
        match = _own(state).match()
        _own(state).match_length = match.length
        count = min(budget, self._max_block, 2 * match.length)
        if count <= 0:
            return DraftBlock(source=self.name)
        return DraftBlock(_own(state).continuation(match.position, count), source=self.name)

    def match_length(self, state: DraftState | None) -> int:
        """How many tokens the match of the last proposal agreed in; 0 without one."""
        return _own(state).match_length

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids."""
        _own(state).history.append(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on."""
        _own(state).history.truncate_to(length)

    def fork(self, state: DraftState | None) -> SuffixState:
        """An independent copy that shares the index so far."""
        return SuffixState(_own(state).history.fork())


def _own(state: DraftState | None) -> SuffixState:
    assert isinstance(state, SuffixState), "the state of another drafter"
    return state
