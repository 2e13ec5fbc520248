"""Prompt tokens into the KV, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

import torch

from dlite_agent.decoding.state import DecodeState
from dlite_agent.decoding.steps import Pause, Steps
from dlite_agent.drafters.drafter import Drafter, read_rows
from dlite_agent.models.target import ForwardRows, TargetModel

__all__ = ["prefill_steps"]


def prefill_steps(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    prompt: list[int],
    should_stop: Callable[[], bool],
    chunk_rows: Callable[[], int],
) -> Steps[Never, None]:
    """Extend the ids to the prompt, with their KV rows, and compute the logits that follow.

    A chunk is committed as a whole; between two chunks there is a pause. Stopped, closed or failed,
    the state holds the finished chunks.

    Args:
        target: Whose device.
        drafter: Is given the ids; its taps are captured with the last chunk, or with all.
        state: Mutated. Holds a prefix of the prompt, with all its KV rows.
        prompt: All ids, at least one more than the state has.
        should_stop: Asked after each pause; True ends the prefill.
        chunk_rows: Most rows of the next chunk; 0: there is no room for one now, ask again after
            a pause.

    Raises:
        CapacityError: The KV pool is full.
    """
    is_begun = False
    while (start := len(state.token_ids)) < len(prompt):
        if is_begun:
            yield Pause("prefill")
            if should_stop():
                return
        while (max_rows := chunk_rows()) == 0:
            yield Pause("room")
            yield Pause("prefill")
            if should_stop():
                return
        chunk = prompt[start : start + max_rows]
        is_last = start + len(chunk) == len(prompt)
        yield from _chunk_steps(target, drafter, state, chunk, is_last=is_last)
        is_begun = True


def _chunk_steps(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    token_ids: list[int],
    *,
    is_last: bool,
) -> Steps[Never, None]:
    num_rows = len(token_ids)
    state.kv.reserve(num_rows)
    needs = drafter.requires
    output = yield ForwardRows(
        torch.tensor(token_ids, dtype=torch.int64, device=target.device),
        state.kv,
        logits_for=[num_rows - 1] if is_last else [],
        taps=needs.layer_ids if is_last or needs.positions == "all" else (),
    )
    assert output is not None, "rows are answered with an output"
    drafter.commit(state.draft_state, token_ids)
    read_rows(drafter, state.draft_state, output.hidden, state.position, num_rows)
    hidden = output.hidden.row(num_rows - 1) if output.hidden is not None else None
    state.commit(token_ids, num_rows=num_rows, hidden=hidden)
    # A copy: the output is a view of all sessions' logits.
    state.logits = output.logits[0].clone() if is_last else None
