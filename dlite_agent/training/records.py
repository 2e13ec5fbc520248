"""Records of what a target did: taps and tokens of consecutive positions of its answers.

A DLite record needs the taps of one position, the token there (the anchor), the next tokens, and
what the target thought at each of them. For consecutive anchors these overlap, so what is kept is
positions; a record is a position's number. Nothing of a prompt is kept but its last position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.training.files import write_tensors
from dlite_agent.training.packed_taps import pack_taps, unpack_taps

__all__ = ["RecordBatch", "Records"]


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """N records, as a student takes them.

    Attributes:
        taps: [N, T, 1, E].
        anchor_ids: [N] int64.
        previous_ids: [N, B] int64: the token before each slot, the anchor first.
        hints: [N, B, 2] int64: what the history suggests for each slot, and how many tokens agree
            there (`drafters.copy_hint`).
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
    hints: Tensor
    final_taps: Tensor
    best_ids: Tensor
    valid: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive positions of answers, one span after another.

    Attributes:
        taps: [M, T, E]; the last tap is the last layer. Numbers, or int8 codes (`pack`).
        next_ids: [M] int32: the token that followed.
        best_ids: [M] int32: the token that the target likes best to follow.
        left: [M] int32: positions of the span from here on, this one included; 0 of one that is no
            answer's, as windows have them (`training.windows`).
        positions: [M] int32: of the token that followed.
        marks: [M] uint8: not 0 where drafts matter more (`training.marks`); [0]: nowhere.
        scales: Of int8 codes, [M, T, groups] bfloat16; [0]: taps are numbers.
        hints: [M, 2] int32: the token that the history suggests to follow, and how many tokens
            agree there (`drafters.copy_hint`); [0, 2]: nothing is suggested anywhere.
    """

    taps: Tensor
    next_ids: Tensor
    best_ids: Tensor
    left: Tensor
    positions: Tensor
    marks: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))
    scales: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bfloat16))
    hints: Tensor = field(default_factory=lambda: torch.zeros(0, 2, dtype=torch.int32))

    def __len__(self) -> int:
        return int(self.next_ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in (*_NAMES, *_OPTIONAL))

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """All positions of several; copies."""
        own = {name: torch.cat([getattr(part, name) for part in parts]) for name in _NAMES}
        marks = torch.cat([part.is_marked().to(torch.uint8) for part in parts])
        hints = torch.cat([part.hinted(slice(None)) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return cls(**own, marks=marks, scales=scales, hints=hints)

    def pack(self) -> Records:
        """The same with taps as int8 codes: half the bytes, a hundredth of the size lost (ours)."""
        codes, scales = pack_taps(self.taps)
        return replace(self, taps=codes, scales=scales)

    def part(self, rows: slice) -> Records:
        """Some consecutive positions; views."""
        kept = {item.name: getattr(self, item.name) for item in fields(self)}
        return Records(**{name: item[rows] if len(item) else item for name, item in kept.items()})

    def states(self, rows: Tensor | slice) -> Tensor:
        """Taps of some positions as numbers, [..., T, E]."""
        taps = self.taps[rows]
        return unpack_taps(taps, self.scales[rows]) if self.scales.numel() else taps

    def final_states(self, rows: Tensor) -> Tensor:
        """The last layer's taps of some positions as numbers, [..., E]."""
        taps = self.taps[:, -1][rows]
        return unpack_taps(taps, self.scales[:, -1][rows]) if self.scales.numel() else taps

    def is_marked(self) -> Tensor:
        """Where drafts matter more, [M] bool."""
        return self.marks > 0 if self.marks.numel() else torch.zeros(len(self), dtype=torch.bool)

    def hinted(self, rows: Tensor | slice) -> Tensor:
        """Hints of some positions, [..., 2] int32; zeros where there are none."""
        if self.hints.numel():
            return self.hints[rows]
        return torch.zeros(len(self), 2, dtype=torch.int32)[rows]

    def usable(self) -> Tensor:
        """Numbers of the positions that are records: a token follows the anchor, [R] int64."""
        return (self.left >= 2).nonzero().view(-1)

    def span_starts(self) -> Tensor:
        """Numbers of the positions where a span begins, [S] int64."""
        is_start = self.left >= 1
        is_start[1:] &= self.left[:-1] <= 1
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
            taps=self.states(chosen).unsqueeze(2),
            anchor_ids=self.next_ids[chosen].long(),
            previous_ids=previous_ids,
            hints=self.hinted(at).long(),
            final_taps=self.final_states(at),
            best_ids=best_ids,
            valid=reached & is_inside,
            positions=self.positions[chosen].long(),
        )

    def save(self, path: Path) -> None:
        """Write a shard; a kill leaves none or a whole one.

        Raises:
            CapacityError: There was no room.
        """
        write_tensors(path, {name: getattr(self, name) for name in (*_NAMES, *_OPTIONAL)})

    @classmethod
    def load(cls, path: Path) -> Records:
        """Read a shard.

        Raises:
            UnsupportedCheckpointError: It is damaged.
        """
        try:
            return cls(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise UnsupportedCheckpointError(
                f"the shard {str(path)!r} cannot be read ({error}); delete all of its folder's "
                "files from its number on, or the folder, and capture again"
            ) from error


_NAMES = ("taps", "next_ids", "best_ids", "left", "positions")
_OPTIONAL = ("marks", "scales", "hints")
