"""Taps in eight bits: groups of channels with a scale each, since a few channels are huge.

One scale for a whole state would leave nothing of its small channels: in Qwen3 a handful are a
thousand times the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP", "pack_taps", "packed_bytes", "unpack_taps"]

GROUP = 32
"""Channels of a scale; where the hidden size is no multiple, all channels are one group."""


def pack_taps(taps: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., E] int8 and scales [..., groups] bfloat16 of states [..., E]."""
    groups = taps.float().unflatten(-1, (-1, _group(taps.shape[-1])))
    scales = groups.abs().amax(dim=-1).div(127.0).clamp_min(1e-12).to(torch.bfloat16)
    codes = groups.div(scales.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return codes.flatten(-2), scales


def unpack_taps(codes: Tensor, scales: Tensor) -> Tensor:
    """States [..., E] float32 of codes and scales."""
    groups = codes.unflatten(-1, (scales.shape[-1], -1)).float()
    states: Tensor = groups.mul(scales.float().unsqueeze(-1)).flatten(-2)
    return states


def packed_bytes(hidden_size: int) -> int:
    """Bytes of one state."""
    return hidden_size + 2 * (hidden_size // _group(hidden_size))


def _group(hidden_size: int) -> int:
    return hidden_size if hidden_size % GROUP else GROUP
