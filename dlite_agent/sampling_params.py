"""How one turn is sampled: the options of a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from dlite_agent.errors import ConfigurationError
from dlite_agent.option_values import biases, make_number, make_whole, token_ids

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. None means: what the checkpoint's `generation_config.json` says.

    Applied in this order (transformers' and vLLM's): logit bias, repetition penalty, frequency
    penalty, presence penalty, temperature, top-k, top-p of what is left, min-p.

    Attributes:
        temperature: 0 is greedy; bias and penalties still count.
        top_k: Keep the k most probable tokens; 0 (or -1) keeps all.
        top_p: Keep the smallest set of tokens with at least this probability, in (0, 1].
        min_p: Keep tokens with at least this share of the best one's probability, in [0, 1].
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that
            the prompt or this answer holds (transformers' semantics); above 0, 1 is off.
        presence_penalty: Subtracted from the logits of tokens that this answer holds, in [-2, 2];
            the prompt does not count (OpenAI's semantics, as vLLM has them).
        frequency_penalty: The same, once for each time that the answer holds the token.
        logit_bias: Added to logits, by token id; each in [-100, 100]. Kept as sorted pairs.
        max_tokens: Most tokens to generate; None: what the context leaves.
        seed: In [-2**63, 2**64), what message formats can carry; None draws 64 fresh bits, which
            the turn's stats return.
        choice_index: Which of several independent answers to the same prompt.
        stop_token_ids: Extra ids that end the turn, beside the checkpoint's own.
        logprobs: Report the log-probability of every sampled token: of the model's own
            distribution, before bias, penalties, masks and temperature.
        top_logprobs: And of this many best tokens at its position, up to 20.
        thinking_budget: Most tokens inside thoughts; then `</think>` is written for the model. 0
            closes a thought at once; None is no limit.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    max_tokens: int | None = None
    seed: int | None = None
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        for name in _RANGES:
            if name in _OFF_AT_ZERO and getattr(self, name) is None:
                object.__setattr__(self, name, 0.0)  # frozen, and still under construction
            make_number(self, name)
        for name in ("top_k", "max_tokens", "seed", "choice_index", *_COUNTS):
            make_whole(self, name)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ConfigurationError(f"seed is {self.seed!r}; use a number in [-2**63, 2**64)")
        object.__setattr__(self, "stop_token_ids", token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", biases(self.logit_bias))
        self._check_ranges()

    def _check_ranges(self) -> None:
        for name, (accepts, advice) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not accepts(value):
                raise ConfigurationError(f"{name} is {value!r}; use {advice}")
        if self.top_k == -1:  # vLLM's and Ollama's "all"
            object.__setattr__(self, "top_k", 0)
        if self.top_k is not None and self.top_k < 0:
            raise ConfigurationError(f"top_k is {self.top_k!r}; use 0 (all) or a positive number")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens is {self.max_tokens!r}; use at least 1")
        if self.thinking_budget is not None and self.thinking_budget < 0:
            raise ConfigurationError(
                f"thinking_budget is {self.thinking_budget!r}; use 0 (no thoughts) or more"
            )
        if not isinstance(self.logprobs, bool):
            raise ConfigurationError(
                f"logprobs is {self.logprobs!r}; use True or False, and top_logprobs for a number"
            )
        if self.top_logprobs is None or not 0 <= self.top_logprobs <= _MAX_TOP_LOGPROBS:
            raise ConfigurationError(f"top_logprobs is {self.top_logprobs!r}; use 0 to 20")
        if self.top_logprobs and not self.logprobs:
            raise ConfigurationError(
                f"top_logprobs is {self.top_logprobs!r}; use it with logprobs=True"
            )

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Fill every None from `defaults`."""
        missing = {
            f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None
        }
        return replace(self, **missing)


_MAX_TOP_LOGPROBS = 20  # OpenAI's limit
_OFF_AT_ZERO = ("presence_penalty", "frequency_penalty")  # no checkpoint sets them
_COUNTS = ("top_logprobs", "thinking_budget")
# By field: whether a number is in its range (never true of NaN), and what to use instead.
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0.0 <= x < math.inf, "0 (greedy) or a positive number"),
    "top_p": (lambda x: 0.0 < x <= 1.0, "a number in (0, 1]"),
    "min_p": (lambda x: 0.0 <= x <= 1.0, "a number in [0, 1]; 0 is off"),
    "repetition_penalty": (lambda x: 0.0 < x < math.inf, "a positive number; 1 is off"),
    "presence_penalty": (lambda x: -2.0 <= x <= 2.0, "a number in [-2, 2]; 0 is off"),
    "frequency_penalty": (lambda x: -2.0 <= x <= 2.0, "a number in [-2, 2]; 0 is off"),
}
