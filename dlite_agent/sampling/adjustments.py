"""Logit bias and penalties: what changes logits before any token is dropped.

In the order of transformers and vLLM: bias, repetition penalty, frequency penalty, presence
penalty. They touch the biased and the counted ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.sampling.history import TokenHistory

__all__ = ["Adjustments"]


class Adjustments:
    """The bias and the penalties of one turn.

    Args:
        params: Bias ids are below the vocabulary's size.
    """

    def __init__(self, params: SamplingParams) -> None:
        biases = dict(params.logit_bias)
        self._bias_ids = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float64)
        repetition = params.repetition_penalty
        self._repetition = 1.0 if repetition is None else repetition
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty

    @property
    def counts_prompt(self) -> bool:
        """Whether tokens of the prompt matter: to the repetition penalty they do."""
        return self._repetition != 1.0

    @property
    def needs_history(self) -> bool:
        """Whether there is a penalty."""
        return bool(self.counts_prompt or self._frequency or self._presence)

    @property
    def is_identity(self) -> bool:
        """Whether logits stay as they are."""
        return not self.needs_history and not len(self._bias_ids)

    def apply(
        self, logits: Tensor, history: TokenHistory | None, drafted: Sequence[int] = ()
    ) -> Tensor:
        """Logits of one position as bias and penalties change them.

        Args:
            logits: [V] float32 or float64; not changed.
            history: What was seen before the position, without `drafted`.
            drafted: Tokens between the history and the position.

        Returns:
            [V] of the same type, new.

        Raises:
            ValueError: There are penalties and no history.

        Source: the repetition penalty is Keskar et al. 2019 (arXiv:1909.05858), section 4.1, with
            the sign rule of transformers' `RepetitionPenaltyLogitsProcessor`; the other two are
            OpenAI's formula, logit - count * frequency - (count > 0) * presence.
        """
        adjusted = logits.clone()
        if len(self._bias_ids):
            if self._bias_ids.device != logits.device or self._biases.dtype != logits.dtype:
                self._bias_ids = self._bias_ids.to(logits.device)
                self._biases = self._biases.to(logits)
            adjusted.index_add_(0, self._bias_ids, self._biases)
        if self.needs_history:
            if history is None:
                raise ValueError("penalties need a history; make one with `Sampler.new_history`")
            self._penalise(adjusted, *history.counted(drafted))
        return adjusted

    def _penalise(self, logits: Tensor, ids: np.ndarray, counts: np.ndarray) -> None:
        """Change the logits of the counted ids in place."""
        where = torch.from_numpy(ids).to(logits.device)
        values = logits[where]
        if self._repetition != 1.0:
            scaled = values * self._repetition
            values = torch.where(values < 0.0, scaled, values / self._repetition)
        if self._frequency or self._presence:
            sampled = torch.from_numpy(counts).to(values)
            values = values - sampled * self._frequency - (sampled > 0.0) * self._presence
        logits[where] = values
