"""Decoder layers over a block, batched, with gradients: of DLite, of its teacher and of DSpark.

A block's slots see each other, the context tokens of their own record, and, where a drafter has a
history, the rows of a window that lie before their anchor. Tensors carry the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BlockLayers", "BlockShape", "History", "rms_norm"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What the layers are made of; names as in `DLiteConfig`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    rms_norm_eps: float
    rope_theta: float


class History(NamedTuple):
    """What N anchors of one window see of it.

    Attributes:
        features: [S, E]: of every row of the window.
        rows: [N] int64: where each anchor's taps were read; its first slot stands at `rows + 1`.
        ends: [N] int64: rows from here on are hidden from the anchor.
        starts: [N] int64: rows before are hidden, as by a sliding window.
    """

    features: Tensor
    rows: Tensor
    ends: Tensor
    starts: Tensor


class BlockLayers:
    """Layers over named tensors.

    Args:
        shape: Theirs.
        weights: Has `layers.{i}.…` of all of them; used in place.
    """

    def __init__(self, shape: BlockShape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._weights = weights

    def run(self, x: Tensor, context: Tensor | None, history: History | None = None) -> Tensor:
        """Map a block [N, B, E] to its states before the final norm, [N, B, E].

        Args:
            x: Of every slot.
            context: Tokens of each record, [N, n, E]; they stand at position 0, the block behind.
            history: Rows of a window; None where a drafter remembers nothing.
        """
        for index in range(self.shape.num_layers):
            x = self._layer(f"layers.{index}.", x, context, history)
        return x

    def _layer(
        self, prefix: str, x: Tensor, context: Tensor | None, history: History | None
    ) -> Tensor:
        weights, shape = self._weights, self.shape
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        y = self._norm(x, f"{prefix}input_layernorm.weight")
        both = y if context is None else torch.cat([context.to(y.dtype), y], dim=1)  # [N, n + B, E]
        q = self._norm(self._heads(y, f"{attention}q_proj.weight"), f"{attention}q_norm.weight")
        keys, values = self._keys_values(both, attention)
        start, slots = both.shape[1] - y.shape[1], torch.arange(1, y.shape[1] + 1, device=x.device)
        keys = torch.cat([keys[:, :, :start], self._rotate(keys[:, :, start:], slots)], dim=2)
        near = _grouped(self._rotate(q, slots), shape.num_kv_heads)  # [N·K, G·B, D]
        scores = torch.bmm(near, keys.flatten(0, 1).transpose(1, 2)).mul(shape.head_dim**-0.5)
        values = values.flatten(0, 1)
        if history is None:
            mixed = torch.bmm(scores.softmax(dim=-1).to(values.dtype), values)
        else:
            mixed = self._with_history(attention, q, (scores, values), history)
        mixed = mixed.view(x.shape[0], shape.num_heads, -1, shape.head_dim)
        mixed = mixed.transpose(1, 2).reshape(*x.shape[:2], -1)  # [N, B, H·D]
        x = x + functional.linear(mixed, weights[f"{attention}o_proj.weight"])
        y = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = functional.linear(y, weights[f"{mlp}gate_proj.weight"])
        up = functional.linear(y, weights[f"{mlp}up_proj.weight"])
        return x + functional.linear(functional.silu(gate) * up, weights[f"{mlp}down_proj.weight"])

    def _with_history(
        self, attention: str, q: Tensor, own: tuple[Tensor, Tensor], history: History
    ) -> Tensor:
        """Attention to the record's own tokens and to the window's rows, [N·K, G·B, D].

        Angles are those of the rows in the window, for queries too, so that all anchors share the
        window's keys; rotary attention knows differences only.
        """
        shape, (scores, values) = self.shape, own
        num, block = q.shape[0], q.shape[2]
        far_keys, far_values = self._keys_values(history.features.unsqueeze(0), attention)
        places = torch.arange(history.features.shape[0], device=q.device)
        far_keys, far_values = self._rotate(far_keys, places)[0], far_values[0]  # [K, S, D]
        slots = history.rows.unsqueeze(1) + 1 + torch.arange(block, device=q.device)  # [N, B]
        far = _grouped(self._rotate(q, slots), shape.num_kv_heads)
        far = far.view(num, shape.num_kv_heads, -1, shape.head_dim)
        far_scores = torch.einsum("nkgd,ksd->nkgs", far, far_keys).mul(shape.head_dim**-0.5)
        hidden = (places >= history.ends.unsqueeze(1)) | (places < history.starts.unsqueeze(1))
        far_scores = far_scores.masked_fill(hidden[:, None, None], -torch.inf).flatten(0, 1)
        shares = torch.cat([far_scores, scores.to(far_scores.dtype)], dim=-1).softmax(dim=-1)
        far_shares, near_shares = shares.to(values.dtype).split_with_sizes(
            [places.shape[0], scores.shape[-1]], dim=-1
        )
        of_far = torch.einsum(
            "nkgs,ksd->nkgd",
            far_shares.view(num, shape.num_kv_heads, -1, places.shape[0]),
            far_values,
        )
        return torch.bmm(near_shares, values) + of_far.flatten(0, 1)

    def _keys_values(self, x: Tensor, attention: str) -> tuple[Tensor, Tensor]:
        """Normed keys and values of tokens [N, S, E], [N, K, S, D] both."""
        keys = self._norm(self._heads(x, f"{attention}k_proj.weight"), f"{attention}k_norm.weight")
        return keys, self._heads(x, f"{attention}v_proj.weight")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """[N, S, E] to [N, heads, S, D]."""
        heads = functional.linear(x, self._weights[name])
        return heads.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self._weights[name], self.shape.rms_norm_eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [N, heads, S, D] to positions [S], or to [N, S] of each record."""
        dim = self.shape.head_dim
        rates = self.shape.rope_theta ** -(torch.arange(0, dim, 2, device=x.device) / dim)
        angles = positions.unsqueeze(-1) * rates
        angles = torch.cat([angles, angles], dim=-1)
        if positions.dim() == 2:
            angles = angles.unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32 or wider."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * x.square().mean(dim=-1, keepdim=True).add(eps).rsqrt() * gain


def _grouped(q: Tensor, num_kv_heads: int) -> Tensor:
    """[N, H, B, D] to [N·K, G·B, D]: the queries of a key head together."""
    return q.reshape(q.shape[0] * num_kv_heads, -1, q.shape[3])
