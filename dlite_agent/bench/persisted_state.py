"""What a drafter with a history would draft after a restore, had its state been saved too.

A session saves ids and KV; the state of a history drafter begins anew. Here it goes through a file
of its own beside the session's, so that both can be measured.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from dlite_agent.drafters.block import BlockDrafter
from dlite_agent.drafters.drafter import DraftBlock, Drafter, DraftState, Requires
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["HistoryKeeper", "keeping_history"]

_FILE = "draft-state.safetensors"


def keeping_history(drafter: Drafter) -> Drafter:
    """The same; where it has a history that can be saved and lost, as a `HistoryKeeper`."""
    if isinstance(drafter, BlockDrafter | Eagle3Drafter):
        return HistoryKeeper(drafter)
    return drafter


class HistoryKeeper:
    """A history drafter whose sessions' last state can be saved, and that can start from a file.

    For one session at a time; otherwise it is the drafter.

    Args:
        drafter: Drafts.
        folder: Start from the state that was saved there; None: anew.
    """

    def __init__(
        self, drafter: BlockDrafter | Eagle3Drafter, *, folder: Path | None = None
    ) -> None:
        self._drafter = drafter
        self._folder = folder
        self._last: DraftState | None = None

    @property
    def name(self) -> str:
        """The drafter's."""
        return self._drafter.name

    @property
    def requires(self) -> Requires:
        """The drafter's."""
        return self._drafter.requires

    def save(self, folder: Path) -> None:
        """Write the state that last proposed, or was started."""
        tensors = self._drafter.saved(self._last)
        save_file({name: part.contiguous() for name, part in tensors.items()}, folder / _FILE)

    def anew(self, folder: Path | None = None) -> HistoryKeeper:
        """Another one of the same drafter, for a session that begins; see `folder` above."""
        return HistoryKeeper(self._drafter, folder=folder)

    def start(self, token_ids: list[int]) -> DraftState | None:
        """Anew, or as it was saved."""
        drafter = self._drafter
        if self._folder is None:
            self._last = drafter.start(token_ids)
            return self._last
        tensors = load_file(self._folder / _FILE)
        self._last = drafter.restored(token_ids, tensors)
        drafter.truncate_to(self._last, len(token_ids))
        return self._last

    def read_rows(
        self, state: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """The drafter's."""
        self._drafter.read_rows(state, hidden, first_position)

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """The drafter's."""
        self._last = state
        return self._drafter.propose(state, pending, hidden, position, noise, budget)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """The drafter's."""
        self._drafter.commit(state, token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """The drafter's."""
        self._drafter.truncate_to(state, length)

    def fork(self, state: DraftState | None) -> DraftState | None:
        """The drafter's."""
        return self._drafter.fork(state)
