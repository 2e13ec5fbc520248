"""The k largest of a row of logits, always the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_finite", "largest"]

# Cuts of the vocabulary into blocks whose maxima bound the k-th logit from below.
_MAX_BLOCK = 64
_BLOCKS_PER_CANDIDATE = 8


def largest(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of [V], descending; equal ones by ascending id, which `topk` ignores.

    The k-th largest maximum of blocks is at most the k-th largest logit, and cheap to find: what
    lies below it needs no sorting.
    """
    block = max(1, min(_MAX_BLOCK, logits.shape[0] // (_BLOCKS_PER_CANDIDATE * k)))
    num_blocked = logits.shape[0] // block * block
    maxima = torch.cat([logits[:num_blocked].view(-1, block).amax(dim=1), logits[num_blocked:]])
    bounds = maxima.topk(k).values
    check_finite(float(bounds[0]))
    ids = (logits >= bounds[-1]).nonzero()[:, 0]
    return ids[logits[ids].argsort(descending=True, stable=True)[:k]]


def check_finite(highest: float) -> None:
    """Refuse a largest logit that is no number.

    Raises:
        FloatingPointError: It is infinite or NaN.
    """
    if not -float("inf") < highest < float("inf"):
        raise FloatingPointError(
            f"the largest logit of a row is {highest!r}; the dtype overflows (use float32), "
            "or a mask excludes every token"
        )
