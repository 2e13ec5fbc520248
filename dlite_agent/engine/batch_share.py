"""One turn's part in the batch: what the scheduler lets it have, and what it had."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchShare"]


@dataclass(slots=True)
class BatchShare:
    """Set by whoever runs the turn, before each of its steps; read by the turn.

    Attributes:
        chunk_rows: Most rows of its next prefill chunk.
        may_wait: Other turns run, so memory that is missing now may come; when it is False, waiting
            is of no use.
        is_parked: Nobody reads its stream, so that it should not keep its session from others.
        num_forwards: Forwards that computed rows of this turn.
        num_turns: Turns in these forwards, itself included, added up.
    """

    chunk_rows: int
    may_wait: bool = False
    is_parked: bool = False
    num_forwards: int = 0
    num_turns: int = 0

    @property
    def mean_turns(self) -> float:
        """Turns in a forward on average; 1.0 alone, and before the first."""
        return self.num_turns / self.num_forwards if self.num_forwards else 1.0

    def count(self, num_turns: int) -> None:
        """A forward of so many turns computed rows of this one."""
        self.num_forwards += 1
        self.num_turns += num_turns
