"""Log-probabilities of sampled tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.sampling.ranking import largest

__all__ = ["TokenLogprobs", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One sampled token.

    Attributes:
        token_id: The token.
        logprob: Its log-probability, natural logarithm.
        top: The best tokens at its position with theirs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Raw log-softmax of some tokens: before bias, penalties, masks, temperature and filters.

    Args:
        logits: [R, V], as the target gave them.
        token_ids: The token of each row.
        num_top: How many of the best tokens to report; 0 for none.
    """
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    totals = logits.logsumexp(dim=-1)  # [R]
    own = (logits.gather(1, chosen[:, None])[:, 0] - totals).tolist()
    return tuple(
        TokenLogprobs(token_id, logprob, _top(row, total, num_top))
        for token_id, logprob, row, total in zip(token_ids, own, logits, totals, strict=True)
    )


def _top(row: Tensor, total: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    ids = largest(row, min(count, row.shape[0]))
    return tuple(zip(ids.tolist(), (row[ids] - total).tolist(), strict=True))
