"""Where a session stands: its tokens, their KV, and what the last row gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dlite_agent.drafters.drafter import DraftState
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.target import TargetHidden

__all__ = ["DecodeState"]


@dataclass(slots=True)
class DecodeState:
    """n token ids and the KV of the first n or n - 1 of them.

    Attributes:
        kv: Owned; KV row i was computed from `token_ids[: i + 1]`.
        token_ids: All ids, the pending one included.
        logits: [V] of KV row `kv.length - 1`, while its successor has not been sampled; else None.
        hidden: Taps of KV row `kv.length - 1`, [T, 1, E], or None.
        hidden_row: The row that `hidden` belongs to; meaningless without it.
        draft_state: What the drafter remembers of `token_ids`.
        is_room_short: There may be room for one more row, but what is behind it belongs to others:
            nothing is drafted.
    """

    kv: KVCache
    token_ids: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    hidden: TargetHidden | None = None
    hidden_row: int = -1
    draft_state: DraftState | None = None
    is_room_short: bool = False

    @property
    def position(self) -> int:
        """Position of the pending token, or of the one that `logits` give: `kv.length`."""
        return self.kv.length

    @property
    def pending(self) -> int | None:
        """The token that was sampled, or kept, and is not in the KV yet."""
        return self.token_ids[-1] if self.kv.length < len(self.token_ids) else None

    @property
    def nbytes(self) -> int:
        """Bytes of KV (shared pages in shares), logits, taps and draft state, and 8 for each id."""
        tensors = [self.logits, self.hidden.states if self.hidden is not None else None]
        kept = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        drafted = self.draft_state.nbytes if self.draft_state is not None else 0
        return self.kv.nbytes + kept + drafted + 8 * len(self.token_ids)

    def commit(
        self, token_ids: Sequence[int], *, num_rows: int, hidden: TargetHidden | None
    ) -> None:
        """Append ids and keep the first `num_rows` tentative KV rows, together.

        Args:
            token_ids: Ids that the session now holds.
            num_rows: Tentative rows to keep; afterwards the KV misses at most the last id.
            hidden: Taps of the last kept row, [T, 1, E] (copied, since they are views of a larger
                tensor), or None.
        """
        self.kv.commit(num_rows)
        self.token_ids.extend(token_ids)
        self.logits = None
        if num_rows:
            self.hidden = (
                None if hidden is None else TargetHidden(hidden.states.clone(), hidden.layer_ids)
            )
            self.hidden_row = self.kv.length - 1

    def truncate_to(self, length: int) -> None:
        """Forget all ids from `length` on, and every tentative row."""
        if length < len(self.token_ids):
            del self.token_ids[length:]
            self.logits = None
        self.kv.truncate_to(min(self.kv.length, length))
        if self.hidden is not None and self.hidden_row != self.kv.length - 1:
            self.hidden = None

    def ensure_successor(self) -> None:
        """Make the last id pending where there are no logits to sample its successor from."""
        if self.logits is None and self.pending is None:
            self.kv.truncate_to(len(self.token_ids) - 1)
            self.truncate_to(len(self.token_ids))

    def fork(self, length: int) -> DecodeState:
        """A copy of the first `length` ids that shares KV pages; without a draft state."""
        copy = DecodeState(
            kv=self.kv.fork(min(length, self.kv.length)),
            token_ids=self.token_ids[:length],
            logits=self.logits if length == len(self.token_ids) else None,
            hidden=self.hidden,
            hidden_row=self.hidden_row,
        )
        copy.truncate_to(length)
        return copy

    def check_invariants(self, *, may_be_tentative: bool) -> None:
        """Assert I1 and I3 of `sessions.session.Session`, and that tentative rows are allowed."""
        n = len(self.token_ids)
        assert self.kv.length in (n - 1, n), f"I1: {self.kv.length} KV rows for {n} tokens"
        assert may_be_tentative or self.kv.num_tentative == 0, (
            "I1: tentative rows outside an operation"
        )
        assert self.hidden is None or self.hidden_row == self.kv.length - 1, (
            "I3: hidden of another row"
        )
        assert self.logits is None or self.kv.length == n, "I3: logits of another row"
