"""What a student would be accepted, without the loop: every block at once, then the rounds walked.

For greedy decoding this is exact up to rounding: the answer does not depend on the drafter, so all
blocks that any sequence of rounds could ask for are known beforehand. `train eval` holds it against
the served figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.records import Records
from dlite_agent.training.student import Student, StudentInput

__all__ = [
    "Acceptance",
    "accepted_at",
    "choose_blocks",
    "draft_blocks",
    "simulate",
    "walk_rounds",
]

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far drafts went.

    Attributes:
        tau: Committed tokens a round, the target's own included.
        per_slot: Share of rounds that accepted at least k + 1 tokens, of those whose answer went on
            so long.
        num_rounds: Rounds.
        num_tokens: Tokens that they committed.
    """

    tau: float
    per_slot: tuple[float, ...]
    num_rounds: int
    num_tokens: int

    @classmethod
    def of(cls, accepted: Tensor, left: Tensor, block_size: int) -> Acceptance:
        """Figures of rounds, from how many tokens each accepted and how many the answer had left.

        A round that ends with its answer commits what it accepted: the stop token is among that.

        Args:
            accepted: [R] int64.
            left: Tokens of the answer behind the round's anchor, [R] int64.
            block_size: B.
        """
        slots = torch.arange(block_size)
        asked = left.unsqueeze(1) > slots
        reached = (accepted.unsqueeze(1) > slots) & asked
        shares = reached.sum(dim=0) / asked.sum(dim=0).clamp_min(1)
        committed = int((accepted + 1 - (accepted == left).long()).sum())
        num_rounds = int(accepted.shape[0])
        return cls(committed / max(num_rounds, 1), tuple(shares.tolist()), num_rounds, committed)


@torch.no_grad()
def draft_blocks(student: Student, ends: FrozenEnds, records: Records, chosen: Tensor) -> Tensor:
    """Greedy blocks at some positions, [N, B] int64."""
    blocks = []
    for part in chosen.split(_BATCH):
        batch = records.batch(part, student.config.block_size)
        given = StudentInput.of(batch)
        blocks.append(
            choose_blocks(student, ends, student.backbone(given), given.anchor_ids, given.hints)
        )
    return torch.cat(blocks)


def simulate(
    student: Student, ends: FrozenEnds, records: Records, *, min_position: int = 0
) -> Acceptance:
    """Walk the rounds of every answer, greedily.

    Args:
        student: Drafts.
        ends: Of its target.
        records: Answers that the target itself wrote, greedily.
        min_position: Answers that begin before it are left out.
    """
    blocks = draft_blocks(student, ends, records, records.usable())
    accepted, left = walk_rounds(records, blocks, min_position)
    return Acceptance.of(accepted, left, student.config.block_size)


def walk_rounds(records: Records, blocks: Tensor, min_position: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens that every round accepted, and that its answer had left, [R] int64 both.

    Args:
        records: Answers.
        blocks: Greedy drafts at all of `records.usable()`, [N, B] int64.
        min_position: As in `simulate`.
    """
    by_position = torch.zeros(len(records), dtype=torch.int64)
    by_position[records.usable()] = accepted_at(records, blocks)
    accepted: list[int] = []
    behind: list[int] = []
    for start in records.span_starts().tolist():
        if int(records.positions[start]) < min_position:
            continue
        at, left = start, int(records.left[start])
        while left >= 2:
            count = int(by_position[at])
            accepted.append(count)
            behind.append(left - 1)
            at, left = at + count + 1, left - count - 1
    return torch.tensor(accepted, dtype=torch.int64), torch.tensor(behind, dtype=torch.int64)


def accepted_at(records: Records, blocks: Tensor) -> Tensor:
    """How many tokens of the block at each of `records.usable()` would be accepted, [N] int64."""
    block_size = blocks.shape[1]
    usable = records.usable()
    batch = records.batch(usable, block_size)
    # the answer is the target's own, so what is accepted is what the answer says
    inside = torch.arange(block_size) + 1 < records.left[usable].unsqueeze(1)
    said = torch.cat([batch.previous_ids[:, 1:], _last_said(records, usable, block_size)], dim=1)
    return ((blocks == said) & inside).long().cumprod(dim=1).sum(dim=1)


def _last_said(records: Records, chosen: Tensor, block_size: int) -> Tensor:
    """The answer's token in the last slot, [N, 1]."""
    at = (chosen + block_size).clamp_max(len(records) - 1)
    return records.next_ids[at].long().unsqueeze(1)


def choose_blocks(
    student: Student,
    ends: FrozenEnds,
    hidden: Tensor,
    anchor_ids: Tensor,
    hints: Tensor | None = None,
) -> Tensor:
    """The best token of each slot, one after the other, [N, B].

    Hints are those behind the answer's own tokens: a block that chose others was wrong before.

    Args:
        student: Drafts.
        ends: Of its target.
        hidden: Slots' states before the head, [N, B, E].
        anchor_ids: [N] int64.
        hints: [N, B, 2] int64; read by a copying head.
    """
    base = ends.logits(hidden)
    if student.config.head == "none":
        return base.argmax(dim=-1)
    factor = ends.logits(student.weights["head.out_proj.weight"].t())  # [r, V]
    of_hidden = hidden if student.config.head == "token" else student.hidden_part(hidden)
    is_copying = student.config.head == "copy"
    previous_ids, state = anchor_ids, None
    chosen: list[Tensor] = []
    for slot in range(hidden.shape[1]):
        of_token = student.token_part(previous_ids)
        hint = hints[:, slot] if is_copying and hints is not None else None
        if hint is not None:
            of_token = of_token + student.copy_part(hint)
        state = student.step(of_hidden[:, slot], of_token, state)
        logits = torch.addmm(base[:, slot], state, factor)
        previous_ids = student.add_copies(logits, state, hint).argmax(dim=-1)
        chosen.append(previous_ids)
    return torch.stack(chosen, dim=1)
