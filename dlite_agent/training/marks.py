"""Which positions of an answer matter more to an agent: they are sampled more often.

Ours: an agent waits for the first tokens behind a tool result, and most of what it writes is calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["turn_marks"]

_FIRST = 32
"""Tokens behind a tool result that count as its first."""


def turn_marks(
    answer_ids: Sequence[int], *, follows_tool: bool, call_ids: tuple[int, int] | None
) -> Tensor:
    """Marks of the positions that `training.capture` keeps of an answer, [n] uint8.

    Position j is the one whose logits gave token j.

    Args:
        answer_ids: Sampled ids, n of them.
        follows_tool: The answer follows a tool's result.
        call_ids: Ids that open and close a call; None: the template has none.
    """
    ids = torch.tensor(answer_ids)
    marks = torch.zeros(len(ids), dtype=torch.bool)
    if follows_tool:
        marks[:_FIRST] = True
    if call_ids is not None:
        opened = (ids == call_ids[0]).cumsum(0)
        marks |= opened > (ids == call_ids[1]).cumsum(0)
    return marks.to(torch.uint8)
