"""A `ChatRequest` as the body of `/v1/chat/completions` or `/v1/completions`. Pure."""

from __future__ import annotations

from dataclasses import fields

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.openai_format import message_to_openai
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.config import SamplingParams

__all__ = ["chat_body", "completion_body", "message_body", "tool_body"]

_PLAIN = SamplingParams()


def chat_body(request: ChatRequest, model: str | None) -> dict[str, JSON]:
    """The body that makes the server build this request again.

    Args:
        request: A tenant is sent as the salt of the caches.
        model: As the server calls it; None for its first.
    """
    return _without_nulls(
        {
            **_common(request, model),
            "messages": [message_body(message) for message in request.messages],
            "tools": [tool_body(tool) for tool in request.tools] or None,
            "chat_template_kwargs": dict(request.template_kwargs) or None,
            **_sampling(request.sampling),
            **_rules(request.output),
            "dlite": {
                "history": request.history,
                "is_partial": request.is_partial,
                "choice_index": request.sampling.choice_index,
                "closes_calls": request.output.closes_calls,
            },
        }
    )


def completion_body(request: ChatRequest, model: str | None) -> dict[str, JSON]:
    """The same for a request that has a prompt, which is read in place of its messages."""
    sampling = request.sampling
    prompt = request.prompt
    body = _without_nulls(
        {
            **_common(request, model),
            "prompt": list(prompt) if isinstance(prompt, tuple) else prompt,
            **_sampling(sampling),
            "logprobs": sampling.top_logprobs if sampling.logprobs else None,
            "top_logprobs": None,
            "dlite": {"is_partial": request.is_partial, "choice_index": sampling.choice_index},
        }
    )
    return {**body, "max_tokens": sampling.max_tokens}  # null is what the context leaves, not 16


def message_body(message: Message) -> dict[str, JSON]:
    """A message, with the handle of the turn that made it."""
    body = message_to_openai(message)
    if message.turn is not None:
        body["dlite"] = {"turn": message.turn}
    return body


def tool_body(tool: ToolSpec) -> dict[str, JSON]:
    """A tool in OpenAI's form."""
    function: dict[str, JSON] = {"name": tool.name, "parameters": tool.parameters}
    if tool.description:
        function["description"] = tool.description
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _common(request: ChatRequest, model: str | None) -> dict[str, JSON]:
    return {
        "model": model,
        "stream": not request.is_partial,
        "return_token_ids": True,
        "session_id": request.session_hint,
        "cache_salt": request.tenant or None,
        "n": request.num_choices,
        "stop": list(request.stop) or None,
    }


def _without_nulls(body: dict[str, JSON]) -> dict[str, JSON]:
    return {name: value for name, value in body.items() if value is not None}


def _sampling(sampling: SamplingParams) -> dict[str, JSON]:
    set_here: dict[str, JSON] = {
        field.name: getattr(sampling, field.name)
        for field in fields(SamplingParams)
        if getattr(sampling, field.name) != getattr(_PLAIN, field.name)
    }
    set_here.pop("choice_index", None)
    if sampling.stop_token_ids:
        set_here["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        set_here["logit_bias"] = {
            str(token): bias for token, bias in dict(sampling.logit_bias).items()
        }
    return set_here


def _rules(rules: OutputRules) -> dict[str, JSON]:
    body: dict[str, JSON] = {}
    if rules.tool_choice != ToolChoice():
        body["tool_choice"] = _choice(rules.tool_choice)
    if not rules.parallel_tool_calls:
        body["parallel_tool_calls"] = False
    if rules.answer is not None:
        body["response_format"] = _answer_format(rules.answer)
    return body


def _choice(choice: ToolChoice) -> JSON:
    if not choice.names or choice.mode == "none":
        return choice.mode
    tools: list[JSON] = [{"type": "function", "function": {"name": name}} for name in choice.names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}


def _answer_format(answer: AnswerFormat) -> JSON:
    if answer.schema is None:
        return {"type": "json_object"}
    described: dict[str, JSON] = {
        "name": "answer",
        "schema": dict(answer.schema),
        "strict": answer.strict,
    }
    return {"type": "json_schema", "json_schema": described}
