"""Rotary position embedding as a product of complex numbers.

Hugging Face checkpoints rotate element d with element d + D/2. Rows of the query and key
projections are re-ordered once at load (`pair_order`), so that the two partners stand side by side
and one complex multiplication rotates them. A dot product of queries and keys does not see the
order, so scores, and everything behind them, stay what they were.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlite_agent.kernels.rope_frequencies import rope_frequencies
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["RotaryTable", "pair_order", "rotate"]


def pair_order(head_dim: int) -> Tensor:
    """Elements of the checkpoint's layout in ours: 0, D/2, 1, D/2 + 1, …; [D] int64."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring elements.

    Args:
        x: [M, N, D] float32 or float64, contiguous; partners side by side (`pair_order`).
        rotation: [M, 1, D/2] complex of the same precision, from `RotaryTable`.

    Returns:
        [M, N, D], a new tensor.
    """
    pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2)


class RotaryTable:
    """`m · exp(i · position · f_j)` for the positions asked for so far; grows by doubling.

    Frequencies f_j and attention factor m are those of `rope_frequencies`.

    Angles are float32 as in transformers, whatever the model's type: at position 40,000 a float32
    angle is off by 1e-3, and that is what the checkpoint was trained with.

    Args:
        head_dim: D.
        theta: Base of the frequencies.
        dtype: float32 or float64; type of what is rotated.
        device: Where the table is kept.
        scaling: How the frequencies are stretched.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        scaling: RopeScaling | None = None,
    ) -> None:
        frequencies, self._attention_factor = rope_frequencies(
            head_dim, theta, RopeScaling() if scaling is None else scaling
        )
        self._frequencies = frequencies.to(device)
        self._dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
        self._table = self._compute(1024)

    def rows(self, start: int, count: int) -> Tensor:
        """Rotations of positions [start, start + count): [count, 1, D/2] complex; a view."""
        if start + count > self._table.shape[0]:
            self._table = self._compute(max(start + count, 2 * self._table.shape[0]))
        return self._table.narrow(0, start, count)

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(
            num_positions, dtype=torch.float32, device=self._frequencies.device
        )
        angles = torch.outer(positions, self._frequencies)
        factor = self._attention_factor
        table = torch.complex(angles.cos() * factor, angles.sin() * factor)
        return table.to(self._dtype).unsqueeze(1)
