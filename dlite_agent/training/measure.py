"""Held-out acceptance of whatever learns, by walking the rounds of every answer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dlite_agent.training.learner import Learner, Part
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, walk_rounds
from dlite_agent.training.windows import Windows

__all__ = ["bigram_share", "draft_all", "measure"]

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


def bigram_share(learned: tuple[Tensor, Tensor], heldout: Records) -> float:
    """How often the token that most often followed the anchor is right in the first slot.

    What any drafter must beat: it reads one token, and nothing else.

    Args:
        learned: `next_ids` and `left` of the records that it counts, [M] both.
        heldout: Where it is asked, at all usable positions.
    """
    anchors, followers = _pairs(*learned)
    size = 1 + int(max(part.max() for part in (anchors, followers, heldout.next_ids)))
    pairs, counts = torch.unique(anchors * size + followers, return_counts=True)
    order = counts.argsort(stable=True)  # the most frequent is written last
    best = torch.full((size,), -1)
    for pair in pairs[order].tolist():
        best[pair // size] = pair % size
    asked, right = _pairs(heldout.next_ids, heldout.left)
    return float((best[asked] == right).float().mean())


def _pairs(next_ids: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Anchors of all records, and the token behind each."""
    at = (left >= 2).nonzero().view(-1)
    return next_ids[at].long(), next_ids[at + 1].long()


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
