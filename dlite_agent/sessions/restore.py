"""A saved session's way back into fresh pages of the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Never

import torch
from torch import Tensor

from dlite_agent.decoding.prefill import prefill_steps
from dlite_agent.decoding.state import DecodeState
from dlite_agent.decoding.steps import Pause, Steps
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.saved_session import SavedSession

__all__ = ["restore_steps"]

logger = logging.getLogger(__name__)

# Largest relative distance (2-norm, of a layer's keys or values) of the last stored row from the
# same row computed again. The two differ by rounding, since they were computed in forwards of
# other shapes; KV of other tokens or weights is at a distance near 1.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}


def restore_steps(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    saved: SavedSession,
    num_rows: int,
    may_wait: Callable[[], bool],
) -> Steps[Never, int]:
    """Give an empty state the ids and KV rows that are stored and whole, at most `num_rows`.

    The last one is forwarded again, which yields the taps and logits that are not stored; the row
    that it gives is compared with the stored one (a *canary*). Where they differ nothing is used.

    Args:
        target: Computes.
        drafter: Is given the ids.
        state: Empty; mutated.
        saved: What is fetched.
        num_rows: At least 1, at most `saved.manifest.num_rows`.
        may_wait: There is something else to do while it is read.

    Returns:
        Rows that were restored; 0 leaves the state empty.

    Raises:
        CapacityError: The KV pool is full.
    """
    saved.start(state.kv, num_rows)
    while not saved.is_ready and may_wait():
        yield Pause("restore")
    saved.finish()
    if num_whole := state.kv.length:
        last = rows_to_host(state.kv, num_whole - 1, num_whole)
        ids = list(saved.token_ids[:num_whole])
        state.kv.truncate_to(len(ids) - 1)
        state.token_ids[:] = ids[:-1]
        state.draft_state = drafter.start(ids[:-1])
        yield from prefill_steps(target, drafter, state, ids, lambda: False, lambda: 1)
        if not _is_same(rows_to_host(state.kv, num_whole - 1, num_whole), last):
            saved.problem = "this model computes other KV than what was saved"
            state.truncate_to(0)
            drafter.truncate_to(state.draft_state, 0)
    num_restored = state.kv.length
    if saved.problem:
        logger.warning(
            "session=%s: of %d saved KV rows %d are used, the others are computed again: %s",
            saved.manifest.session_id,
            num_rows,
            num_restored,
            saved.problem,
        )
    return num_restored


def _is_same(computed: Tensor, stored: Tensor) -> bool:
    """Whether two rows [L, 2, K, 1, D] differ by rounding only."""
    ours, theirs = computed.to(torch.float64), stored.to(torch.float64)
    distance = (ours - theirs).flatten(2).norm(dim=2)  # [L, 2]
    length = theirs.flatten(2).norm(dim=2)
    return bool((distance <= _TOLERANCE[stored.dtype] * length).all())
