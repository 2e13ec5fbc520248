"""Decoder layers through compiled kernels, all of them in one call: `layer_kernels.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.kernels.row_kernels import HeadNorm, RowKernels, RowPlan
from dlite_agent.kernels.row_linear import LinearSpec, RowLinear

__all__ = ["RowLayer", "RowLayers"]

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("input_norm", "ffn_norm")),
        *((name, LinearSpec) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("head_weight", "keys", "values")),
        ("head_stride", _count),
        *((name, ctypes.c_float) for name in ("norm_eps", "head_eps")),
        ("is_normed", ctypes.c_int),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("x", "normed", "qkv", "mixed", "activated")),
        *((name, _pointer) for name in ("digits", "steps", "heads", "attention")),
        ("rows", _count),
        *((name, ctypes.c_int) for name in ("is_bf16", "threads")),
    ]


@dataclass(frozen=True, slots=True)
class RowLayer:
    """What one layer computes with; norms are float32, contiguous.

    Attributes:
        input_norm: [E].
        qkv: E -> (H + 2K)·D.
        head_norm: Of queries and keys.
        out: H·D -> E.
        ffn_norm: [E].
        gate_up: E -> F, gated.
        down: F -> E.
        keys: [K, P, D] of the pool.
        values: As `keys`.
    """

    input_norm: Tensor
    qkv: RowLinear
    head_norm: HeadNorm
    out: RowLinear
    ffn_norm: Tensor
    gate_up: RowLinear
    down: RowLinear
    keys: Tensor
    values: Tensor


class RowLayers:
    """The layers of a model, and the calls that run them.

    Args:
        kernels: Compute.
        layers: Kept.
        eps: Of the layers' norms.
    """

    def __init__(self, kernels: RowKernels, layers: Sequence[RowLayer], eps: float) -> None:
        self._kernels = kernels
        self._layers = layers  # owns what the structs point to
        self._structs = (_Layer * len(layers))(*[_struct(layer, eps) for layer in layers])
        self._widest = max((_linears(layers[0])), key=lambda linear: linear.spec.ins)

    def run(
        self,
        x: Tensor,
        plan: RowPlan,
        stop: frozenset[int],
        between: Callable[[int, Tensor], None] | None,
    ) -> dict[int, Tensor]:
        """Run all layers over x [M, E], in place.

        Args:
            x: Contiguous.
            plan: Where the rows lie, and whose attention is computed here.
            stop: Layers whose results are copied.
            between: Called in each layer with its index and the attention [M, H·D] to complete.

        Returns:
            Copies of x behind the layers of `stop`.
        """
        copies: dict[int, Tensor] = {}
        forward, kept = self._forward(x, plan)
        at, mixed = ctypes.addressof(forward), kept[2]
        size, base = ctypes.sizeof(_Layer), ctypes.addressof(self._structs)
        if between is None:
            taps = x.new_empty(len(stop), *x.shape)
            is_tapped = bytes(index in stop for index in range(len(self._layers)))
            self._kernels.layers(base, len(self._layers), at, is_tapped, taps.data_ptr(), x.nbytes)
            return dict(zip(sorted(stop), taps.unbind(), strict=True))
        for index in range(len(self._layers)):
            self._kernels.attention_half(base + index * size, at)
            between(index, mixed)
            self._kernels.ffn_half(base + index * size, at)
            if index in stop:
                copies[index] = x.clone()
        return copies

    def _forward(self, x: Tensor, plan: RowPlan) -> tuple[_Forward, list[Tensor]]:
        """The struct, and the buffers that it points to."""
        num_rows, layer = x.shape[0], self._layers[0]
        widths = (layer.out.spec.outs, layer.qkv.spec.outs, layer.out.spec.ins, layer.down.spec.ins)
        buffers = [x.new_empty(num_rows, width) for width in widths]
        kept = [*buffers, *self._widest.scratch(num_rows)]
        forward = _Forward(x.data_ptr(), *[buffer.data_ptr() for buffer in kept], *plan.addresses)
        forward.rows, forward.threads = num_rows, torch.get_num_threads()
        forward.is_bf16 = x.dtype == torch.bfloat16
        return forward, kept


def _linears(layer: RowLayer) -> tuple[RowLinear, ...]:
    return layer.qkv, layer.out, layer.gate_up, layer.down


def _struct(layer: RowLayer, eps: float) -> _Layer:
    norm = layer.head_norm
    return _Layer(
        layer.input_norm.data_ptr(),
        layer.ffn_norm.data_ptr(),
        *[linear.spec for linear in _linears(layer)],
        norm.weight.data_ptr(),
        layer.keys.data_ptr(),
        layer.values.data_ptr(),
        layer.keys.stride(0),
        eps,
        norm.eps,
        norm.is_normed,
    )
