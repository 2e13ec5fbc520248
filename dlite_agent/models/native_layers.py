"""The decoder layers through compiled row kernels: eight calls a layer, whatever the batch.

With the packed products of bfloat16 (`models.linear`), a row's result does not depend on the rows
beside it as long as those keep their order of summation: measured up to 8 rows, and up to 33 where
they are shorter than 2,048 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlite_agent.kernels.attention import attend
from dlite_agent.kernels.row_kernels import HeadShape, PartRows, RowKernels, RowPlan
from dlite_agent.models.layer_weights import LayerWeights
from dlite_agent.models.layers import BatchPart
from dlite_agent.models.spans import Span
from dlite_agent.models.target import TargetConfig

__all__ = ["NativeLayers"]


class NativeLayers:
    """Same as `models.layers.TorchLayers`, for bfloat16 and float32 on a CPU.

    Args:
        kernels: The compiled kernels.
        layers: Weights of the decoder layers.
        pool: Keys and values [K, P, D] of each layer; not owned.
        config: Shape of the model.
    """

    def __init__(
        self,
        kernels: RowKernels,
        layers: Sequence[LayerWeights],
        pool: Sequence[Span],
        config: TargetConfig,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._layers = layers
        self._pool = pool
        self._shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._like = torch.empty(0, config.head_dim, dtype=pool[0].keys.dtype)

    def run(
        self, x: Tensor, rotation: Tensor, parts: Sequence[BatchPart], taps: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `TorchLayers.run`; x is changed in place."""
        kernels, plan = self._kernels, self._plan(rotation, parts)
        many = [part for part in parts if not RowPlan.fits(self._shape, part.num_rows)]
        mixed = x.new_empty(x.shape[0], self._shape.num_heads * self._shape.head_dim)
        normed = torch.empty_like(x)
        tapped: dict[int, Tensor] = {}
        delta: Tensor | None = None  # what the layer before adds to x
        activated: Tensor | None = None
        for index, (layer, pool) in enumerate(zip(self._layers, self._pool, strict=True)):
            norm = layer.input_norm
            kernels.norm(x, delta, norm.weight, norm.eps, normed)
            if index - 1 in taps:
                tapped[index - 1] = x.clone()
            plan.place(layer.qkv(normed), pool, layer.head_norm)
            plan.attend(pool, mixed)
            for part in many:
                rows = slice(part.first_row, part.first_row + part.num_rows)
                mixed[rows] = attend(
                    plan.queries[rows], part.kv.spans(index), part.plan(self._config, self._like)
                )
            norm = layer.ffn_norm
            kernels.norm(x, layer.out(mixed), norm.weight, norm.eps, normed)
            gate_up = layer.gate_up(normed)
            if activated is None:
                activated = x.new_empty(x.shape[0], gate_up.shape[1] // 2)
            kernels.swiglu(gate_up, activated)
            delta = layer.down(activated)
        if delta is not None:
            x.add_(delta)
        if len(self._layers) - 1 in taps:
            tapped[len(self._layers) - 1] = x
        return x, tapped

    def _plan(self, rotation: Tensor, parts: Sequence[BatchPart]) -> RowPlan:
        slots: list[int] = []
        small: list[PartRows] = []
        for part in parts:
            length = part.kv.length
            for row, count in part.kv.runs(length, length + part.num_rows):
                slots.extend(range(row, row + count))
            if RowPlan.fits(self._shape, part.num_rows):
                runs = part.kv.runs(0, length + part.num_rows)
                small.append(PartRows(part.first_row, part.num_rows, runs))
        return RowPlan(self._kernels, self._shape, rotation, slots, small)
