"""A budget for thoughts: when it is spent, the closing tokens are written for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ThoughtBudget", "ThoughtCounter"]


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """The budget of one turn.

    Attributes:
        max_tokens: Most tokens inside thoughts, all thoughts of the turn together, the tokens that
            open and close them not counted; 0 closes a thought at once.
        close_ids: What closes a thought, at least one id: the first ends it, the others are what a
            template writes behind it.
        open_id: Opens a thought; None where the vocabulary has no such token.
        starts_open: The prompt ends inside a thought.

    Raises:
        ValueError: There is no closing id, or the budget is negative.
    """

    max_tokens: int
    close_ids: tuple[int, ...]
    open_id: int | None = None
    starts_open: bool = False

    def __post_init__(self) -> None:
        if not self.close_ids or self.max_tokens < 0:
            raise ValueError(f"{self!r} needs a closing id and a budget of at least 0")


class ThoughtCounter:
    """Follows one turn. What is forced depends on the tokens alone, not on how they were drafted.

    Args:
        budget: What is left at the start.

    Attributes:
        forced: What comes next, whatever the target would say; empty while it may choose.
        was_cut: Whether a thought was closed by us.
    """

    def __init__(self, budget: ThoughtBudget) -> None:
        self._budget = budget
        self._left = budget.max_tokens
        self._is_open = budget.starts_open
        self.forced: tuple[int, ...] = ()
        self.was_cut = False
        self._check()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Read committed tokens; forced ones come back here as well."""
        for token_id in token_ids:
            if self.forced:
                self.forced = self.forced[1:]
            elif token_id == self._budget.open_id and not self._is_open:
                self._is_open = True
                self._check()
            elif token_id == self._budget.close_ids[0]:
                self._is_open = False
            elif self._is_open:
                self._left -= 1
                self._check()

    def num_free(self, drafted: Sequence[int]) -> int:
        """How many tokens of a draft come before anything that would be forced behind them."""
        ahead = ThoughtCounter(self._budget)
        ahead._left, ahead._is_open, ahead.forced = self._left, self._is_open, self.forced
        for count, token_id in enumerate(drafted):
            ahead.advance((token_id,))
            if ahead.forced:
                return count
        return len(drafted)

    def _check(self) -> None:
        if self._is_open and self._left <= 0:
            self._is_open = False
            self.was_cut = True
            self.forced = self._budget.close_ids
