"""The sampling fields of OpenAI's chat format, as OpenAI, vLLM and their clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dlite_agent.config import SamplingParams
from dlite_agent.errors import UnsupportedParameterError

__all__ = ["num_choices_from_openai", "sampling_from_openai", "stop_from_openai"]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams)) - {"choice_index"}


def sampling_from_openai(body: Mapping[str, object]) -> SamplingParams:
    """The sampling parameters of a request; null and missing fields keep their defaults.

    Reads OpenAI's `temperature`, `top_p`, `max_tokens`, `max_completion_tokens` (which wins),
    `seed`, `presence_penalty`, `frequency_penalty`, `logit_bias`, `logprobs` and `top_logprobs`,
    and vLLM's `top_k`, `min_p`, `repetition_penalty` and `stop_token_ids`. `thinking_budget` is
    ours. Other fields are not looked at.

    Raises:
        ConfigurationError: A value is of the wrong type or out of its range.
    """
    given: dict[str, Any] = {
        name: value for name, value in body.items() if name in _SAMPLING and value is not None
    }
    limit = body.get("max_completion_tokens")
    if limit is not None:
        given["max_tokens"] = limit
    return SamplingParams(**given)


def stop_from_openai(stop: object) -> tuple[str, ...]:
    """Stop strings: null, one string, or a list.

    Raises:
        UnsupportedParameterError: Anything else.
    """
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list | tuple) and all(isinstance(string, str) for string in stop):
        return tuple(stop)
    raise UnsupportedParameterError(f"stop is {stop!r}; use a text or a list of texts")


def num_choices_from_openai(count: object) -> int:
    """`n`: null is one.

    Raises:
        UnsupportedParameterError: It is no whole number from 1 to 128.
    """
    if count is None:
        return 1
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 128:
        raise UnsupportedParameterError(f"n is {count!r}; use a whole number from 1 to 128")
    return count
