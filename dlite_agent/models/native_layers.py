"""The decoder layers through compiled kernels: one call for all of them.

A row's result does not depend on the rows beside it, bit for bit: not the products', whatever the
number of rows, and not attention's for sessions with up to 16 rows. More rows of a session (a
chunk of prefill) take torch's attention, and two calls a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlite_agent.kernels.attention import attend
from dlite_agent.kernels.large_pages import LargePageMemory, return_freed
from dlite_agent.kernels.row_kernels import HeadShape, PartRows, RowKernels, RowPlan
from dlite_agent.kernels.row_layers import RowLayer, RowLayers
from dlite_agent.kernels.row_linear import RowLinear
from dlite_agent.models.layer_weights import LayerWeights
from dlite_agent.models.layers import BatchPart
from dlite_agent.models.spans import Span
from dlite_agent.models.target import TargetConfig

__all__ = ["NativeLayers"]


class NativeLayers:
    """Same as `models.layers.TorchLayers`, for bfloat16, int8 and float32 on a CPU.

    Args:
        kernels: The compiled kernels.
        layers: Weights of the decoder layers that `fits`; taken over, the list is empty afterwards.
        pool: Keys and values [K, P, D] of each layer; not owned.
        config: Shape of the model.
    """

    def __init__(
        self,
        kernels: RowKernels,
        layers: list[LayerWeights],
        pool: Sequence[Span],
        config: TargetConfig,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._like = torch.empty(0, config.head_dim, dtype=pool[0].keys.dtype)
        memory = LargePageMemory()
        packed = []
        for span in pool:
            packed.append(_packed(kernels, layers.pop(0), span, memory))
            return_freed()  # one layer at a time is in memory twice
        memory.close()
        self._run = RowLayers(kernels, packed, config.rms_norm_eps)

    @staticmethod
    def fits(config: TargetConfig, weight_dtype: torch.dtype) -> bool:
        """The kernels can compute with weights of this shape and type."""
        inputs = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.intermediate_size,
        )
        return all(RowLinear.fits(weight_dtype, ins) for ins in inputs)

    def run(
        self, x: Tensor, rotation: Tensor, parts: Sequence[BatchPart], taps: frozenset[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `TorchLayers.run`; x is changed in place."""
        plan = self._plan(rotation, parts)
        many = [part for part in parts if not RowPlan.fits(self._shape, part.num_rows)]

        def attend_many(index: int, mixed: Tensor) -> None:
            for part in many:
                rows = slice(part.first_row, part.first_row + part.num_rows)
                mixed[rows] = attend(
                    plan.queries[rows], part.kv.spans(index), part.plan(self._config, self._like)
                )

        tapped = self._run.run(x, plan, taps, attend_many if many else None)
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


def _packed(
    kernels: RowKernels, layer: LayerWeights, span: Span, memory: LargePageMemory
) -> RowLayer:
    return RowLayer(
        input_norm=layer.input_norm.weight,
        qkv=RowLinear(kernels, layer.qkv.parts(), memory),
        head_norm=layer.head_norm,
        out=RowLinear(kernels, layer.out.parts(), memory),
        ffn_norm=layer.ffn_norm.weight,
        gate_up=RowLinear(kernels, layer.gate_up.parts(), memory, is_gated=True),
        down=RowLinear(kernels, layer.down.parts(), memory),
        keys=span.keys,
        values=span.values,
    )
