# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""Suffix drafting: the session's own past, wherever it held the last tokens before, copied on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlite_agent.drafters.copy_trail import CopyTrail
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.suffix_index import Match, SuffixIndex
from dlite_agent.drafters.workspace import Workspace
from dlite_agent.errors import ConfigurationError
from dlite_agent.kernels.ngram_kernels import NgramKernels
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["SuffixDrafter", "SuffixState"]

_NOTHING = DraftBlock(source="suffix")
_SIZES = (8, 3, 1)
_MAX_PROBES = 16
_MAX_LENGTH = 32
# A shorter match of its own lets a session look into the workspace, for a longer one.
_FOREIGN_LENGTH = 5
# A place that shares a token less counts half.
_WEIGHT_BASE = 2.0
# The weight of "something new" beside that of the places: fitted on other transcripts, see _chance.
_NOVELTY, _NOVELTY_DECAY = 3.0, 1.3


@dataclass(slots=True)
class SuffixState:
    """One session's tokens, their index, and where it copied from.

    Attributes:
        index: Holds the tokens.
        trail: The last copies.
        matched: How many tokens the last proposal followed a copy of; 0 where it proposed nothing.
    """

    index: SuffixIndex
    trail: CopyTrail = field(default_factory=CopyTrail)
    matched: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the index; what forks share counts in each."""
        return self.index.nbytes

    def match(self, ahead: Sequence[int] = ()) -> Match:
        """The earlier occurrence that shares most tokens with the end; of several, the newest.

        Args:
            ahead: Drafted tokens that are taken for the end, so that a match can extend them.

        Returns:
            How many tokens agree (0: none, and no position), and where the last of them stands.
        """
        matches = self.index.search(_MAX_PROBES, _MAX_LENGTH, ahead)
        return max(matches, default=Match(0, -1))

    def continuation(self, position: int, count: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """The `count` tokens after a match."""
        return tuple(self.index.continuation(position, count, ahead))

    def weighed(self) -> list[tuple[float, Match]]:
        """All places that the end may be a copy of, best first, with what each is worth.

        That is the number of tokens that agree, and credit for one that continues a copy behind an
        edit. Of equals the newer is better.
        """
        index, trail = self.index, self.trail
        trail.follow(index)
        matches = index.search(_MAX_PROBES, _MAX_LENGTH)
        known = {match.position for match in matches}
        for place in trail.places(index):
            if place not in known:
                known.add(place)
                matches.append(index.match_at(place, _MAX_LENGTH))
        worth = [(match.length + trail.credit(index, match), match) for match in matches]
        return sorted(worth, key=lambda item: (item[0], item[1].position), reverse=True)


class SuffixDrafter:
    """Drafts what followed the earlier place that the session's end copies.

    The longest match wins, over the session's whole life: what tools printed, files, earlier calls.
    Each token's confidence is the chance that it is right, given that those before it are; the
    block ends where the chance of reaching a token falls below `min_reached`. Costs no forward.

    Args:
        max_block: Most tokens to propose.
        min_reached: Chance that a token and all before it are right, below which it is not
            proposed. 0 proposes whole blocks, for a caller that cuts them itself.
        workspace: Gives what other sessions of the tenant have read and written, for where the
            session itself does not hold five tokens like its last and the workspace holds more;
            None for nothing. One drafter is for one tenant.
        kernels: Of the index; None for Python's.

    Raises:
        ConfigurationError: A value is out of range.

    Source: the expected number of accepted tokens from the frequency of continuations is
        SuffixDecoding's (arXiv:2411.04975); the index, the matches behind edits and the weights are
        ours.
    """

    name = "suffix"
    requires = Requires()

    def __init__(
        self,
        *,
        max_block: int = 16,
        min_reached: float = 0.05,
        workspace: Callable[[], Workspace] | None = None,
        kernels: NgramKernels | None = None,
    ) -> None:
        if max_block < 1 or not 0.0 <= min_reached <= 1.0:
            raise ConfigurationError(
                f"max_block is {max_block!r} and min_reached {min_reached!r}; "
                "use at least 1 and a chance"
            )
        self._max_block = max_block
        self._min_reached = min_reached
        self._workspace = workspace
        self._kernels = kernels

    def start(self, token_ids: list[int]) -> SuffixState:
        """Index a session's tokens; about half a microsecond a token."""
        state = SuffixState(SuffixIndex(_SIZES, self._kernels))
        state.index.append(token_ids)
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
        own = _own(state)
        own.matched = 0
        count = min(budget, self._max_block)
        if count < 1:
            return _NOTHING
        places = own.weighed()
        own_length = places[0][1].length if places else 0
        if self._workspace is not None and own_length < _FOREIGN_LENGTH:
            foreign = self._foreign_block(own, count, self._workspace(), own_length)
            if foreign is not None:
                return foreign
        if not places:
            return _NOTHING
        worth, match = places[0]
        own.trail.note(own.index, match, worth)
        own.matched = match.length
        copies = [(worth, own.index.continuation(match.position, count)) for worth, match in places]
        return self._block(copies, match.length, self.name)

    def _foreign_block(
        self, own: SuffixState, count: int, workspace: Workspace, own_length: int
    ) -> DraftBlock | None:
        """What followed in other sessions of the tenant, where more agrees there than here."""
        copies = workspace.copies(own.index.last(_MAX_LENGTH), _MAX_PROBES, count)
        if not copies or copies[0][0] <= own_length:
            return None
        own.matched = copies[0][0]
        worth = [(float(length), copy) for length, copy in copies]
        return self._block(worth, own.matched, "workspace")

    def _block(
        self, copies: list[tuple[float, list[int]]], matched: int, source: str
    ) -> DraftBlock:
        """The first copy, as far as it and the others that agree with it make it probable.

        Args:
            copies: What each place is worth and what followed there, the best first.
            matched: Tokens that agree at the best place.
            source: Of the block.
        """
        best_worth, block = copies[0]
        agreeing = [(math.pow(_WEIGHT_BASE, worth - best_worth), copy) for worth, copy in copies]
        confidence: list[float] = []
        reached = 1.0
        for slot, token_id in enumerate(block):
            weight = sum(share for share, _ in agreeing)
            agreeing = [item for item in agreeing if item[1][slot : slot + 1] == [token_id]]
            agreed = sum(share for share, _ in agreeing)
            chance = _chance(agreed, weight, matched + slot)
            reached *= chance
            if reached < self._min_reached:
                break
            confidence.append(chance)
        return DraftBlock(tuple(block[: len(confidence)]), tuple(confidence), source)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids."""
        _own(state).index.append(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on."""
        _own(state).index.truncate_to(length)

    def fork(self, state: DraftState | None) -> SuffixState:
        """An independent copy that shares the index so far."""
        own = _own(state)
        return SuffixState(own.index.fork(), own.trail.copy(), own.matched)


def _own(state: DraftState | None) -> SuffixState:
    assert isinstance(state, SuffixState), "the state of another drafter"
    return state


def _chance(agreed: float, weight: float, matched: int) -> float:
    """How probable the continuation is, by the places that agree and the length of the match.

    A new token competes with all places, with a weight that falls with the match: after 1, 4 and 16
    tokens a lone place is right in 25, 67 and 92 % of the cases.
    """
    return agreed / (weight + _NOVELTY * math.pow(matched, -_NOVELTY_DECAY))
