"""Masks that are known beforehand."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dlite_agent.sampling import TokenMask


class FixedMasks:
    """Masks of rows, as a grammar would give them.

    Args:
        allowed: [R, V] bool.
    """

    def __init__(self, allowed: Tensor) -> None:
        self._allowed = allowed

    def __len__(self) -> int:
        return self._allowed.shape[0]

    def allows(self, row: int, token_id: int) -> bool:
        return bool(self._allowed[row, token_id])

    def row(self, row: int) -> TokenMask:
        packed = np.packbits(self._allowed[row].numpy(), bitorder="little")
        padded = np.pad(packed, (0, -len(packed) % 4))
        return TokenMask(padded.view(np.int32), self._allowed.shape[1])
