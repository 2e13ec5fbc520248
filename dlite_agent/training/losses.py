"""What a block is taught: the target's distribution at every slot, the early slots more."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["block_loss", "slot_counts", "slot_weights"]


def slot_weights(block_size: int, decay: float = 4.0) -> Tensor:
    """exp(-k / decay), [B]: a slot counts only if all before it were accepted.

    Source: DSpark's recipe (DeepSpec, `gamma` 4 for blocks of seven).
    """
    return torch.exp(-torch.arange(block_size, dtype=torch.float32) / decay)


def block_loss(
    logits: Tensor,
    target_logits: Tensor,
    best_ids: Tensor,
    scale: Tensor,
    *,
    cross_entropy: float = 0.1,
) -> Tensor:
    """KL(p‖q) + α·CE with the target's best token, the sum over slots by weight.

    Args:
        logits: q, [N, B, V].
        target_logits: p, [N, B, V]; nothing flows back.
        best_ids: The target's best tokens, [N, B] int64.
        scale: Weight of each slot, 0 where it is not valid, [N, B].
        cross_entropy: α.
    """
    log_q = functional.log_softmax(logits.float(), dim=-1)
    log_p = functional.log_softmax(target_logits.detach().float(), dim=-1)
    p = log_p.exp()
    divergence = (p * log_p).sum(dim=-1) - (p * log_q).sum(dim=-1)  # [N, B]
    missed = -log_q.gather(-1, best_ids.unsqueeze(-1)).squeeze(-1)
    return ((divergence + cross_entropy * missed) * scale).sum()


def slot_counts(logits: Tensor, best_ids: Tensor, valid: Tensor) -> Tensor:
    """How many valid slots have the target's best token as theirs, and how many are, [2, B]."""
    right = (logits.argmax(dim=-1) == best_ids) & valid
    return torch.stack([right.sum(dim=0), valid.sum(dim=0)])
