"""When a turn ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlite_agent.decoding.constraint import Constraint
from dlite_agent.decoding.thoughts import ThoughtBudget

__all__ = ["Finish", "StopRules"]

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class StopRules:
    """The limits of one turn.

    Attributes:
        stop_token_ids: Ids that end the turn; the id itself is committed.
        max_tokens: Most tokens to commit, at least 1.
        thoughts: Budget for thoughts; None is no limit.
        fixed_rows: Rows of every forward, for audits: drafts are cut to fit, and rows that nobody
            reads fill what they leave; None computes what is needed.
        constraint: Grammar of the turn, at its start; None allows every token. Mutated.
        max_draft: Most tokens of a draft; None: what is left of the turn.

    Raises:
        ValueError: `max_tokens`, `fixed_rows` or `max_draft` is below 1.
    """

    stop_token_ids: frozenset[int]
    max_tokens: int
    thoughts: ThoughtBudget | None = None
    fixed_rows: int | None = None
    constraint: Constraint | None = None
    max_draft: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "fixed_rows", "max_draft"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value!r}; use at least 1")

    def draft_budget(self, num_committed: int) -> int:
        """Most tokens that a round may draft, since it adds one of its own."""
        limits = [max(0, self.max_tokens - num_committed - 1)]
        if self.fixed_rows is not None:
            limits.append(self.fixed_rows - 1)
        if self.max_draft is not None:
            limits.append(self.max_draft)
        return min(limits)

    def finish(self, last_token_id: int, num_committed: int) -> Finish | None:
        """Why the turn is over after `num_committed` tokens, or None while it is not."""
        if last_token_id in self.stop_token_ids:
            return "stop"
        return "length" if num_committed >= self.max_tokens else None
