"""Held-out acceptance of whatever learns, by walking the rounds of every answer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dlite_agent.training.learner import Learner, Part
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, walk_rounds
from dlite_agent.training.windows import Windows

__all__ = ["measure"]

_RECORDS, _ANCHORS = 1024, 128


def measure(learner: Learner, heldout: Records | Windows, *, min_position: int = 0) -> Acceptance:
    """Draft at every position, then walk the rounds, greedily.

    Args:
        learner: Drafts; one that reads a history needs windows.
        heldout: Answers that the target itself wrote, greedily.
        min_position: Answers that begin before it are left out.
    """
    is_windows = isinstance(heldout, Windows)
    parts = (
        heldout.all_parts(learner.block_size, _ANCHORS)
        if is_windows
        else _parts(heldout, learner.block_size)
    )
    device = learner.ends.embedding.device
    blocks = torch.cat([learner.draft(part.to(device)).cpu() for part in parts])
    rows = heldout.rows if is_windows else heldout
    accepted, left = walk_rounds(rows, blocks, min_position)
    return Acceptance.of(accepted, left, learner.block_size)


def _parts(records: Records, block_size: int) -> Iterator[Part]:
    for chosen in records.usable().split(_RECORDS):
        yield Part(records.batch(chosen, block_size))
