"""Which tokens a turn has seen, and how often it sampled them: what penalties depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Counted", "TokenHistory"]

Counted = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""Token ids, each once, and how often each was sampled in this turn; 0 for the prompt's alone."""


class TokenHistory:
    """The distinct tokens of a prompt, and counts of what was sampled behind it.

    Growing by one token is O(1). Owned by one turn.

    Args:
        prompt_ids: Ids that count as seen, but not as sampled.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._counts = np.zeros(len(self._ids))
        self._length = len(self._ids)
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Count sampled ids."""
        for token_id in token_ids:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._append(token_id)
            self._counts[slot] += 1.0

    def counted(self, drafted: Sequence[int] = ()) -> Counted:
        """Everything that was seen, and `drafted` as if it had been sampled. Read-only."""
        ids, counts = self._ids[: self._length], self._counts[: self._length]
        if not drafted:
            return ids, counts
        new: dict[int, int] = {}
        counts = counts.copy()
        for token_id, count in Counter(drafted).items():
            slot = self._slots.get(token_id)
            if slot is None:
                new[token_id] = count
            else:
                counts[slot] += count
        if new:
            ids = np.concatenate([ids, np.fromiter(new.keys(), np.int64)])
            counts = np.concatenate([counts, np.fromiter(new.values(), np.float64)])
        return ids, counts

    def _append(self, token_id: int) -> int:
        slot = self._length
        if slot == len(self._ids):
            room = max(64, 2 * slot)
            self._ids = np.resize(self._ids, room) if slot else np.zeros(room, dtype=np.int64)
            self._counts = np.concatenate([self._counts, np.zeros(room - slot)])
        self._ids[slot] = token_id
        self._counts[slot] = 0.0
        self._slots[token_id] = slot
        self._length += 1
        return slot
