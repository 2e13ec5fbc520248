# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""No drafts: the decode loop is plain decoding then, the baseline of speed and lossless tests."""

from __future__ import annotations

from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["NullDrafter"]

_NOTHING = DraftBlock(source="null")


class NullDrafter:
    """Proposes nothing and remembers nothing."""

    name = "null"
    requires = Requires()

    def start(self, token_ids: list[int]) -> DraftState | None:
        """Nothing to remember."""
        return None

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """An empty block."""
        return _NOTHING

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Nothing to do."""

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Nothing to do."""

    def fork(self, state: DraftState | None) -> DraftState | None:
        """Nothing to copy."""
        return None
