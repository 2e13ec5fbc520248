"""When a turn ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finish", "StopRules"]

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StopRules:
    """The limits of one turn.

    Attributes:
        stop_token_ids: Ids that end the turn; the id itself is committed.
        max_tokens: Most tokens to commit, at least 1.

    Raises:
        ValueError: `max_tokens` is below 1.
    """

    stop_token_ids: frozenset[int]
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens!r}; use at least 1")

    def draft_budget(self, num_committed: int) -> int:
        """Most tokens that a round may draft, since it adds one of its own."""
        return max(0, self.max_tokens - num_committed - 1)

    def finish(self, last_token_id: int, num_committed: int) -> Finish | None:
        """Why the turn is over after `num_committed` tokens, or None while it is not."""
        if last_token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_committed >= self.max_tokens else None
