"""Log-probabilities of sampled tokens, and OpenAI's form of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlite_agent.chat.messages import JSON

__all__ = ["TokenLogprob", "logprobs_to_openai"]

_LOWEST = -9999.0  # OpenAI's number for "practically impossible"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token at one position.

    Attributes:
        token_id: The token.
        raw: Its bytes, which may end inside a character; a control token's spelling.
        logprob: Natural logarithm of its probability under the model's own distribution, before
            bias, penalties, masks and temperature.
        top: The best tokens at this position, best first, where they were asked for.
    """

    token_id: int
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The bytes as text; those that are no UTF-8 become U+FFFD."""
        return self.raw.decode("utf-8", "replace")


def logprobs_to_openai(
    logprobs: Sequence[TokenLogprob], *, with_ids: bool = False
) -> dict[str, JSON]:
    """The `logprobs` of a choice: one entry a token under `content`, thoughts and calls too.

    Args:
        logprobs: One a token.
        with_ids: Each entry has its `token_id`, for which OpenAI has no field.
    """
    return {
        "content": [
            {
                **_entry(token, with_ids),
                "top_logprobs": [_entry(other, with_ids) for other in token.top],
            }
            for token in logprobs
        ]
    }


def _entry(token: TokenLogprob, with_ids: bool) -> dict[str, JSON]:
    logprob = token.logprob if math.isfinite(token.logprob) else _LOWEST
    entry: dict[str, JSON] = {"token": token.text, "bytes": list(token.raw), "logprob": logprob}
    return {**entry, "token_id": token.token_id} if with_ids else entry
