"""Which tokens each row may choose, a bit a token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TokenMasks"]


class TokenMasks:
    """Masks of the rows of a draft, on the host.

    Unpacked masks of nine rows of a vocabulary of 152,000 tokens take a millisecond to make, and
    logits under them three more; a greedy row that is allowed needs neither.

    Args:
        bits: [R, W] int32; bit j of word i stands for id 32 i + j.
        vocab_size: Columns of the logits; ids beyond the bits are not allowed.
    """

    def __init__(self, bits: NDArray[np.int32], vocab_size: int) -> None:
        self._bits = bits.view(np.uint8)
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, allowed: Tensor) -> TokenMasks:
        """Pack masks, [R, V] bool."""
        packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
        padded = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 4)))
        return cls(padded.view(np.int32), allowed.shape[1])

    def __len__(self) -> int:
        return int(self._bits.shape[0])

    def allows(self, row: int, token_id: int) -> bool:
        """Whether a row may choose a token."""
        byte = token_id >> 3
        return byte < self._bits.shape[1] and bool(self._bits[row, byte] >> (token_id & 7) & 1)

    def unpacked(self, start: int, stop: int) -> Tensor:
        """[stop - start, V] bool of some rows."""
        bits = self._bits[start:stop]
        allowed = np.unpackbits(bits, axis=1, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(allowed).view(torch.bool)
