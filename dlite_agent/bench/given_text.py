"""A target that computes and chooses as ever, and writes a given text all the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.sampling import KeyedNoise, RowMasks, Sampler, TokenHistory

__all__ = ["TextSampler"]


class TextSampler(Sampler):
    """Chooses greedily, at its full cost, and takes a text's token instead.

    So what a turn writes can be what a small model would not: prose, a transcript, random ids. The
    forwards and the choice cost what they cost, and drafts are accepted where they name the text.

    Args:
        text: All ids of the session, from position 0.
    """

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(
            SamplingParams(temperature=0.0, top_k=0, top_p=1.0).with_defaults(SamplingParams()),
            KeyedNoise(0),
        )
        self._text = text

    def sample_each(
        self,
        logits: Tensor,
        first_position: int,
        history: TokenHistory | None = None,
        drafted: Sequence[int] = (),
        first_row: int = 0,
        masks: RowMasks | None = None,
    ) -> Iterator[int]:
        """The text's tokens from `first_position` on."""
        chosen = super().sample_each(logits, first_position, history, drafted, first_row, masks)
        for row, _ in enumerate(chosen, first_row):
            yield self._text[first_position + row]
