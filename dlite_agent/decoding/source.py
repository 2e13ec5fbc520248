"""One source of drafts: how it is asked, and what all sessions together know of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlite_agent.decoding.acceptance import AcceptanceCounts, evidence_cell
from dlite_agent.decoding.draft_length import best_length
from dlite_agent.decoding.track_record import TrackRecord
from dlite_agent.drafters.drafter import Drafter, DraftState, read_rows
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["AskedSource", "Candidate", "Occasion", "Prices", "Source"]

_ASSUMED_ASKING_S = 30e-6
"""Host time of asking a source that only looks something up."""
_AVERAGE_STEP = 0.05
_MAX_OUTLIER = 4.0
_MIN_REACHED = 0.02
"""Chance of a token and all before it to be right, below which nothing behind it pays."""


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter that a controller may ask.

    Attributes:
        drafter: Proposes.
        match_length: How many tokens its last proposal for a state followed a copy of, asked right
            after it; None where the drafter does not copy.
        asking_s: Seconds of asking it, as far as is known before it was asked. Without a clock it
            stays that.
    """

    drafter: Drafter
    match_length: Callable[[DraftState | None], int] | None = None
    asking_s: float = _ASSUMED_ASKING_S


class Occasion(NamedTuple):
    """What a source is asked with; as for `Drafter.propose`."""

    pending: int
    hidden: TargetHidden | None
    position: int
    noise: KeyedNoise
    budget: int

    def behind(self, token_ids: Sequence[int]) -> Occasion:
        """The occasion after a block has been accepted; its taps are not there yet."""
        count = len(token_ids)
        return Occasion(token_ids[-1], None, self.position + count, self.noise, self.budget - count)


class Prices(NamedTuple):
    """The next forward.

    Attributes:
        costs_s: Gives the seconds with 0, 1, ... k drafted tokens of this turn, for a k.
        num_certain: Tokens that it brings without any.
        plain_s: This turn's share of its seconds without any; what an accepted token saves.
    """

    costs_s: Callable[[int], Sequence[float]]
    num_certain: float
    plain_s: float


@dataclass(slots=True)
class Candidate:
    """A block, and what to think of it.

    Attributes:
        token_ids: k >= 1 proposed tokens; those that are hardly ever reached are left out.
        confidence: The source's own, for each of them; or empty.
        origin: What the block calls itself, for statistics.
        cells: The evidence for each (`evidence_cell`).
        chances: How probable each is to be right, given that those before it are.
        costs_s: Seconds of the forward with 0, 1, ... k of them.
        length: How many of them pay best.
        gain_s: What they are expected to gain over a plain round.
    """

    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    origin: str
    cells: list[int]
    chances: list[float]
    costs_s: Sequence[float] = ()
    length: int = 0
    gain_s: float = 0.0

    def weigh(self, prices: Prices) -> None:
        """Find the best length."""
        self.costs_s = prices.costs_s(len(self.token_ids))
        self.length, expected = best_length(self.chances, self.costs_s, prices.num_certain)
        added_s = self.costs_s[self.length] - self.costs_s[0]
        self.gain_s = expected * prices.plain_s - added_s


@dataclass(slots=True)
class AskedSource:
    """A source, and what its askings so far say.

    Attributes:
        source: The source.
        counts: Acceptance in all sessions.
        asking_s: Seconds of asking, on average.
        usual_gain: What its candidates gain, on average, in plain rounds of the turn, so that it
            says something under another load too; infinite before the first.
    """

    source: Source
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts.of_engine)
    asking_s: float = field(init=False)
    usual_gain: float = math.inf

    def __post_init__(self) -> None:
        self.asking_s = self.source.asking_s

    def may_ask(self, record: TrackRecord, round_number: int, prices: Prices) -> bool:
        """Whether a session's balances can pay for asking now."""
        usual_gain_s = self.usual_gain * prices.plain_s
        return record.settle(round_number, prices.plain_s, self.asking_s, usual_gain_s)

    def read_rows(
        self, drafts: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """Give the taps of kept rows to a drafter that reads all positions."""
        drafter = self.source.drafter
        own = _taps_of(drafter.requires.layer_ids, hidden)
        read_rows(drafter, drafts, own, first_position, hidden.states.shape[1])

    def candidate(
        self, drafts: DraftState | None, record: TrackRecord, occasion: Occasion, prices: Prices
    ) -> Candidate | None:
        """Ask, weigh the block, and let the record watch it."""
        found = self.ask(drafts, record, occasion)
        gain = 0.0
        if found is not None:
            found.weigh(prices)
            record.watch(found.token_ids, found.cells, found.chances)
            gain = found.gain_s / prices.plain_s
        if math.isinf(self.usual_gain):
            self.usual_gain = gain
        self.usual_gain += _AVERAGE_STEP * (gain - self.usual_gain)
        return found

    def note_asking(self, took_s: float) -> float:
        """Learn what asking costs, and return it; what interrupts us is not the source's cost."""
        took_s = min(took_s, _MAX_OUTLIER * self.asking_s)
        self.asking_s += _AVERAGE_STEP * (took_s - self.asking_s)
        return took_s

    def ask(
        self, drafts: DraftState | None, record: TrackRecord, occasion: Occasion
    ) -> Candidate | None:
        """The source's block with the chance of each of its tokens; None where it has none."""
        drafter = self.source.drafter
        pending, hidden, position, noise, budget = occasion
        block = drafter.propose(
            drafts, pending, _taps_of(drafter.requires.layer_ids, hidden), position, noise, budget
        )
        token_ids = block.token_ids[:budget]
        if not token_ids:
            return None
        match_length = self.source.match_length
        first_rank = max(1, match_length(drafts)) if match_length is not None else 1
        confidence = block.confidence if len(block.confidence) >= len(token_ids) else ()
        cells: list[int] = []
        chances: list[float] = []
        known: dict[int, float] = {}
        reached, sure = 1.0, None
        for slot in range(len(token_ids)):
            if confidence:
                sure = confidence[slot]
            cell = evidence_cell(first_rank + slot, sure)
            chance = known.get(cell)
            if chance is None:
                # tokens of a cell differ little in confidence, and count as one
                chance = known[cell] = record.chance(cell, self.counts.prior(cell, sure))
            cells.append(cell)
            chances.append(chance)
            reached *= chance
            if reached < _MIN_REACHED:
                break
        count = len(cells)
        return Candidate(token_ids[:count], confidence[:count], block.source, cells, chances)


def _taps_of(layer_ids: tuple[int, ...], hidden: TargetHidden | None) -> TargetHidden | None:
    """What one source asked for of what was captured for all; the same object where it is that."""
    if hidden is None or not layer_ids:
        return None
    if hidden.layer_ids == layer_ids:
        return hidden
    rows = [hidden.layer_ids.index(layer) for layer in layer_ids]
    return TargetHidden(hidden.states[rows], layer_ids)
