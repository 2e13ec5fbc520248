"""Which source drafts, and how much: expected accepted tokens over measured cost, or nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dlite_agent.decoding.controller_state import ControllerState, SourcePart
from dlite_agent.decoding.draft_length import best_length
from dlite_agent.decoding.load import Load
from dlite_agent.decoding.round_clock import RoundClock
from dlite_agent.decoding.source import AskedSource, Candidate, Occasion, Prices, Source
from dlite_agent.decoding.track_record import NO_CELL, Purse, TrackRecord
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.cost_table import MAX_ROWS, CostTable
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["Controller", "ControllerState", "Source"]

_NOTHING = DraftBlock()
_ASLEEP = DraftBlock(wants_taps=False)
_MAX_UNREAD = 256
_SHARE_STEP = 0.05
_EXPLORE_EVERY = 32
_MIN_REACHED = 0.3
"""Chance of a whole block to be right, below which nobody is asked to extend it."""


class Controller:
    """A drafter that is made of others; see `docs/concepts/drafting.md`.

    Every round it asks the sources that are worth asking, estimates for each proposed token how
    probable it is to be right (from how often such evidence was right in this session, and in all),
    and drafts the block and length that bring the most expected tokens a second, by the cost table
    and with the rows of the other turns in the forward. Where nothing beats plain decoding it
    drafts nothing, and the round costs what a plain one does. `TrackRecord` bounds the loss.

    Stateless itself but for what all sessions have in common: acceptance counts, and host time and
    gain of each source. Used by one thread at a time.

    Args:
        sources: The cheapest to ask first.
        costs: Of the target's forwards.
        load: The other turns of the forward; None for a turn that is always alone.
        clock: Seconds, to learn what asking a source costs and how far rounds are from the table;
            None assumes both, so that nothing that is measured decides (`reproducible=True`).
        name: As the drafter is called in statistics.

    Attributes:
        asked_sources: The sources, with what is known of each.
        requires: The taps of all sources together.

    Raises:
        ConfigurationError: There is no source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        costs: CostTable,
        *,
        load: Load | None = None,
        clock: Callable[[], float] | None = time.perf_counter,
        name: str = "auto",
    ) -> None:
        if not sources:
            raise ConfigurationError("a controller needs at least one source; use drafter='null'")
        self.name = name
        self.costs = costs
        self.load = load if load is not None else Load()
        self._clock = clock
        self.asked_sources = [AskedSource(source) for source in sources]
        self.requires = Requires.joined([source.drafter.requires for source in sources])
        self._rounds = RoundClock()
        self._accepted_share = 0.5

    def start(self, token_ids: list[int]) -> ControllerState:
        """Start every source; nothing is known of the session."""
        purse, part = Purse(), 1.0 / len(self.asked_sources)
        drafters = [asked.source.drafter for asked in self.asked_sources]
        parts = [
            SourcePart(
                drafter.start(token_ids),
                TrackRecord(purse, part),
                reads_taps=bool(drafter.requires.layer_ids),
            )
            for drafter in drafters
        ]
        return ControllerState(parts, len(token_ids))

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """The block that pays best, or nothing."""
        own = _own(state)
        own.round_number += 1
        own.is_verifying = True
        if own.round_number < own.wakes_at or budget < 1:
            return self._nothing(own)
        started_s = self._clock() if self._clock is not None else 0.0
        occasion = Occasion(pending, hidden, position, noise, min(budget, MAX_ROWS - 1))
        prices = self._prices(position)
        block = self._drafted(own, occasion, prices)
        own.rest()
        own.drafted = block.token_ids
        own.is_watching = True
        if self._clock is not None:
            now_s = self._clock()
            self._note_asking(own, now_s - started_s)
            own.sent = (now_s, self._table_s(position, len(block.token_ids)))
        return block if block.token_ids else self._nothing(own)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids; those that follow a proposal say how good it was."""
        own = _own(state)
        own.length += len(token_ids)
        own.unread.extend(token_ids)
        if not own.is_verifying:  # the sources know more, and nobody has foreseen it
            self._forget(own)
            own.wake()
        elif own.is_watching:
            self._learn(own, token_ids)
        own.is_verifying = False
        if len(own.unread) >= _MAX_UNREAD:
            self._read(own)

    def read_rows(
        self, state: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """Give the taps of kept rows to the sources that read all positions."""
        own = _own(state)
        self._read(own)
        for part, asked in zip(own.parts, self.asked_sources, strict=True):
            asked.read_rows(part.drafts, hidden, first_position)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on; what was learnt stays."""
        own = _own(state)
        own.is_verifying = False
        self._forget(own)
        if length >= own.length:
            return
        num_read = own.length - len(own.unread)
        del own.unread[max(0, length - num_read) :]
        if length < num_read:
            for part, asked in zip(own.parts, self.asked_sources, strict=True):
                asked.source.drafter.truncate_to(part.drafts, length)
        own.length = length

    def fork(self, state: DraftState | None) -> ControllerState:
        """An independent copy, with what was learnt."""
        own = _own(state)
        purse = replace(own.parts[0].record.purse)
        parts = [
            replace(
                part,
                drafts=asked.source.drafter.fork(part.drafts),
                record=part.record.copy(purse),
            )
            for part, asked in zip(own.parts, self.asked_sources, strict=True)
        ]
        return own.with_parts(parts)

    def _nothing(self, own: ControllerState) -> DraftBlock:
        """No draft, with taps where somebody may read them, or where all are kept."""
        is_read = own.round_number >= own.taps_at or self.requires.positions == "all"
        return _NOTHING if is_read else _ASLEEP

    def _learn(self, own: ControllerState, token_ids: list[int]) -> None:
        """See how good the sources' last blocks were, and how long the round took."""
        is_earning = False
        for part, asked in zip(own.parts, self.asked_sources, strict=True):
            is_earning |= part.record.see(token_ids, asked.counts)
        if is_earning:
            own.wake()
        if own.sent is not None and self._clock is not None:
            sent_s, table_s = own.sent
            self._rounds.note(self._clock() - sent_s, table_s, is_drafted=bool(own.drafted))
        own.sent = None
        if own.drafted:
            self._note_share(own.drafted, token_ids)
            own.drafted = ()
        own.is_watching = any(part.record.is_watching for part in own.parts)

    def _forget(self, own: ControllerState) -> None:
        """Learn nothing from what is committed next."""
        for part in own.parts:
            part.record.forget()
        own.sent, own.drafted, own.is_watching = None, (), False

    def _read(self, own: ControllerState) -> None:
        """Give the sources the ids that they have not seen."""
        if own.unread:
            for part, asked in zip(own.parts, self.asked_sources, strict=True):
                asked.source.drafter.commit(part.drafts, own.unread)
            own.unread = []

    def _prices(self, position: int) -> Prices:
        load, costs, factor = self.load, self.costs, self._rounds.factor
        rows, num_turns = 1 + load.rows, 1 + load.turns
        plain_s = costs.round_s(rows, context=position, turns=num_turns)

        def costs_s(count: int) -> list[float]:
            curve = costs.curve(rows, count, context=position, turns=num_turns)
            return curve if factor == 1.0 else [curve[0], *(factor * s for s in curve[1:])]

        num_certain = num_turns + load.drafted * self._accepted_share
        return Prices(costs_s, num_certain, plain_s / num_turns)

    def _table_s(self, position: int, num_drafted: int) -> float:
        load = self.load
        rows = 1 + load.rows + num_drafted
        return self.costs.round_s(rows, context=position, turns=1 + load.turns)

    def _drafted(self, own: ControllerState, occasion: Occasion, prices: Prices) -> DraftBlock:
        number, best = self._best(own, occasion, prices)
        if best is None or not self._stake(own.parts[number].record, best, prices):
            return _NOTHING
        block = DraftBlock(
            best.token_ids[: best.length], best.confidence[: best.length], best.origin
        )
        is_whole = best.length == len(best.token_ids) < occasion.budget
        if is_whole and len(own.parts) > 1 and math.prod(best.chances) >= _MIN_REACHED:
            block = self._extended(own, number, (block, best.chances), occasion, prices)
        return block

    def _best(
        self, own: ControllerState, occasion: Occasion, prices: Prices
    ) -> tuple[int, Candidate | None]:
        """Ask whoever is worth asking; the candidate that gains most, and whose it is."""
        best_number, best = 0, None
        for number, (part, asked) in enumerate(zip(own.parts, self.asked_sources, strict=True)):
            if own.round_number < part.record.wakes_at:
                continue
            usual_s = asked.usual_gain * prices.plain_s - asked.asking_s
            known_s = best.gain_s if best is not None else 0.0
            until_look = -own.round_number % _EXPLORE_EVERY
            if number and usual_s <= known_s and until_look:
                if best is None:
                    part.record.wakes_at = own.round_number + until_look
                continue
            if not asked.may_ask(part.record, own.round_number, prices):
                continue
            started_s = self._clock() if self._clock is not None else 0.0
            self._read(own)
            found = asked.candidate(part.drafts, part.record, occasion, prices)
            if self._clock is not None:
                own.asked.append((number, self._clock() - started_s))
            if found is not None and (best is None or found.gain_s > best.gain_s):
                best_number, best = number, found
        return best_number, best

    def _stake(self, record: TrackRecord, best: Candidate, prices: Prices) -> bool:
        """Pay for the candidate's rows, for fewer if need be; False where nothing is drafted."""
        costs_s = best.costs_s
        affordable = record.affordable(costs_s[: best.length + 1])
        if affordable < best.length:
            best.length, _ = best_length(best.chances[:affordable], costs_s, prices.num_certain)
        if best.length:
            record.stake(best.length, costs_s[best.length] - costs_s[0])
        return best.length > 0

    def _extended(
        self,
        own: ControllerState,
        number: int,
        first: tuple[DraftBlock, list[float]],
        occasion: Occasion,
        prices: Prices,
    ) -> DraftBlock:
        """A block with what another source would draft, had the whole block been accepted."""
        block, chances = first
        for other, (part, asked) in enumerate(zip(own.parts, self.asked_sources, strict=True)):
            drafter = asked.source.drafter
            if other == number or drafter.requires.layer_ids:
                continue  # the taps of the block's last token are not there yet
            if not asked.may_ask(part.record, own.round_number, prices):
                continue
            self._read(own)
            drafter.commit(part.drafts, list(block.token_ids))
            found = asked.ask(part.drafts, part.record, occasion.behind(block.token_ids))
            drafter.truncate_to(part.drafts, own.length)
            if found is not None:
                return self._joined(part.record, (block, chances), found, prices)
        return block

    def _joined(
        self,
        record: TrackRecord,
        first: tuple[DraftBlock, list[float]],
        more: Candidate,
        prices: Prices,
    ) -> DraftBlock:
        """Two blocks as one, as far as the second pays and can be paid for."""
        block, chances = first
        start = len(block.token_ids)
        all_ids, all_chances = (*block.token_ids, *more.token_ids), [*chances, *more.chances]
        costs_s = prices.costs_s(len(all_ids))
        record.watch(all_ids, [NO_CELL] * start + more.cells, all_chances)
        length, _ = best_length(all_chances, costs_s, prices.num_certain)
        count = record.affordable(costs_s[start : length + 1]) if length > start else 0
        if not count:
            return block
        end = start + count
        record.stake(end, costs_s[end] - costs_s[start])
        confidence = (*block.confidence, *more.confidence[:count])
        origin = f"{block.source}+{more.origin}"
        return DraftBlock(all_ids[:end], confidence if len(confidence) == end else (), origin)

    def _note_asking(self, own: ControllerState, all_s: float) -> None:
        """Book the time of a proposal: to each who was asked his own, and a share of ours.

        In seconds of the table: on a machine that others use too, rounds take longer as well;
        before it is known how much, nobody pays more than was thought.
        """
        asked, pace = own.asked, self._rounds.pace
        own.asked = []
        ours_s = all_s - sum(theirs_s for _, theirs_s in asked)
        for number, theirs_s in asked:
            took_s = (theirs_s + ours_s / len(asked)) / (pace or 1.0)
            noted_s = self.asked_sources[number].note_asking(took_s)
            if pace is not None:
                own.parts[number].record.book(noted_s)

    def _note_share(self, drafted: tuple[int, ...], committed: list[int]) -> None:
        """Learn which share of drafted rows is accepted, for turns that share a forward."""
        num_right = 0
        for drafted_id, token_id in zip(drafted, committed, strict=False):
            if drafted_id != token_id:
                break
            num_right += 1
        self._accepted_share += _SHARE_STEP * (num_right / len(drafted) - self._accepted_share)


def _own(state: DraftState | None) -> ControllerState:
    assert isinstance(state, ControllerState), "the state of another drafter"
    return state
