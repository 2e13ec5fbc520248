"""The backbone of DLite through compiled row kernels: nine calls a layer instead of twenty-five.

Context and block lie in a small pool of their own, rows [0, n) and [n, n + B). Every slot is a part
of one row whose keys are all of them, so the kernels' causal attention reads the whole block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.row_kernels import HeadShape, PartRows, RowKernels, RowPlan
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.linear import Linear

__all__ = ["BlockLayer", "NativeBlock"]


@dataclass(frozen=True, slots=True)
class BlockLayer:
    """What a layer computes with; gains of the norms before a product, times √E, are in it."""

    qkv: Linear  # E -> (H + 2K)·D
    head_norm: RMSNorm  # [B, H + K, D]; queries are scaled by 1/√D
    out: Linear  # H·D -> E
    gate_up: Linear  # E -> 2·ffn
    down: Linear  # ffn -> E


class NativeBlock:
    """Runs the layers over buffers that are made once. Used by one thread at a time.

    Args:
        kernels: Compute; they must support the type and the heads.
        config: Shape.
        layers: Weights.
        final_norm: Behind the last layer.
        rotation: Of the block's positions, [B, 1, D/2] complex64.
    """

    def __init__(
        self,
        kernels: RowKernels,
        config: DLiteConfig,
        layers: Sequence[BlockLayer],
        final_norm: RMSNorm,
        rotation: Tensor,
    ) -> None:
        self._kernels, self._config, self._layers = kernels, config, layers
        self._final_norm = final_norm
        self._rotation = rotation.view(config.block_size, -1).contiguous()
        self._direction = torch.full((config.hidden_size,), config.hidden_size**-0.5)
        self._plans: dict[int, tuple[RowPlan, Tensor]] = {}

    def run(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Map the block [B, E] to its final states [B, E].

        Args:
            x: Changed in place.
            keys: Of the context, normed, [layers, K, n, D].
            values: As `keys`.
        """
        kernels, config = self._kernels, self._config
        num_context = keys.shape[2]
        plan, pool = self._plan(num_context, x.dtype)
        pool[0, :, :, :num_context] = keys
        pool[1, :, :, :num_context] = values
        eps = config.rms_norm_eps
        normed = torch.empty_like(x)
        mixed = x.new_empty(x.shape[0], config.num_heads * config.head_dim)
        activated = x.new_empty(x.shape[0], config.intermediate_size)
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            rows = pool[0, index], pool[1, index]
            kernels.norm(x, delta, self._direction, eps, normed)
            plan.place(layer.qkv(normed), rows, layer.head_norm)
            plan.attend(rows, mixed)
            kernels.norm(x, layer.out(mixed), self._direction, eps, normed)
            kernels.swiglu(layer.gate_up(normed), activated)
            delta = layer.down(activated)
        kernels.norm(x, delta, self._final_norm.weight, eps, normed)
        return normed

    def _plan(self, num_context: int, dtype: torch.dtype) -> tuple[RowPlan, Tensor]:
        """Buffers for n context tokens: the plan, and the pool [2, layers, K, n + B, D]."""
        found = self._plans.get(num_context)
        if found is None:
            config, num_keys = self._config, num_context + self._config.block_size
            shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
            parts = [PartRows(slot, 1, [(0, num_keys)]) for slot in range(config.block_size)]
            slots = range(num_context, num_keys)
            plan = RowPlan(self._kernels, shape, self._rotation, slots, parts)
            pool = torch.empty(
                2, config.num_layers, config.num_kv_heads, num_keys, config.head_dim, dtype=dtype
            )
            found = self._plans[num_context] = plan, pool
        return found
