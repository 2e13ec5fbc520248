"""The one decode loop: draft, verify, commit. Plain decoding is this loop with `NullDrafter`.

It computes nothing itself: it yields the rows that it wants (`decoding.steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlite_agent.decoding.state import DecodeState
from dlite_agent.decoding.steps import Steps
from dlite_agent.decoding.stopping import Finish, StopRules
from dlite_agent.decoding.verification import RowContext, verify
from dlite_agent.drafters.drafter import DraftBlock, Drafter
from dlite_agent.errors import CapacityError
from dlite_agent.models.target import ForwardRows, TargetModel, TargetOutput
from dlite_agent.sampling import Sampler

__all__ = ["Round", "decode_steps"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round committed.

    Attributes:
        token_ids: At least one id; a stop id is the last.
        num_drafted: Tokens that were drafted and verified.
        num_accepted: Drafted tokens among `token_ids`.
        source: Where the draft came from; `"prefill"` for a token that cost no forward.
        finish: Why the turn ends here, or None.
    """

    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    source: str
    finish: Finish | None


def decode_steps(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    sampler: Sampler,
    limits: StopRules,
    should_stop: Callable[[], bool],
) -> Steps[Round, None]:
    """Sample until a stop id, `max_tokens` or `should_stop`, which is asked before every round.

    Everything that a round commits is in `state` before the round is yielded. Closed anywhere else,
    the generator leaves at most tentative KV rows behind. While `state.logits` are there (after a
    prefill), the first round takes its token from them, without a forward.

    Args:
        target: Whose vocabulary and device; its KV pool holds `state.kv`.
        drafter: Proposes; `state.draft_state` is kept in step with the ids.
        state: Mutated. Has logits or a pending token.
        sampler: The turn's sampling and noise.
        limits: Stop ids and the most tokens to commit.
        should_stop: True ends the iterator without a `finish`.

    Raises:
        CapacityError: The KV pool has no room for one more row, even without a draft. The state is
            as it was.
        FloatingPointError: The logits are not finite. The state holds what was committed before.
    """
    context = RowContext(limits.stop_token_ids)
    num_committed = 0
    finish: Finish | None = None
    while finish is None and not should_stop():
        if state.logits is not None:
            block, num_rows = DraftBlock(source="prefill"), 0
            output: TargetOutput | None = TargetOutput(state.logits[None], None)
        else:
            block = _propose(
                target, drafter, state, sampler, limits, limits.draft_budget(num_committed)
            )
            block = _reserve(state, block)
            num_rows = len(block.token_ids) + 1
            output = yield _rows(target, drafter, state, block)
        assert output is not None, "rows are answered with an output"
        # row 0 stands at `position` when it was forwarded (the pending token), else before it
        first_position = state.position + min(num_rows, 1)
        verified = verify(block, output.logits, sampler, first_position, context)
        drafter.commit(state.draft_state, list(verified.token_ids))
        state.commit(
            verified.token_ids,
            num_rows=min(num_rows, len(verified.token_ids)),
            hidden=output.hidden.row(verified.hidden_row) if output.hidden is not None else None,
        )
        output = None  # a view of all sessions' logits: not kept while the round is read
        num_committed += len(verified.token_ids)
        finish = limits.finish(verified.token_ids[-1], num_committed)
        yield Round(
            verified.token_ids, len(block.token_ids), verified.num_accepted, block.source, finish
        )


def _propose(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    sampler: Sampler,
    limits: StopRules,
    budget: int,
) -> DraftBlock:
    """Ask the drafter; cut what cannot be committed: past the budget or a stop id, or no id."""
    assert state.pending is not None, "decode needs logits or a pending token"
    block = drafter.propose(
        state.draft_state, state.pending, state.hidden, state.position, sampler.noise, budget
    )
    usable: list[int] = []
    for token_id in block.token_ids[:budget]:
        if not 0 <= token_id < target.config.vocab_size:
            break
        usable.append(token_id)
        if token_id in limits.stop_token_ids:
            break
    return DraftBlock(tuple(usable), block.confidence[: len(usable)], block.source)


def _reserve(state: DecodeState, block: DraftBlock) -> DraftBlock:
    """Make room for the pending token's row and one per drafted token; the block that fits."""
    try:
        state.kv.reserve(len(block.token_ids) + 1)
    except CapacityError:
        if not block.token_ids:
            raise
        state.kv.reserve(1)
        return DraftBlock(source=block.source)
    return block


def _rows(
    target: TargetModel, drafter: Drafter, state: DecodeState, block: DraftBlock
) -> ForwardRows:
    return ForwardRows(
        torch.tensor(
            [state.token_ids[-1], *block.token_ids], dtype=torch.int64, device=target.device
        ),
        state.kv,
        logits_for=range(len(block.token_ids) + 1),
        taps=drafter.requires.layer_ids,
    )
