"""What a drafter is: something that proposes tokens, with or without a state of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["DraftBlock", "DraftState", "Drafter", "HistoryDrafter", "Requires", "read_rows"]


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """k >= 0 proposed tokens.

    Attributes:
        token_ids: In the target's vocabulary.
        confidence: Per token, in [0, 1]; empty when unknown.
        source: Where the block came from, for statistics.
        wants_taps: The drafter reads what it requires of the forward that verifies this block;
            False where it will not be asked for more before another one.
    """

    token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    source: str = "null"
    wants_taps: bool = True


@dataclass(frozen=True, slots=True)
class Requires:
    """Which taps the loop must capture for a drafter.

    Attributes:
        layer_ids: Layers to tap; empty for none.
        positions: `last` needs only the row whose logits gave the pending token; `all` needs every
            committed row.
    """

    layer_ids: tuple[int, ...] = ()
    positions: Literal["none", "last", "all"] = "none"

    @classmethod
    def joined(cls, needed: Sequence[Requires]) -> Requires:
        """The taps of several drafters together."""
        layer_ids = tuple(sorted({layer for needs in needed for layer in needs.layer_ids}))
        positions = {needs.positions for needs in needed}
        if "all" in positions:
            return cls(layer_ids, "all")
        return cls(layer_ids, "last" if "last" in positions else "none")


class DraftState(Protocol):
    """A drafter's own history of one session; DLite's is None."""

    @property
    def nbytes(self) -> int:
        """Memory that this history holds."""
        ...


class Drafter(Protocol):
    """Proposes blocks. Stateless itself: whatever it remembers of a session is in the `DraftState`.

    The loop keeps the state in step with the session: every token id that the session holds,
    pending included, has been given to `start` or `commit`, in order.
    """

    @property
    def name(self) -> str:
        """What an option calls it, and the `source` of its blocks."""
        ...

    @property
    def requires(self) -> Requires:
        """Which taps it reads."""
        ...

    def start(self, token_ids: list[int]) -> DraftState | None:
        """State for a session that holds these ids. History-free drafters return None."""
        ...

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """Propose at most `budget` tokens to follow `pending`.

        Args:
            state: As kept for this session.
            pending: The sampled token that is not in the KV yet, [already committed to `state`].
            hidden: Taps of the row whose logits gave `pending`, [T, 1, E], when `requires` asks for
                them.
            position: Position of `pending`; the first proposed token would stand at `position + 1`.
            noise: The turn's noise, so that a drafter draws as the target will.
            budget: Most tokens that can be used; may be 0.
        """
        ...

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids that the session now holds."""
        ...

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget all ids from `length` on."""
        ...

    def fork(self, state: DraftState | None) -> DraftState | None:
        """An independent copy."""
        ...


@runtime_checkable
class HistoryDrafter(Drafter, Protocol):
    """A drafter that reads the taps of every position: `requires.positions` is `all`.

    Where a session was restored, or an error left its state in doubt, the state begins anew and
    holds the positions from there on; what it drafts is verified all the same.
    """

    def read_rows(
        self, state: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """Read the taps of rows that the session keeps.

        Args:
            state: As kept for this session; their ids are committed to it.
            hidden: [T, S, E] of positions [first_position, first_position + S).
            first_position: Rows from it on that were read before are replaced.
        """
        ...


def read_rows(
    drafter: Drafter,
    state: DraftState | None,
    hidden: TargetHidden | None,
    first_position: int,
    num_rows: int,
) -> None:
    """Give a drafter that reads all positions the first rows of a forward; others need nothing."""
    if hidden is None or not num_rows or drafter.requires.positions != "all":
        return
    assert isinstance(drafter, HistoryDrafter), "a drafter that asks for all positions reads them"
    kept = TargetHidden(hidden.states[:, :num_rows], hidden.layer_ids)
    drafter.read_rows(state, kept, first_position)
