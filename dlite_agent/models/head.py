"""From the last hidden state to logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.config import Quantization
from dlite_agent.kernels.large_pages import LargePageMemory
from dlite_agent.kernels.row_kernels import RowKernels
from dlite_agent.kernels.row_linear import RowLinear
from dlite_agent.models.linear import Linear, make_linear

__all__ = ["NUM_RESCORED", "VocabularyHead", "best_candidates"]

NUM_RESCORED = 64
_BLOCK = 64


class VocabularyHead:
    """The projection to the vocabulary; the best candidates of bfloat16 are computed in float32.

    A logit of 16 to 32 in bfloat16 is a multiple of 1/8: the best tokens tie or change places.
    So the 64 largest of each row are computed again, from the same hidden state and the weight's
    rows, with products and sums in float32; the others stay as rounded as they are. A row's result
    does not depend on the other rows. Costs 110 µs a row at V = 49,152 and 140 µs at 151,936 (one
    core), where the projection takes 3,000 and 17,000.

    Compiled kernels (`use_kernels`) return every logit in float32, so nothing is computed again,
    except with int8 levels: there the 64 are computed from the rows before they were quantized.

    Args:
        rows: [V, E]. Kept for bfloat16 without kernels, and for int8: a tied head shares the
            embedding's rows, an untied one costs them once more (2·V·E bytes).
        quantize: As for `make_linear`.
    """

    def __init__(self, rows: Tensor, quantize: Quantization | None = None) -> None:
        self._linear: Linear = make_linear(rows, quantize)
        self._packed: RowLinear | None = None
        self._is_quantized = quantize is not None
        self._wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        self._rows = rows if rows.dtype == torch.bfloat16 else None
        self.nbytes = self._linear.nbytes

    def use_kernels(self, kernels: RowKernels, memory: LargePageMemory) -> RowLinear | None:
        """Compute with compiled kernels from now on.

        Returns:
            The projection, which can give its rows; None where they are not exact (int8).
        """
        self._packed = RowLinear(kernels, self._linear.parts(), memory, is_wide=True)
        memory.close()
        self._linear = make_linear(torch.empty(0, 0))
        if self._is_quantized:
            return None
        self._rows = None
        return self._packed

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] in float32 (float64 for a float64 model) of normalised states [R, E]."""
        packed = self._packed
        logits = packed(hidden.contiguous()) if packed else self._linear(hidden).to(self._wide)
        if self._rows is None:
            return logits
        ids = best_candidates(logits, min(NUM_RESCORED, logits.shape[1]))  # [R, 64]
        products = self._rows[ids].to(self._wide).mul_(hidden.to(self._wide).unsqueeze(1))
        return logits.scatter_(1, ids, products.sum(dim=-1))


def best_candidates(logits: Tensor, count: int) -> Tensor:
    """Ids of the largest logits of each row, [R, count] in no order.

    The largest of the blocks with the largest maxima: 81 µs for a row of 151,936, where `topk` of
    all takes 484.
    """
    num_rows, size = logits.shape
    padded = functional.pad(logits, (0, -size % _BLOCK), value=float("-inf"))
    blocks = padded.view(num_rows, -1, _BLOCK)
    if blocks.shape[1] <= count:
        return logits.topk(count, sorted=False).indices
    chosen = blocks.amax(dim=-1).topk(count, sorted=False).indices  # [R, count]
    inside = blocks.gather(1, chosen.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
    best = inside.topk(count, sorted=False).indices
    return chosen.gather(1, best // _BLOCK) * _BLOCK + best % _BLOCK
