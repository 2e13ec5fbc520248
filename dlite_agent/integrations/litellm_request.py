"""A call as LiteLLM hands it to a provider, as a `ChatRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.openai_format import (
    messages_from_openai,
    template_kwargs_from_openai,
    tools_from_openai,
)
from dlite_agent.chat.openai_sampling import (
    num_choices_from_openai,
    sampling_from_openai,
    stop_from_openai,
)
from dlite_agent.chat.output_rules import output_rules_from_openai
from dlite_agent.config import SamplingParams
from dlite_agent.errors import UnsupportedParameterError

__all__ = ["request_from_litellm"]

_SAMPLING = {field.name for field in fields(SamplingParams)} - {"choice_index"}
_KNOWN = frozenset(
    _SAMPLING
    | {"max_completion_tokens", "n", "stop", "tools", "tool_choice", "parallel_tool_calls"}
    | {"response_format", "session_id", "prompt_cache_key", "chat_template_kwargs"}
    | {"enable_thinking", "reasoning_effort"}
)
# What LiteLLM sends along and does itself, or what means nothing to a model in this process. The
# server takes the same without looking at it.
_NOT_OURS = frozenset(
    {"extra_body", "max_retries", "stream", "stream_options", "user", "safety_identifier"}
    | {"metadata", "service_tier", "store", "verbosity", "prediction", "prompt_cache_retention"}
)


def request_from_litellm(
    messages: Sequence[Mapping[str, object]],
    optional_params: Mapping[str, Any],
    litellm_params: Mapping[str, Any],
    *,
    drops_unknown: bool = False,
) -> ChatRequest:
    """Build a request.

    Args:
        messages: OpenAI's, as LiteLLM passes them on.
        optional_params: OpenAI's fields and whatever else the caller gave; those in `extra_body`
            count as given beside it. None counts as absent.
        litellm_params: `litellm_session_id` is the session where no other is named.
        drops_unknown: Ignore fields that are not known, as LiteLLM's `drop_params` promises.

    Raises:
        RequestError: A field that is not known or not supported, a tool that cannot be chosen, or a
            message that is not text.
        ConfigurationError: A sampling field is out of its range.
    """
    given = {name: value for name, value in _flat(optional_params).items() if value is not None}
    if given.get("modalities") == ["text"]:  # what we do; another one is refused
        del given["modalities"]
    unknown = sorted(set(given) - _KNOWN - _NOT_OURS)
    if unknown and not drops_unknown:
        raise UnsupportedParameterError(
            f"{unknown[0]}={given[unknown[0]]!r} is not supported by dlite; leave it out, or pass "
            f"drop_params=True; known: {', '.join(sorted(_KNOWN))}"
        )
    tools = tools_from_openai(given.get("tools"))
    rules = output_rules_from_openai(given)
    rules.allowed(tools)
    hint = (
        given.get("session_id")
        or given.get("prompt_cache_key")
        or litellm_params.get("litellm_session_id")
    )
    return ChatRequest(
        messages=messages_from_openai(messages),
        tools=tools,
        sampling=sampling_from_openai(given),
        session_hint=str(hint) if hint else None,
        template_kwargs=template_kwargs_from_openai(given),
        stop=stop_from_openai(given.get("stop")),
        output=rules,
        num_choices=num_choices_from_openai(given.get("n")),
        when_full="wait",
    )


def _flat(optional_params: Mapping[str, Any]) -> dict[str, Any]:
    extra = optional_params.get("extra_body")
    return {**(extra if isinstance(extra, Mapping) else {}), **optional_params}
