"""What a controller remembers of a session."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dlite_agent.decoding.track_record import TrackRecord
from dlite_agent.drafters.drafter import DraftState

__all__ = ["ControllerState", "SourcePart"]


@dataclass(slots=True)
class SourcePart:
    """A source's part of a session.

    Attributes:
        drafts: What the source itself remembers.
        record: How often it was right, and what it may cost.
        reads_taps: It reads the target's hidden states.
    """

    drafts: DraftState | None
    record: TrackRecord
    reads_taps: bool


@dataclass(slots=True)
class ControllerState:
    """Sources' states, ids that they have not read, and when anybody is asked again.

    Ids reach the sources late, many at a time: one that is not asked costs next to nothing.

    Attributes:
        parts: Of the sources, in their order.
        length: Ids of the session.
        unread: Its last ids, which no source has been given.
        drafted: What is in the forward.
        round_number: Rounds so far.
        wakes_at: Round before which nobody is asked.
        taps_at: Round from which forwards capture taps, so that they are there when somebody who
            reads them is asked.
        is_verifying: There was a proposal since the last commit.
        is_watching: What is committed next says how good somebody was.
        asked: Who was asked in this round, and the seconds that it took.
        sent: When the last proposal was handed out, and what its forward takes by the cost table.
    """

    parts: list[SourcePart]
    length: int
    unread: list[int] = field(default_factory=list)
    drafted: tuple[int, ...] = ()
    round_number: int = 0
    wakes_at: int = 0
    taps_at: int = 0
    is_verifying: bool = False
    is_watching: bool = False
    asked: list[tuple[int, float]] = field(default_factory=list)
    sent: tuple[float, float] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the sources' states, of ids and of counts."""
        drafts = [part.drafts for part in self.parts]
        counts = sum(part.record.counts.nbytes for part in self.parts)
        held = sum(state.nbytes for state in drafts if state is not None)
        return held + counts + 8 * len(self.unread)

    def with_parts(self, parts: list[SourcePart]) -> ControllerState:
        """An independent copy with other parts."""
        return replace(self, parts=parts, unread=self.unread.copy(), asked=[], sent=None)

    def rest(self) -> None:
        """Let rounds be plain until somebody can be asked again, taps one round less."""
        self.wakes_at = min(part.record.wakes_at for part in self.parts)
        reading = [part.record.wakes_at for part in self.parts if part.reads_taps]
        self.taps_at = min(reading, default=self.wakes_at) - 1

    def wake(self) -> None:
        """Let all sources be asked in the next round, where their balances pay."""
        for part in self.parts:
            part.record.wakes_at = 0
        self.wakes_at = self.taps_at = 0
