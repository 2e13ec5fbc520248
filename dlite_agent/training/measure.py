"""Held-out acceptance of whatever learns, by walking the rounds of every answer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dlite_agent.training.learner import Learner, Part
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, walk_rounds
from dlite_agent.training.windows import Windows

__all__ = ["draft_all", "measure"]

_RECORDS, _ANCHORS = 1024, 128


def measure(learner: Learner, heldout: Records | Windows, *, min_position: int = 0) -> Acceptance:
    """Draft at every position, then walk the rounds, greedily.

    Args:
        learner: Drafts; one that reads a history needs windows.
        heldout: Answers that the target itself wrote, greedily.
        min_position: Answers that begin before it are left out.
    """
    rows = heldout.rows if isinstance(heldout, Windows) else heldout
    accepted, left = walk_rounds(rows, draft_all(learner, heldout), min_position)
    return Acceptance.of(accepted, left, learner.block_size)


def draft_all(learner: Learner, heldout: Records | Windows) -> Tensor:
    """Greedy blocks at all usable positions, in order, [N, B] int64."""
    parts = (
        heldout.all_parts(learner.block_size, _ANCHORS)
        if isinstance(heldout, Windows)
        else _parts(heldout, learner.block_size)
    )
    device = learner.ends.embedding.device
    return torch.cat([learner.draft(part.to(device)).cpu() for part in parts])


def _parts(records: Records, block_size: int) -> Iterator[Part]:
    for chosen in records.usable().split(_RECORDS):
        yield Part(records.batch(chosen, block_size))
