"""What a drafter keeps of consecutive positions: tensors that grow, are cut, and are copied."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DrafterRows"]

_FIRST_CAPACITY = 64


class DrafterRows:
    """Rows of positions [first, end) in tensors `[..., rows, width]`, all of the same rows.

    Rows of the last `window` positions are kept at least, and those of twice as many at most.

    Args:
        window: Positions that matter; 0: all.
    """

    def __init__(self, window: int = 0) -> None:
        self.window = window
        self.first = 0
        self._length = 0
        self._parts: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self._length

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.first + self._length

    @property
    def nbytes(self) -> int:
        """Memory that is held, room to grow included."""
        return sum(part.nbytes for part in self._parts)

    def append(self, *parts: Tensor, first_position: int) -> None:
        """Add rows; rows from their first position on are replaced, and a gap forgets all before.

        Args:
            parts: [..., count, width], as many and of the same widths at every call; copied.
            first_position: Of their first row.
        """
        self.truncate_to(first_position)
        if first_position > self.end or not self._length:
            self.first, self._length = first_position, 0
        count = parts[0].shape[-2]
        if self.window and self._length + count > 2 * self.window:
            self._forget(self._length - max(0, self.window - count))
            skipped = max(0, count - self.window)
            parts = tuple(part.narrow(-2, skipped, count - skipped) for part in parts)
            count -= skipped
            self.first += skipped
        self._make_room(parts, self._length + count)
        for kept, part in zip(self._parts, parts, strict=True):
            kept.narrow(-2, self._length, count).copy_(part)
        self._length += count

    def truncate_to(self, end: int) -> None:
        """Forget all rows from position `end` on."""
        self._length = max(0, min(self._length, end - self.first))

    def before(self, end: int) -> tuple[int, tuple[Tensor, ...]]:
        """The rows before a position, at most `window` of them: the first's position, and views."""
        stop = max(0, min(end, self.end) - self.first)
        start = max(0, stop - self.window) if self.window else 0
        return self.first + start, tuple(
            part.narrow(-2, start, stop - start) for part in self._parts
        )

    def all(self) -> tuple[int, tuple[Tensor, ...]]:
        """All rows that are kept: the first's position, and views."""
        return self.first, tuple(part.narrow(-2, 0, self._length) for part in self._parts)

    def fork(self) -> DrafterRows:
        """A copy that is independent."""
        other = DrafterRows(self.window)
        other.first, other._length = self.first, self._length
        other._parts = tuple(part.narrow(-2, 0, self._length).clone() for part in self._parts)
        return other

    def _forget(self, count: int) -> None:
        """Drop the first rows."""
        kept = self._length - count
        for part in self._parts:
            part.narrow(-2, 0, kept).copy_(part.narrow(-2, count, kept).clone())
        self.first += count
        self._length = kept

    def _make_room(self, like: tuple[Tensor, ...], rows: int) -> None:
        capacity = self._parts[0].shape[-2] if self._parts else 0
        if rows <= capacity:
            return
        capacity = max(_FIRST_CAPACITY, rows, 2 * capacity)
        if self.window:
            capacity = min(capacity, 2 * self.window)
        grown = tuple(
            torch.empty(
                (*part.shape[:-2], capacity, part.shape[-1]), dtype=part.dtype, device=part.device
            )
            for part in like
        )
        for kept, part in zip(self._parts, grown, strict=False):
            part.narrow(-2, 0, self._length).copy_(kept.narrow(-2, 0, self._length))
        self._parts = grown
