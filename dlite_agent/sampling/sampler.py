"""From logits to a token: temperature, top-k, top-p, min-p, and noise keyed to its position.

The token at position i is `argmin_t E_t / p_t` over the kept tokens, where E_t is exponential noise
keyed to (key, i, t): the Gumbel-max trick in its exponential form. Whoever evaluates the same
logits at the same position draws the same token, whatever was drafted, batched or cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.sampling.adjustments import Adjustments
from dlite_agent.sampling.history import TokenHistory
from dlite_agent.sampling.noise import KeyedNoise
from dlite_agent.sampling.ranking import check_finite, largest
from dlite_agent.sampling.token_mask import RowMasks, TokenMask

__all__ = ["Sampler"]

# Sizes that a nucleus is looked for in before the whole vocabulary is sorted.
_NUCLEUS_SIZES = (256, 4096)


class Sampler:
    """Turns logits into tokens, for targets and drafters: everything but the model is here.

    Order, as in transformers and vLLM: logit bias, repetition, frequency and presence penalty, the
    mask, temperature, top-k, top-p of what is left, min-p, and the draw.

    Args:
        params: Resolved: temperature, top_k and top_p are set. An unset min_p or repetition penalty
            is off.
        noise: The turn's noise; not drawn from when temperature is 0.

    Raises:
        ValueError: A parameter is None.
    """

    def __init__(self, params: SamplingParams, noise: KeyedNoise) -> None:
        if params.temperature is None or params.top_k is None or params.top_p is None:
            raise ValueError(f"{params!r} is not resolved; fill it with `with_defaults` first")
        self.params = params
        self.noise = noise
        self._temperature = params.temperature
        self._top_k = params.top_k
        self._top_p = params.top_p
        self._min_p = params.min_p or 0.0
        self._adjustments = Adjustments(params)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken (the lowest id of equals), without noise."""
        return self._temperature == 0.0

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the best tokens to report beside each sampled one; None: report nothing."""
        return self.params.top_logprobs if self.params.logprobs else None

    def new_history(self, prompt_ids: Sequence[int]) -> TokenHistory | None:
        """An empty history behind a prompt; None where no penalty reads one.

        Whoever samples with it extends it by what was sampled.
        """
        if not self._adjustments.needs_history:
            return None
        return TokenHistory(prompt_ids if self._adjustments.counts_prompt else ())

    def sample(self, logits: Tensor, position: int, history: TokenHistory | None = None) -> int:
        """Choose the token of one position. One host sync or more.

        Args:
            logits: [V]; -inf excludes a token.
            position: Absolute position of the token to be chosen.
            history: What was seen before it; penalties need it.

        Raises:
            FloatingPointError: No finite logit is left, or one is NaN or +inf.
            ValueError: There are penalties and no history.
        """
        return next(self.sample_each(logits[None], position, history))

    def sample_rows(self, logits: Tensor, first_position: int) -> Tensor:
        """Choose the tokens of R rows [R, V], row i at `first_position + i`; [R] int64, host."""
        return torch.tensor(list(self.sample_each(logits, first_position)), dtype=torch.int64)

    def sample_each(
        self,
        logits: Tensor,
        first_position: int,
        history: TokenHistory | None = None,
        drafted: Sequence[int] = (),
        first_row: int = 0,
        masks: RowMasks | None = None,
    ) -> Iterator[int]:
        """Choose tokens row by row, as they are asked for; a row that nobody asks for is free.

        Greedy rows without bias and penalties are cheap and are evaluated together, with one host
        sync; there the best token of all is looked up in the grammar, and only a row whose best
        token is not allowed needs its mask.

        Args:
            logits: [R, V]; row i stands at `first_position + i`.
            first_position: Absolute position of row 0.
            history: What was seen before row 0.
            drafted: Row i counts `drafted[:i]` as well.
            first_row: Rows before it are skipped.
            masks: Of all R rows; None allows everything.

        Raises:
            FloatingPointError: As `sample`.
            ValueError: As `sample`.
        """
        if self.is_greedy and self._adjustments.is_identity:
            best, ids = logits[first_row:].max(dim=-1)  # the first of equals, on every device
            for row, value, best_id in zip(
                range(first_row, logits.shape[0]), best.tolist(), ids.tolist(), strict=True
            ):
                check_finite(value)
                if masks is None or masks.allows(row, best_id):
                    yield best_id
                else:
                    yield self._best(logits[row], masks.row(row))
            return
        for row in range(first_row, logits.shape[0]):
            adjusted = self.adjusted(logits[row], history, drafted[:row])
            mask = None if masks is None else masks.row(row)
            yield self._choose(adjusted, first_position + row, mask)

    def adjusted(
        self, logits: Tensor, history: TokenHistory | None = None, drafted: Sequence[int] = ()
    ) -> Tensor:
        """Logits [V] of one position after bias and penalties; themselves where there are none.

        Args:
            logits: Raw; not changed.
            history: What was seen before the position, without `drafted`.
            drafted: Tokens between the history and the position.
        """
        if self._adjustments.is_identity:
            return logits
        return self._adjustments.apply(logits, history, drafted)

    def candidates(self, logits: Tensor, mask: TokenMask | None = None) -> tuple[Tensor, Tensor]:
        """The tokens that the filters keep, for one row of a sampler that is not greedy.

        Equal logits are ordered by id, lowest first, so exactly k tokens and the smallest
        sufficient nucleus are kept, always the same ones. Min-p compares with the best token, which
        is always kept.

        Args:
            logits: [V], adjusted.
            mask: What may be kept; None for everything.

        Returns:
            ids [n] int64, and weights [n] float64: p up to a common factor. A weight may be 0, and
            is where the mask does not hold the id.
        """
        near = None if mask is None else self._near(logits, mask)
        if near is not None:
            kept, weights = self.candidates(logits[near])
            return near[kept], weights
        if 0 < self._top_k < logits.shape[0]:
            ids = largest(logits, self._top_k)
            weights = self._weights(logits[ids])
            ids, weights = self._nucleus(ids, weights, weights.sum())
        elif self._top_p < 1.0:
            ids, weights = self._nucleus_of_all(logits, mask)
        else:
            ids = torch.arange(logits.shape[0], device=logits.device)
            weights = self._weights(logits, mask)
        if self._min_p > 0.0:
            kept = weights >= self._min_p  # the best one's weight is 1
            ids, weights = ids[kept], weights[kept]
        return ids, weights

    def is_near_tie(
        self, logits: Tensor, position: int, other_id: int, tolerance: float = 1e-4
    ) -> bool:
        """Whether `other_id` would have been chosen, had its logit been higher by `tolerance`.

        Two computations of the same logits that differ in their last bits may disagree only there.
        `logits` are adjusted.
        """
        raised = logits.clone()
        raised[other_id] += tolerance
        return self._choose(raised, position) == other_id

    def _choose(self, logits: Tensor, position: int, mask: TokenMask | None = None) -> int:
        """The token of one row of adjusted logits."""
        if self.is_greedy:
            return self._best(logits, mask)
        ids, weights = self.candidates(logits, mask)
        arrival = self.noise.exponential(position, ids).div_(weights)
        arrival.masked_fill_(weights == 0.0, float("inf"))  # E = 0 over p = 0 is no number
        return int(ids[arrival.min(dim=0).indices])  # the first of equals

    def _best(self, logits: Tensor, mask: TokenMask | None) -> int:
        if mask is not None and mask.is_sparse:
            allowed = mask.ids(logits.device)
            return int(allowed[self._best(logits[allowed], None)])
        best, token_id = (logits if mask is None else mask.ban(logits.clone())).max(dim=0)
        check_finite(float(best))
        return int(token_id)

    def _near(self, logits: Tensor, mask: TokenMask) -> Tensor | None:
        """Allowed ids that the candidates are among, equal logits by id; None: no few are known."""
        if mask.is_sparse:
            return mask.ids(logits.device)
        if not 0 < self._top_k < logits.shape[0]:
            return None
        ids = largest(logits, min(2 * self._top_k, logits.shape[0]))
        kept = ids[mask.holds(ids)]
        return kept if len(kept) >= self._top_k else mask.ids(logits.device)

    def _weights(self, logits: Tensor, mask: TokenMask | None = None) -> Tensor:
        """exp((logit - highest) / temperature): 1 for the best token that is allowed."""
        wide = logits.to(torch.float64, copy=True)
        if mask is not None:
            mask.ban(wide)
        highest = wide.max()
        check_finite(float(highest))
        # the difference first: a tiny temperature would make the quotients infinite
        return wide.sub_(highest).div_(self._temperature).exp_()

    def _nucleus(self, ids: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest prefix of descending weights that holds at least `top_p` of the total."""
        if self._top_p >= 1.0:
            return ids, weights
        num_short = int((weights.cumsum(0) < self._top_p * total).sum())
        return ids[: num_short + 1], weights[: num_short + 1]

    def _nucleus_of_all(self, logits: Tensor, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
        """Top-p over the whole vocabulary; sorts as much of it as it needs."""
        all_weights = self._weights(logits, mask)
        total = all_weights.sum()
        for size in _NUCLEUS_SIZES:
            if size >= logits.shape[0]:
                break
            ids = largest(logits, size)
            weights = all_weights[ids]
            if weights.sum() >= self._top_p * total * (1.0 + 1e-9):
                return self._nucleus(ids, weights, total)
        ids = logits.argsort(descending=True, stable=True)
        return self._nucleus(ids, all_weights[ids], total)
