"""Which tokens a row may choose."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["RowMasks", "TokenMask"]

# Where fewer bytes than one in so many allow anything, the allowed logits are gathered.
_SPARSE_SHARE = 4


class TokenMask:
    """The tokens of one row, a bit a token, on the host.

    Nothing of it costs a pass over the vocabulary: the bits are looked at in bytes, and those that
    are all zeros, or all ones, are skipped.

    Args:
        bits: [W] int32; bit j of word i stands for id 32 i + j. Not copied.
        vocab_size: Columns of the logits; ids beyond the bits are not allowed.
    """

    def __init__(self, bits: NDArray[np.int32], vocab_size: int) -> None:
        self._bytes = bits.view(np.uint8)
        self._vocab_size = vocab_size

    @property
    def is_sparse(self) -> bool:
        """Whether so few are allowed that it pays to look at nothing else."""
        return int(np.count_nonzero(self._bytes)) * _SPARSE_SHARE < len(self._bytes)

    def holds(self, token_ids: Tensor) -> Tensor:
        """Whether each of some ids [n] is allowed; [n] bool on their device."""
        ids = token_ids.cpu().numpy()
        places = np.minimum(ids >> 3, len(self._bytes) - 1)
        found = (self._bytes[places] >> (ids & 7)) & 1
        return torch.from_numpy((found == 1) & (ids < 8 * len(self._bytes))).to(token_ids.device)

    def ids(self, device: torch.device) -> Tensor:
        """The ids that are allowed, ascending, [n] int64.

        Raises:
            FloatingPointError: None is.
        """
        ids = self._places(self._bytes)
        if not len(ids):
            raise FloatingPointError("a mask excludes every token")
        return torch.from_numpy(ids).to(device)

    def ban(self, values: Tensor) -> Tensor:
        """Set what is not allowed to -inf, in place.

        Args:
            values: [V] of a floating type.
        """
        banned = torch.from_numpy(self._places(~self._bytes)).to(values.device)
        values[8 * len(self._bytes) :] = -torch.inf
        return values.index_fill_(0, banned, -torch.inf)

    def _places(self, raw: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Ids whose bits are set, ascending, below V."""
        used = raw.nonzero()[0]
        within, offsets = np.unpackbits(raw[used, None], axis=1, bitorder="little").nonzero()
        ids = 8 * used[within] + offsets
        return ids[: np.searchsorted(ids, self._vocab_size)]


class RowMasks(Protocol):
    """The masks of the rows of a draft; one is made when it is asked for."""

    def __len__(self) -> int:
        """Rows that have one."""
        ...

    def allows(self, row: int, token_id: int) -> bool:
        """Whether a row may choose a token; cheaper than its mask."""
        ...

    def row(self, row: int) -> TokenMask:
        """The mask of a row; good until the next one is asked for."""
        ...
