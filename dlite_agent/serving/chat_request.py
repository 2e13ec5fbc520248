"""A body of `/v1/chat/completions` as a `ChatRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.serving.openai_schema import ChatBody, DLiteOptions, SamplingBody

__all__ = ["AnswerForm", "answer_form", "chat_request"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer looks like.

    Attributes:
        model: Its name, as it was asked for.
        is_stream: In events.
        includes_usage: The last event of a stream is the usage.
        returns_token_ids: With the ids of prompt and answer.
    """

    model: str
    is_stream: bool = False
    includes_usage: bool = False
    returns_token_ids: bool = False


def chat_request(body: ChatBody, tenant: str, hint: str | None) -> ChatRequest:
    """Build a request.

    Raises:
        RequestError: A field or a message that we would have to ignore although it matters.
        ConfigurationError: A sampling field is out of its range.
    """
    given: dict[str, Any] = body.model_dump(exclude_none=True)
    _refuse_media(given)
    options = body.dlite or DLiteOptions()
    tools = tools_from_openai(given.get("tools"))
    rules = replace(output_rules_from_openai(given), closes_calls=options.closes_calls)
    rules.allowed(tools)
    return ChatRequest(
        messages=messages_from_openai(given["messages"]),
        tools=tools,
        sampling=replace(sampling_from_openai(given), choice_index=options.choice_index),
        session_hint=hint,
        tenant=tenant,
        template_kwargs=template_kwargs_from_openai(given),
        history=options.history,
        stop=stop_from_openai(given.get("stop")),
        output=rules,
        is_partial=options.is_partial,
        num_choices=num_choices_from_openai(given.get("n")),
        when_full="wait",  # the server counts for itself whom it lets in
    )


def answer_form(body: SamplingBody, model: str) -> AnswerForm:
    """How the answer is sent."""
    options = body.stream_options
    return AnswerForm(
        model,
        bool(body.stream),
        options is not None and bool(options.include_usage),
        bool(body.return_token_ids),
    )


def _refuse_media(given: Mapping[str, Any]) -> None:
    modalities = given.get("modalities", ["text"])
    if modalities != ["text"]:
        raise UnsupportedParameterError(
            f"modalities is {modalities!r}; this model speaks text only"
        )
    for name, advice in (
        ("audio", "this model speaks text only; leave it out"),
        ("functions", "send tools, and tool_choice in place of function_call"),
    ):
        if name in given:
            raise UnsupportedParameterError(f"{name} is {given[name]!r}; {advice}")
    if given.get("function_call", "auto") not in ("auto", "none"):
        raise UnsupportedParameterError(
            f"function_call is {given['function_call']!r}; send tool_choice"
        )
