"""A recurrent head of a small vocabulary through one compiled call a block.

It computes what `block_head.BlockHead` does with all rows: seven slots of a dozen numpy calls each
take a quarter of a small target's step, for a few microseconds of arithmetic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from dlite_agent.drafters.copy_hint import TokenHistory
from dlite_agent.kernels.row_kernels import RowKernels

__all__ = ["NativeHead"]

_pointer = ctypes.c_void_p
_MAX_RANK = 256
_LANES = 16


class _Head(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("factor", "token_rows", "state_proj")),
        *((name, _pointer) for name in ("copy_rows", "length_rows", "copy_gain", "copy_bias")),
        ("vocabulary", ctypes.c_int64),
        ("rank", ctypes.c_int64),
    ]


class NativeHead:
    """The head with its tables. Used by one thread at a time.

    Args:
        kernels: Compute.
        load: Gives a tensor of the head by its name without `head.`, float32.
        factor: P = W·U, [V, r] float32.
        embedding: Of all tokens, [V, E] float32.
        is_copying: The head reads hints.
    """

    def __init__(
        self,
        kernels: RowKernels,
        load: Callable[[str], Tensor],
        factor: Tensor,
        embedding: Tensor,
        *,
        is_copying: bool,
    ) -> None:
        vocab_size, rank = factor.shape
        half = torch.ones(2 * rank)
        half[:rank] = 0.5  # σ(x) = (1 + tanh(x / 2)) / 2
        self._kernels = kernels
        self._hidden_proj = (load("hidden_proj.weight").t() * half).contiguous()
        self._bias = load("bias") * half
        tables: dict[str, Tensor] = {
            "factor": factor.t().contiguous(),
            "token_rows": embedding @ load("token_proj.weight").t() * half,
            "state_proj": (load("state_proj.weight").t() * half).contiguous(),
        }
        if is_copying:
            tables |= {
                "copy_rows": embedding @ load("copy_proj.weight").t() * half,
                "length_rows": load("copy_length.weight") * half,
                "copy_gain": load("copy_gain.weight")[0].contiguous(),
                "copy_bias": load("copy_bias"),
            }
        self._tables: Mapping[str, Tensor] = tables  # owns what the struct points to
        addresses = {name: table.data_ptr() for name, table in tables.items()}
        self._head = _Head(**addresses, vocabulary=vocab_size, rank=rank)
        self._scores = torch.empty(vocab_size)

    @staticmethod
    def fits(vocab_size: int, rank: int) -> bool:
        """The kernel computes heads of this size."""
        return rank <= _MAX_RANK and vocab_size % _LANES == 0

    def draft(
        self, base: Tensor, hidden: Tensor, history: TokenHistory, min_chance: float
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """See `BlockHead.draft`; the last id of the history is the anchor.

        Args:
            base: [k, V] float32, contiguous.
            hidden: [k, E] float32.
            history: Of the session, or the anchor alone where nothing is copied.
            min_chance: As there.
        """
        num_slots = base.shape[0]
        of_hidden = torch.addmm(self._bias, hidden, self._hidden_proj)
        ids = history.with_room(num_slots)
        shares = np.empty(num_slots, dtype=np.float32)
        count = self._kernels.draft(
            ctypes.addressof(self._head),
            base.data_ptr(),
            of_hidden.data_ptr(),
            num_slots,
            ids.ctypes.data,
            history.length,
            min_chance,
            self._scores.data_ptr(),
            shares.ctypes.data,
        )
        chosen = ids[history.length : history.length + count]
        return tuple(chosen.tolist()), tuple(shares[:count].tolist())
