"""Records of what a target did: taps and tokens of consecutive positions of its answers.

A DLite record needs the taps of one position, the token there (the anchor), the next tokens, and
what the target thought at each of them. For consecutive anchors these overlap, so what is kept is
positions; a record is a position's number. Nothing of a prompt is kept but its last position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["RecordBatch", "Records"]


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """N records, as a student takes them.

    Attributes:
        taps: [N, T, 1, E].
        anchor_ids: [N] int64.
        previous_ids: [N, B] int64: the token before each slot, the anchor first.
        final_taps: [N, B, E]: the last layer's residual stream where the target chooses the slot's
            token.
        best_ids: [N, B] int64: the token that it likes best there.
        valid: [N, B] bool: the slot is inside the answer, and the tokens before it are the
            target's best.
        positions: [N] int64, of the anchors.
    """

    taps: Tensor
    anchor_ids: Tensor
    previous_ids: Tensor
    final_taps: Tensor
    best_ids: Tensor
    valid: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive positions of answers, one span after another.

    Attributes:
        taps: [M, T, E]; the last tap is the last layer.
        next_ids: [M] int32: the token that followed.
        best_ids: [M] int32: the token that the target likes best to follow.
        left: [M] int32: positions of the span from here on, this one included.
        positions: [M] int32: of the token that followed.
    """

    taps: Tensor
    next_ids: Tensor
    best_ids: Tensor
    left: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return int(self.next_ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in _NAMES)

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """All positions of several; copies."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in _NAMES))

    def usable(self) -> Tensor:
        """Numbers of the positions that are records: a token follows the anchor, [R] int64."""
        return (self.left >= 2).nonzero().view(-1)

    def span_starts(self) -> Tensor:
        """Numbers of the positions where a span begins, [S] int64."""
        is_start = torch.ones(len(self), dtype=torch.bool)
        is_start[1:] = self.left[:-1] == 1
        return is_start.nonzero().view(-1)

    def batch(self, chosen: Tensor, block_size: int) -> RecordBatch:
        """The records at some positions, [N] int64."""
        slots = torch.arange(block_size)
        at = chosen.unsqueeze(1) + 1 + slots  # [N, B]: where the target chooses the slot's token
        is_inside = slots + 1 < self.left[chosen].unsqueeze(1)
        at = at.clamp_max(len(self) - 1)
        previous_ids = self.next_ids[at - 1].long()
        previous_ids[:, 0] = self.next_ids[chosen]
        best_ids = self.best_ids[at].long()
        # slot k is reached when the tokens of the slots before it are the target's
        agrees = (self.next_ids[at].long() == best_ids) & is_inside
        reached = torch.ones_like(agrees)
        reached[:, 1:] = agrees[:, :-1].cumprod(dim=1).bool()
        return RecordBatch(
            taps=self.taps[chosen].unsqueeze(2),
            anchor_ids=self.next_ids[chosen].long(),
            previous_ids=previous_ids,
            final_taps=self.taps[:, -1][at],
            best_ids=best_ids,
            valid=reached & is_inside,
            positions=self.positions[chosen].long(),
        )

    def save(self, path: Path) -> None:
        """Write a shard; a kill leaves none or a whole one."""
        part = path.with_suffix(".part")
        save_file({name: getattr(self, name).contiguous() for name in _NAMES}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Records:
        """Read a shard."""
        tensors = load_file(path)
        return cls(*(tensors[name] for name in _NAMES))


_NAMES = ("taps", "next_ids", "best_ids", "left", "positions")
