"""The decoder layers over the rows of a batch, in torch's operators: any type and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.attention import AttentionPlan, attend, attend_apart, plan_attention
from dlite_agent.kernels.rotary import rotate
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.layer_weights import LayerWeights
from dlite_agent.models.target import TargetConfig

__all__ = ["BatchPart", "DecoderLayers", "TorchLayers", "joined"]


class BatchPart:
    """The rows of one session: [first_row, first_row + num_rows) of a forward's."""

    def __init__(self, kv: KVCache, first_row: int, num_rows: int) -> None:
        self.kv = kv
        self.first_row = first_row
        self.num_rows = num_rows
        self._plan: AttentionPlan | None = None

    def plan(self, config: TargetConfig, like: Tensor) -> AttentionPlan:
        """How torch computes this session's attention; made once.

        Args:
            config: Of the model.
            like: Of the type and device of keys and values, last dimension D.
        """
        if self._plan is None:
            shape = (self.num_rows, config.num_heads, config.num_kv_heads)
            self._plan = plan_attention(shape, self.kv.span_rows(), like)
        return self._plan


class DecoderLayers(Protocol):
    """All decoder layers of a model."""

    def run(
        self, x: Tensor, rotation: Tensor, parts: Sequence[BatchPart], taps: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute all layers and write every row's keys and values.

        Args:
            x: Embedded tokens [Q, E]; may be changed in place.
            rotation: Of every row, [Q, 1, D/2] complex, contiguous.
            parts: Sessions, in the order of their rows; each has reserved its rows.
            taps: Layers whose residual stream is captured.

        Returns:
            The residual stream [Q, E] behind the last layer, and behind the tapped ones.
        """
        ...


class TorchLayers:
    """Few, fused operators of torch.

    Args:
        config: Shape of the model.
        layers: Their weights.
        like: Of the type and device of keys and values, last dimension D.
        is_audit: Results of a row do not depend on where in a draft it stands, nor on pages.
    """

    def __init__(
        self,
        config: TargetConfig,
        layers: Sequence[LayerWeights],
        like: Tensor,
        *,
        is_audit: bool = False,
    ) -> None:
        self._config = config
        self._layers = layers
        self._like = like
        self._is_audit = is_audit

    def run(
        self, x: Tensor, rotation: Tensor, parts: Sequence[BatchPart], taps: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `DecoderLayers.run`."""
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            mixed = self._attention(layer.qkv(layer.input_norm(x)), index, rotation, parts)
            x = layer.out.add_to(x, mixed)
            gate, up = layer.gate_up(layer.ffn_norm(x)).chunk(2, dim=-1)
            x = layer.down.add_to(x, functional.silu(gate).mul_(up))
            if index in taps:
                tapped[index] = x
        return x, tapped

    def _attention(
        self, qkv: Tensor, index: int, rotation: Tensor, parts: Sequence[BatchPart]
    ) -> Tensor:
        """[Q, H·D]: rows against their own session's cache, which takes their keys and values."""
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, self._config.head_dim)  # [Q, H + 2K, D]
        turned, values = heads.split_with_sizes([num_heads + num_kv_heads, num_kv_heads], 1)
        turned = rotate(self._layers[index].head_norm(turned), rotation)
        q, keys = turned.split_with_sizes([num_heads, num_kv_heads], 1)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [K, Q, D]
        mixed: list[Tensor] = []
        for part in parts:
            first, count = part.first_row, part.num_rows
            part.kv.write(index, keys.narrow(1, first, count), values.narrow(1, first, count))
            queries, spans = q.narrow(0, first, count), part.kv.spans(index)
            if self._is_audit:
                mixed.append(attend_apart(queries, spans))
            else:
                mixed.append(attend(queries, spans, part.plan(self._config, self._like)))
        return joined(mixed)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; no copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
