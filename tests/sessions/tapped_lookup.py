"""A drafter that asks for taps and knows when its tokens are not the session's."""

from __future__ import annotations

from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.lookup import LookupDrafter, LookupState
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise


class TappedLookup(LookupDrafter):
    """Needs the taps of the last row, so that I3 is about something."""

    requires = Requires((0, 1), "last")

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        assert isinstance(state, LookupState)
        assert state.length == position + 1, "the drafter knows other tokens than the session"
        return super().propose(state, pending, hidden, position, noise, budget)
