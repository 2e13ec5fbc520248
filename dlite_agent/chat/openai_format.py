"""OpenAI's chat format to messages and back.

What a client replays from its history is never an error; images, audio and files are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn, cast

from dlite_agent.chat.inline_thought import thought_apart
from dlite_agent.chat.messages import (
    JSON,
    MAX_DEPTH,
    Message,
    Role,
    ToolCall,
    ToolSpec,
    UnparsedToolCall,
    is_too_deep,
)
from dlite_agent.errors import UnsupportedParameterError

__all__ = [
    "message_to_openai",
    "messages_from_openai",
    "order_tool_results",
    "parse_arguments",
    "template_kwargs_from_openai",
    "tools_from_openai",
]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_KEYS = ("text", "refusal", "content")
_THOUGHT_TYPES = ("thinking", "reasoning", "redacted_thinking")
_MEDIA = ("image", "audio", "video", "file", "document")


def messages_from_openai(messages: Sequence[Mapping[str, object]]) -> tuple[Message, ...]:
    """Normalise messages.

    Text parts are joined, null is empty, `developer` is `system`, `cache_control` and unknown keys
    are dropped, a thought inside the content moves to the reasoning, arguments are parsed, and
    parallel tool results are put in the order of their calls.

    Raises:
        UnsupportedParameterError: An unknown role, or content that is not text.
    """
    parsed = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return order_tool_results(parsed)


def tools_from_openai(tools: Sequence[Mapping[str, object]] | None) -> tuple[ToolSpec, ...]:
    """Normalise tools; a bare function without the `type` around it is accepted.

    Raises:
        UnsupportedParameterError: A tool that is no function, has no name, or has another's.
    """
    specs: dict[str, ToolSpec] = {}
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            _refuse(f"tools[{i}]", tool, "send OpenAI's form; LangChain's bind_tools makes it")
        kind = tool.get("type", "function")
        function = tool.get("function", tool)
        if kind != "function" or not isinstance(function, Mapping):
            _refuse(f"tools[{i}].type", kind, "only tools of type 'function' are supported")
        name = function.get("name")
        if not isinstance(name, str) or not name or name in specs:
            _refuse(f"tools[{i}].function.name", name, "every tool needs a name of its own")
        parameters = function.get("parameters") or function.get("input_schema") or {}
        if not isinstance(parameters, Mapping):
            _refuse(f"tools[{i}].function.parameters", parameters, "send a JSON schema")
        if is_too_deep(cast(JSON, parameters)):
            advice = f"nest at most {MAX_DEPTH} objects and lists"
            _refuse(f"tools[{i}].function.parameters", parameters, advice)
        specs[name] = ToolSpec(
            name,
            _text(function.get("description")),
            cast(dict[str, JSON], dict(parameters)),
            function.get("strict") is True,
        )
    return tuple(specs.values())


def template_kwargs_from_openai(body: Mapping[str, object]) -> dict[str, JSON]:
    """Variables of the chat template.

    `reasoning_effort`, `chat_template_kwargs` and `enable_thinking`; a later one of them wins.

    Raises:
        UnsupportedParameterError: `chat_template_kwargs` is no object.
    """
    kwargs: dict[str, JSON] = {}
    if body.get("reasoning_effort") is not None:
        kwargs["enable_thinking"] = body["reasoning_effort"] not in ("none", "disable")
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        _refuse("chat_template_kwargs", given, "send an object")
    kwargs.update(cast(Mapping[str, JSON], given or {}))
    if body.get("enable_thinking") is not None:
        kwargs["enable_thinking"] = cast(JSON, body["enable_thinking"])
    return kwargs


def message_to_openai(
    message: Message, unparsed: Sequence[UnparsedToolCall] = ()
) -> dict[str, JSON]:
    """Turn a message into OpenAI's form.

    An assistant's message has `content: null` where there is only a call, and `reasoning_content`
    where it has a thought.

    Args:
        message: Any message.
        unparsed: What stood in its call regions and is no call; kept beside the calls under
            `unparsed_tool_calls`, a name that OpenAI does not know.
    """
    content: JSON = message.content
    if message.role == "assistant" and not content and message.tool_calls:
        content = None
    result: dict[str, JSON] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [_call_to_openai(call) for call in message.tool_calls]
    if unparsed:
        result["unparsed_tool_calls"] = [
            {"id": call.id, "name": call.name, "text": call.text, "error": call.error}
            for call in unparsed
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        result["name"] = message.name
    return result


def order_tool_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Put the results that follow an assistant's calls in the order of the calls.

    A result belongs to the call with its id. One with no id, or an id that no call has, belongs to
    the first call that is still without one; an id that was missing is filled in. What is left
    over stays behind them.
    """
    ordered: list[Message] = []
    start = 0
    while start < len(messages):
        ordered.append(messages[start])
        stop = start + 1
        if calls := messages[start].tool_calls:
            while stop < len(messages) and messages[stop].role == "tool":
                stop += 1
            ordered += _ordered_results(calls, messages[start + 1 : stop])
        start = stop
    return tuple(ordered)


def parse_arguments(arguments: object) -> JSON:
    """Parse a call's arguments; text that is not JSON stays as it is, no text is no arguments.

    An object that was encoded twice is decoded twice. `NaN`, `Infinity` and numbers that overflow
    a float are not JSON, and what is nested too deep for a template stays or becomes text.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        value = cast(JSON, arguments)
        return _text(value) if is_too_deep(value) else value
    if not arguments.strip():
        return {}
    value = _parse_json(arguments)
    if isinstance(value, str):
        inner = _parse_json(value)
        value = inner if isinstance(inner, dict) else arguments
    return arguments if is_too_deep(value) else value


def _ordered_results(calls: Sequence[ToolCall], results: Sequence[Message]) -> list[Message]:
    slots: list[Message | None] = [None] * len(calls)
    known_ids = {call.id for call in calls if call.id is not None}
    strangers, unplaced = [], []
    for result in results:
        if result.tool_call_id not in known_ids:
            strangers.append(result)
            continue
        ids = [call.id if slot is None else None for call, slot in zip(calls, slots, strict=True)]
        if result.tool_call_id in ids:
            slots[ids.index(result.tool_call_id)] = result
        else:
            unplaced.append(result)
    for result in strangers:
        if None in slots:
            place = slots.index(None)
            call_id = result.tool_call_id or calls[place].id
            slots[place] = replace(result, tool_call_id=call_id)
        else:
            unplaced.append(result)
    return [result for result in slots if result is not None] + unplaced


def _message(message: Mapping[str, object], where: str) -> Message:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        _refuse(f"{where}.role", message.get("role"), f"use one of {', '.join(map(repr, _ROLES))}")
    content, thought = _content(message.get("content"), where, role)
    name, call_id = message.get("name"), message.get("tool_call_id")
    parsed = Message(
        role,
        content,
        tool_call_id=call_id if isinstance(call_id, str) and call_id else None,
        name=name if isinstance(name, str) and name else None,
    )
    if role != "assistant":
        return parsed
    sent = message.get("reasoning_content") or message.get("reasoning")
    reasoning = sent if isinstance(sent, str) else thought or None
    parsed = replace(parsed, tool_calls=_calls(message), turn=_turn_handle(message))
    return thought_apart(replace(parsed, reasoning=reasoning))


def _content(content: object, where: str, role: Role) -> tuple[str, str]:
    """Join text parts; returns the text and an assistant's thoughts."""
    if not isinstance(content, list):
        return _text(content), ""
    texts, thoughts = [], []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in _THOUGHT_TYPES:
            thoughts.append(_text(part.get("thinking") or part.get("reasoning")))
        elif any(medium in str(kind) for medium in _MEDIA):
            _refuse(f"{where}.content[{i}].type", kind, "this model reads text only; leave it out")
        elif not isinstance(part, Mapping):
            texts.append(_text(part))
        elif (key := next((key for key in _TEXT_KEYS if key in part), None)) is not None:
            texts.append(_content(part[key], f"{where}.content[{i}]", role)[0])
        elif role != "assistant":  # an assistant's other parts repeat its calls
            _refuse(f"{where}.content[{i}].type", kind, "send text parts only")
    return "".join(texts), "".join(thoughts)


def _turn_handle(message: Mapping[str, object]) -> str | None:
    """The handle of our turn, where the client kept what came beside the message."""
    places = (message.get("dlite"), message.get("provider_specific_fields"))
    for place in places:
        inner = place.get("dlite", place) if isinstance(place, Mapping) else None
        turn = inner.get("turn") if isinstance(inner, Mapping) else None
        if isinstance(turn, str) and turn:
            return turn
    return None


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _calls(message: Mapping[str, object]) -> tuple[ToolCall, ...]:
    sent = message.get("tool_calls")
    calls = list(sent) if isinstance(sent, list | tuple) else []
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [{"function": message["function_call"]}]
    return tuple(_call(call) for call in calls if isinstance(call, Mapping))


def _call(call: Mapping[str, object]) -> ToolCall:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    call_id = call.get("id")
    return ToolCall(
        _text(function.get("name")),
        parse_arguments(function.get("arguments")),
        id=call_id if isinstance(call_id, str) and call_id else None,
    )


def _call_to_openai(call: ToolCall) -> dict[str, JSON]:
    arguments = call.raw_arguments
    if arguments is None:
        arguments = _text(call.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _parse_json(text: str) -> JSON:
    """The value of JSON text, or the text itself where it is none."""
    try:
        return cast(JSON, json.loads(text, parse_float=_finite, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return text


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _refuse(where: str, value: object, advice: str) -> NoReturn:
    raise UnsupportedParameterError(f"{where} is {value!r}; {advice}")
