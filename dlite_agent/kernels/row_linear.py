"""Products of a weight with the rows of a forward, compiled: `linear_kernels.c`.

A weight is kept once, packed in the order in which it is read, for one row and for many. A row's
result is the same, bit for bit, whatever the number of rows and threads.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.large_pages import LargePageMemory
from dlite_agent.kernels.row_kernels import RowKernels

__all__ = ["LinearSpec", "RowLinear", "WeightParts"]

_GROUP = 16  # outputs; PANEL / 2 in linear_kernels.c
_KINDS = {torch.bfloat16: 0, torch.int8: 1, torch.float32: 2}
_MULTIPLES = {torch.bfloat16: 32, torch.int8: 64, torch.float32: 16}  # inputs of a tile pair
_FEW_ELEMENTS = 2**16  # up to here one thread is faster; FEW_ELEMENTS in layer_kernels.c


class WeightParts(NamedTuple):
    """A weight as it is computed with: `weight * factors[:, None]`, and a bias.

    Attributes:
        weight: [out, in] float32 or bfloat16, or whole numbers in int8.
        factors: [out], of int8.
        bias: [out].
    """

    weight: Tensor
    factors: Tensor | None = None
    bias: Tensor | None = None


class LinearSpec(ctypes.Structure):
    """`linear` in interface.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "factors", "bias")),
        *((name, ctypes.c_int64) for name in ("outs", "ins")),
        *((name, ctypes.c_int) for name in ("kind", "uses_tiles", "is_gated", "is_wide")),
    ]


class RowLinear:
    """A packed weight.

    Args:
        kernels: Compute.
        parts: The weight; not kept. `fits` says which can be.
        memory: Where it goes.
        is_gated: The weight is [2·out, in], gates and then ups, and results are silu(gate)·up.
        is_wide: Results are float32.

    Attributes:
        spec: For `kernels.row_layers`; lives as long as this.
        nbytes: Of weight, factors and bias.
    """

    def __init__(
        self,
        kernels: RowKernels,
        parts: WeightParts,
        memory: LargePageMemory,
        *,
        is_gated: bool = False,
        is_wide: bool = False,
    ) -> None:
        weight = parts.weight.contiguous()
        num_rows, ins = weight.shape
        outs = num_rows // 2 if is_gated else num_rows
        padded = 2 * (outs + -outs % _GROUP) if is_gated else outs + -outs % (2 * _GROUP)
        self._kernels = kernels
        piece = memory.take(padded * ins * weight.itemsize)
        self._packed = piece.view(weight.dtype)
        self._per_output = [
            None if numbers is None else _in_panels(numbers, is_gated)
            for numbers in (parts.factors, parts.bias)
        ]
        is_int8 = weight.dtype == torch.int8
        self._out_type = torch.bfloat16 if is_int8 and not is_wide else weight.dtype
        if is_wide:
            self._out_type = torch.float32
        self._uses_digits = is_int8 and kernels.has_tiles
        factors, bias = (None if n is None else n.data_ptr() for n in self._per_output)
        self.spec = LinearSpec(self._packed.data_ptr(), factors, bias, outs, ins)
        self.spec.kind = _KINDS[weight.dtype]
        self.spec.uses_tiles = kernels.has_tiles and weight.dtype != torch.float32
        self.spec.is_gated, self.spec.is_wide = is_gated, is_wide
        self._address = ctypes.addressof(self.spec)
        kernels.pack(
            self._address, weight.data_ptr(), self._packed.data_ptr(), torch.get_num_threads()
        )
        self.nbytes = self._packed.nbytes + sum(
            numbers.nbytes for numbers in self._per_output if numbers is not None
        )

    @staticmethod
    def fits(dtype: torch.dtype, ins: int) -> bool:
        """The kernels know weights of this type (int8 included) with so many inputs."""
        return dtype in _MULTIPLES and ins % _MULTIPLES[dtype] == 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x·Wᵀ and the bias, and the residual [M, out] where there is one.

        Args:
            x: [M, in], contiguous; float32 for a float32 weight, else bfloat16.
            residual: [M, out] of the result's type, contiguous.
        """
        num_rows = x.shape[0]
        out = x.new_empty(num_rows, self.spec.outs, dtype=self._out_type)
        digits, steps = self.scratch(num_rows)
        is_large = self.spec.outs * self.spec.ins > _FEW_ELEMENTS
        self._kernels.linear(
            self._address,
            x.data_ptr(),
            num_rows,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            digits.data_ptr(),
            steps.data_ptr(),
            torch.get_num_threads() if is_large else 1,
        )
        return out

    def scratch(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """What int8 on the matrix unit needs to write: digits [2, M, in] and steps [M]."""
        size = num_rows if self._uses_digits else 0
        return torch.empty(2, size, self.spec.ins, dtype=torch.int8), torch.empty(size)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [n, in] of the weight, exactly, for ids [n] int64; bfloat16 and float32 only.

        Raises:
            IndexError: An id is none of the weight's.
        """
        out = torch.empty(ids.shape[0], self.spec.ins, dtype=self._packed.dtype)
        ids = ids.contiguous()
        unpack = self._kernels.unpack_rows
        if not unpack(self._address, ids.data_ptr(), ids.shape[0], out.data_ptr()):
            raise IndexError(f"one of the ids {ids.tolist()!r} is outside [0, {self.spec.outs})")
        return out


def _in_panels(numbers: Tensor, is_gated: bool) -> Tensor:
    """Of each output, in the order of the panels, padded; float32."""
    wide = numbers.to(torch.float32)
    if not is_gated:
        return functional.pad(wide, (0, -wide.shape[0] % (2 * _GROUP)))
    halves = wide.view(2, -1)
    halves = functional.pad(halves, (0, -halves.shape[1] % _GROUP))
    return halves.view(2, -1, _GROUP).transpose(0, 1).contiguous()
