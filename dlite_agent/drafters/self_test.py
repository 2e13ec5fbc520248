"""Whether a drafter is read as it was trained: on a few tokens, against other ways to read it.

A tap that is one layer off, or a block that is one slot off, loads without a complaint and drafts
badly. So a target's own greedy continuation is drafted as the config says, with every tap a layer
earlier and later, and with the other alignment; one that agrees clearly more often is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlite_agent.drafters.block import BlockDrafter
from dlite_agent.drafters.drafter import HistoryDrafter
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.models.target import TargetHidden, TargetModel
from dlite_agent.sampling import KeyedNoise

__all__ = ["SelfTest", "self_test"]

_NUM_TOKENS = 24
_ANCHOR_STEP = 3
_MARGIN = 0.5
"""Tokens a block by which another reading has to be better."""
_USUAL_FIRST = 0.3
"""Share of right first tokens below which something is wrong; public drafters reach 0.5."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was measured.

    Attributes:
        accepted: Tokens of a block that agree with the continuation, on average, by reading; the
            config's own is `"as configured"`.
        first_right: Share of blocks whose first token agrees, as configured.
        num_blocks: How many were drafted with each reading.
    """

    accepted: dict[str, float]
    first_right: float
    num_blocks: int

    @property
    def warning(self) -> str:
        """What is wrong; empty when nothing is."""
        own = self.accepted["as configured"]
        best = max(self.accepted, key=self.accepted.__getitem__)
        if self.accepted[best] > own + _MARGIN:
            return (
                f"{own:.2f} tokens of a block agree with the target as its config reads, and "
                f"{self.accepted[best]:.2f} with {best}: the config says otherwise than it was "
                "trained, or it was converted wrongly"
            )
        if self.first_right < _USUAL_FIRST:
            return (
                f"only {self.first_right:.0%} of its first tokens agree with the target, and "
                "public drafters reach 50%: it may be of another target, template or mode"
            )
        return ""


def self_test(
    drafter: BlockDrafter | Eagle3Drafter, target: TargetModel, prompt_ids: Sequence[int]
) -> SelfTest:
    """Draft a short greedy continuation in every reading.

    Costs a prefill, two dozen forwards of one row, and eight blocks a reading.

    Args:
        drafter: As it was loaded.
        target: What it drafts for; its KV pool lends a page or two.
        prompt_ids: E.g. a rendered question.

    Raises:
        CapacityError: The KV pool has no room.
    """
    readings = _readings(drafter, target.config.num_layers)
    layers = sorted({tap for reading in readings.values() for tap in reading.config.taps})
    token_ids, hidden = _continuation(target, list(prompt_ids), tuple(layers))
    accepted: dict[str, float] = {}
    first_right, num_blocks = 0.0, 0
    for name, reading in readings.items():
        counts = _agreement(reading, token_ids, hidden, len(prompt_ids))
        accepted[name] = sum(counts) / len(counts)
        if name == "as configured":
            num_blocks = len(counts)
            first_right = sum(count > 0 for count in counts) / num_blocks
    return SelfTest(accepted, first_right, num_blocks)


def _readings(
    drafter: BlockDrafter | Eagle3Drafter, num_layers: int
) -> dict[str, BlockDrafter | Eagle3Drafter]:
    readings: dict[str, BlockDrafter | Eagle3Drafter] = {"as configured": drafter}
    for shift, name in ((-1, "taps one layer earlier"), (1, "taps one layer later")):
        taps = tuple(tap + shift for tap in drafter.config.taps)
        if min(taps) < 0 or max(taps) >= num_layers:
            continue
        if isinstance(drafter, Eagle3Drafter):
            readings[name] = drafter.variant(taps)
        else:
            is_drafted = drafter.config.is_anchor_drafted
            readings[name] = drafter.variant(taps, is_anchor_drafted=is_drafted)
    if isinstance(drafter, BlockDrafter) and drafter.config.block_size > 1:
        flipped = not drafter.config.is_anchor_drafted
        name = f"the other alignment (slot 0 {'drafts' if flipped else 'does not draft'})"
        readings[name] = drafter.variant(drafter.config.taps, is_anchor_drafted=flipped)
    return readings


@torch.no_grad()
def _continuation(
    target: TargetModel, token_ids: list[int], layers: tuple[int, ...]
) -> tuple[list[int], TargetHidden]:
    """The prompt with its greedy continuation, and the taps of all but the last token."""
    states = []
    given = token_ids
    with target.new_cache() as kv:
        for _ in range(_NUM_TOKENS):
            ids = torch.tensor(given, dtype=torch.int64, device=target.device)
            output = target.forward(ids, kv, logits_for=[len(given) - 1], taps=layers)
            assert output.hidden is not None, "taps were asked for"
            kv.commit(len(given))
            states.append(output.hidden.states)
            given = [int(output.logits[0].argmax())]
            token_ids = [*token_ids, *given]
    return token_ids, TargetHidden(torch.cat(states, dim=1), layers)


def _agreement(
    drafter: HistoryDrafter, token_ids: list[int], hidden: TargetHidden, start: int
) -> list[int]:
    """How many tokens of each block are the continuation's, for anchors from `start` on."""
    rows = [hidden.layer_ids.index(layer) for layer in drafter.requires.layer_ids]
    taps = TargetHidden(hidden.states[rows], drafter.requires.layer_ids)
    state = drafter.start(token_ids[: start + 1])
    noise = KeyedNoise(0)
    counts: list[int] = []
    done = 0
    for anchor in range(start, len(token_ids) - 1, _ANCHOR_STEP):
        if counts:
            drafter.commit(state, token_ids[anchor - _ANCHOR_STEP + 1 : anchor + 1])
        new = TargetHidden(taps.states[:, done:anchor], taps.layer_ids)
        drafter.read_rows(state, new, done)
        done = anchor
        rest = token_ids[anchor + 1 :]
        block = drafter.propose(state, token_ids[anchor], None, anchor, noise, len(rest))
        count = 0
        for drafted, token_id in zip(block.token_ids, rest, strict=False):
            if drafted != token_id:
                break
            count += 1
        counts.append(count)
    return counts
