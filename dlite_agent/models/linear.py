"""The seam through which every matrix product with a weight goes.

`make_linear` picks the layout that was measured fastest for the type and device among torch's
operators; callers see `Linear`. A weight is arranged at its first product, so that compiled kernels
(`kernels.row_linear`) can take it before. On a CPU, weights move into large memory pages.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.errors import ConfigurationError
from dlite_agent.kernels.large_pages import gather_pages
from dlite_agent.kernels.row_linear import WeightParts

__all__ = ["Int8Linear", "Linear", "PackedLinear", "TransposedLinear", "make_linear"]


class Linear(Protocol):
    """A fixed weight [out, in], without bias."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ: [M, in] to [M, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ, a new tensor [M, out]."""
        ...

    def parts(self) -> WeightParts:
        """What it computes with, in plain order; a copy where the weight has been arranged."""
        ...


class TransposedLinear:
    """Weight kept as [in, out]: float32 and float64 (and any type on an accelerator).

    One row of float32 against 224 → 1280 takes 12 µs this way and 22 µs with `F.linear` (one core,
    MKL).
    """

    def __init__(self, weight: Tensor) -> None:
        self._plain: Tensor | None = weight
        self._arranged = weight.new_empty(0)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ."""
        return torch.mm(x, self._weight())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ."""
        return torch.addmm(residual, x, self._weight())

    def parts(self) -> WeightParts:
        """The weight."""
        return WeightParts(self._arranged.t() if self._plain is None else self._plain)

    def _weight(self) -> Tensor:
        if self._plain is not None:
            self._arranged, self._plain = self._plain.t().contiguous(), None
            gather_pages(self._arranged)
        return self._arranged


class PackedLinear:
    """bfloat16 on a CPU: the weight in oneDNN's own order, arranged once instead of at every call.

    Bitwise equal to `F.linear`; 576 → 960 takes 25 instead of 42 µs for one row.
    """

    def __init__(self, weight: Tensor) -> None:
        self._plain: Tensor | None = weight
        self._arranged = weight.new_empty(0)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._weight(), None, "none", [], ""
        )
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._weight(), None, "add"
        )
        return out

    def parts(self) -> WeightParts:
        """The weight."""
        return WeightParts(self._arranged.to_dense() if self._plain is None else self._plain)

    def _weight(self) -> Tensor:
        if self._plain is not None:
            arrange = torch.ops.mkldnn._reorder_linear_weight
            self._arranged, self._plain = arrange(self._plain, _TYPICAL_ROWS), None
            gather_pages(self._arranged)
        return self._arranged


class Int8Linear:
    """A bfloat16 weight kept as whole numbers from -127 to 127 and one factor an output channel.

    Symmetric and to the nearest: an element is off by at most half a factor, which is the largest
    element of its channel over 127. Activations stay bfloat16.

    With torch's operators this is for memory: one row takes a little less time than in bfloat16,
    eight take twice as much. Compiled kernels (`RowLinear`) read half the bytes in half the time.

    Args:
        weight: [out, in] bfloat16; not kept.
    """

    def __init__(self, weight: Tensor) -> None:
        wide = weight.to(torch.float32)
        factors = wide.abs().amax(dim=1, keepdim=True).div_(127).to(torch.bfloat16)  # [out, 1]
        factors = torch.where(factors == 0, torch.ones_like(factors), factors)
        levels = wide.div_(factors.to(torch.float32)).round_().clamp_(-127, 127)
        self._levels = levels.to(torch.int8)
        self._factors = factors.view(-1)
        self.nbytes = self._levels.nbytes + self._factors.nbytes
        gather_pages(self._levels)

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ."""
        if x.device.type == "cpu" and x.shape[0] <= _FEW_ROWS:
            return torch._weight_int8pack_mm(x, self._levels, self._factors)
        return functional.linear(x, self._levels.to(x.dtype)).mul_(self._factors)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ."""
        return self(x).add_(residual)

    def parts(self) -> WeightParts:
        """Levels and factors."""
        return WeightParts(self._levels, self._factors)

    def restored(self) -> Tensor:
        """The weight that is computed with, [out, in] float32."""
        return self._levels.to(torch.float32) * self._factors.to(torch.float32).unsqueeze(1)


_TYPICAL_ROWS = 1
_FEW_ROWS = 16  # above, int8's own kernel is slower than a product with the restored weight


def make_linear(weight: Tensor, quantize: Literal["int8"] | None = None) -> Linear:
    """Take over a weight [out, in] in the layout that is fastest for its type and device.

    Args:
        weight: [out, in].
        quantize: `"int8"`: keep whole numbers and a factor a channel; for bfloat16 only.

    Raises:
        ConfigurationError: Another type was to be quantized.
    """
    if quantize == "int8":
        if weight.dtype != torch.bfloat16:
            raise ConfigurationError(
                f"int8 weights compute in bfloat16, but dtype is {str(weight.dtype)!r}; use "
                "dtype='bfloat16' or leave the weights unquantized"
            )
        return Int8Linear(weight)
    if (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return PackedLinear(weight)
    return TransposedLinear(weight)
