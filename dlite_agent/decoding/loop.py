"""The one decode loop: draft, verify, commit. Plain decoding is this loop with `NullDrafter`.

It computes nothing itself: it yields the rows that it wants (`decoding.steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dlite_agent.decoding.state import DecodeState
from dlite_agent.decoding.steps import Steps
from dlite_agent.decoding.stopping import Finish, StopRules
from dlite_agent.decoding.thoughts import ThoughtCounter
from dlite_agent.decoding.verification import RowContext, Verification, verify
from dlite_agent.drafters.drafter import DraftBlock, Drafter, read_rows
from dlite_agent.errors import CapacityError
from dlite_agent.models.target import ForwardRows, TargetHidden, TargetModel, TargetOutput
from dlite_agent.sampling import Sampler, TokenLogprobs

__all__ = ["Round", "decode_steps"]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round committed.

    Attributes:
        token_ids: At least one id; a stop id is the last.
        num_drafted: Tokens that were drafted and verified.
        num_accepted: Drafted tokens among `token_ids`.
        source: Where the draft came from; `"prefill"` for a token that cost no forward, `"forced"`
            for tokens that were not the target's to choose.
        finish: Why the turn ends here, or None.
        logprobs: Of each id, raw; empty unless the sampler's parameters ask for them.
    """

    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    source: str
    finish: Finish | None
    logprobs: tuple[TokenLogprobs, ...] = ()


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
    rules = _Rules(sampler, limits, state.token_ids)
    finish: Finish | None = None
    while finish is None and not should_stop():
        if state.logits is not None:
            block, num_rows = DraftBlock(source="prefill"), 0
            output: TargetOutput | None = TargetOutput(state.logits[None], None)
        else:
            budget = rules.draft_budget()
            block = rules.forced_block(budget) or _propose(target, drafter, state, rules, budget)
            block = _reserve(state, block, limits.fixed_rows)
            num_rows = len(block.token_ids) + 1
            output = yield _rows(target, drafter, state, block, limits.fixed_rows)
        assert output is not None, "rows are answered with an output"
        # row 0 stands at `position` when it was forwarded (the pending token), else before it
        first_position = state.position + min(num_rows, 1)
        logits = output.logits[: max(num_rows, 1)]
        verified = verify(block, logits, sampler, first_position, rules.context(block))
        rules.advance(verified.token_ids)
        drafter.commit(state.draft_state, list(verified.token_ids))
        num_kept = min(num_rows, len(verified.token_ids))
        read_rows(drafter, state.draft_state, output.hidden, state.position, num_kept)
        _commit(state, verified, num_kept, output.hidden)
        del logits, output  # views of all sessions' logits: not kept while the round is read
        finish = limits.finish(verified.token_ids[-1], rules.num_committed)
        yield _round(block, verified, finish)


def _commit(
    state: DecodeState, verified: Verification, num_kept: int, hidden: TargetHidden | None
) -> None:
    """Keep the committed ids, the rows that belong to them, and the taps of the last."""
    kept = hidden.row(verified.hidden_row) if hidden is not None else None
    state.commit(verified.token_ids, num_rows=num_kept, hidden=kept)


def _round(block: DraftBlock, verified: Verification, finish: Finish | None) -> Round:
    return Round(
        verified.token_ids,
        len(block.token_ids),
        verified.num_accepted,
        block.source,
        finish,
        verified.logprobs,
    )


class _Rules:
    """What decides a turn's tokens beside the logits; grows with what is committed."""

    def __init__(self, sampler: Sampler, limits: StopRules, prompt_ids: Sequence[int]) -> None:
        self.sampler = sampler
        self.limits = limits
        self.num_committed = 0
        self.thoughts = None if limits.thoughts is None else ThoughtCounter(limits.thoughts)
        self._history = sampler.new_history(prompt_ids)
        self._closing: tuple[int, ...] = ()
        self._watch()

    def context(self, block: DraftBlock) -> RowContext:
        """For the rows of the verification of a draft."""
        constraint = self.limits.constraint
        return RowContext(
            self.limits.stop_token_ids,
            masks=None if constraint is None else constraint.masks(block.token_ids),
            history=self._history,
            forced=self._forced,
            num_top_logprobs=self.sampler.num_top_logprobs,
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Read committed ids."""
        self.num_committed += len(token_ids)
        if self._history is not None:
            self._history.extend(token_ids)
        if self.thoughts is not None:
            self.thoughts.advance(token_ids)
        if self.limits.constraint is not None:
            self.limits.constraint.advance(token_ids)
        self._closing = self._closing[len(token_ids) :]
        self._watch()

    def draft_budget(self) -> int:
        """Most tokens of a draft; none is drafted over a point where the turn may be closed."""
        budget = self.limits.draft_budget(self.num_committed)
        constraint = self.limits.constraint
        if constraint is None or self._closing:
            return budget
        return min(budget, max(0, constraint.num_unwatched(self._num_left) - 1))

    def forced_block(self, budget: int) -> DraftBlock | None:
        """What is forced now, as a draft; None where the target may choose."""
        return DraftBlock(self._forced[:budget], source="forced") if self._forced else None

    def within_grammar(self, block: DraftBlock, budget: int) -> DraftBlock:
        """A draft up to where it breaks the grammar, or what must come, where that is longer."""
        constraint = self.limits.constraint
        if constraint is None:
            return block
        num_valid = constraint.num_valid(block.token_ids)
        spelled = constraint.forced(budget)
        if spelled and len(spelled) >= num_valid:
            return DraftBlock(spelled, source="grammar", wants_taps=block.wants_taps)
        if num_valid == len(block.token_ids):
            return block
        return replace(
            block,
            token_ids=block.token_ids[:num_valid],
            confidence=block.confidence[:num_valid],
        )

    @property
    def _num_left(self) -> int:
        return self.limits.max_tokens - self.num_committed

    @property
    def _forced(self) -> tuple[int, ...]:
        if self._closing:
            return self._closing
        return self.thoughts.forced if self.thoughts is not None else ()

    def _watch(self) -> None:
        constraint = self.limits.constraint
        if constraint is not None and not self._closing:
            self._closing = constraint.closing(self._num_left)


def _propose(
    target: TargetModel, drafter: Drafter, state: DecodeState, rules: _Rules, budget: int
) -> DraftBlock:
    """Ask the drafter; cut what cannot be committed.

    That is what lies past the budget or a stop id, what is no id, and what something would be
    forced in front of.
    """
    assert state.pending is not None, "decode needs logits or a pending token"
    noise = rules.sampler.noise
    block = drafter.propose(
        state.draft_state, state.pending, state.hidden, state.position, noise, budget
    )
    if not block.token_ids and rules.limits.constraint is None:
        return block
    usable: list[int] = []
    for token_id in block.token_ids[:budget]:
        if not 0 <= token_id < target.config.vocab_size:
            break
        usable.append(token_id)
        if token_id in rules.limits.stop_token_ids:
            break
    if rules.thoughts is not None:
        del usable[rules.thoughts.num_free(usable) :]
    usable_block = replace(
        block, token_ids=tuple(usable), confidence=block.confidence[: len(usable)]
    )
    return rules.within_grammar(usable_block, budget)


def _reserve(state: DecodeState, block: DraftBlock, fixed_rows: int | None) -> DraftBlock:
    """Make room for the pending token's row and one per drafted token; the block that fits."""
    if state.is_room_short and fixed_rows is None:
        block = replace(block, token_ids=(), confidence=())
    try:
        state.kv.reserve(fixed_rows or len(block.token_ids) + 1)
    except CapacityError:
        if not block.token_ids or fixed_rows is not None:
            raise
        state.kv.reserve(1)
        return replace(block, token_ids=(), confidence=())
    return block


def _rows(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    block: DraftBlock,
    fixed_rows: int | None,
) -> ForwardRows:
    ids = [state.token_ids[-1], *block.token_ids]
    if fixed_rows is not None:  # nobody attends to the rows behind the draft
        ids += [ids[-1]] * (fixed_rows - len(ids))
    return ForwardRows(
        torch.tensor(ids, dtype=torch.int64, device=target.device),
        state.kv,
        logits_for=range(len(ids)),
        taps=drafter.requires.layer_ids if block.wants_taps else (),
    )
