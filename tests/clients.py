"""Clients of the tests: what each does to a transcript between two calls, in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.chat.openai_format import (
    message_to_openai,
    messages_from_openai,
    tools_from_openai,
)
from dlite_agent.outputs import Generation
from tests.conversations import sampled

JSONObject = dict[str, Any]

TOOLS: list[JSONObject] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: see the file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            },
        },
    }
    for name in ("read_file", "write_file")
]


@dataclass
class Client:
    """One conversation, kept as a client keeps it.

    Attributes:
        task: The first user message.
        rewrite: What happens to the whole transcript before it is sent, each time.
        shuffle: What happens to the tools.
        options: Further fields of every request.
    """

    task: str
    rewrite: Callable[[list[JSONObject]], list[JSONObject]] = list
    shuffle: Callable[[list[JSONObject], int], list[JSONObject]] = lambda tools, turn: tools
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[JSONObject] = field(default_factory=list)
    turns: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [
            {"role": "system", "content": "You repair programs."},
            {"role": "user", "content": self.task},
        ]

    def request(self, *, max_tokens: int = 40) -> ChatRequest:
        copy = json.loads(json.dumps(self.messages))
        tools = self.shuffle(json.loads(json.dumps(TOOLS)), len(self.turns))
        return ChatRequest(
            messages_from_openai(self.rewrite(copy)),
            tools=tools_from_openai(tools),
            sampling=sampled(len(self.turns), max_tokens),
            **self.options,
        )

    def take(self, generation: Generation) -> None:
        """Keep the answer, and a result for each call; a message of the user if there is none."""
        self.turns.append(generation)
        self.messages.append(message_to_openai(generation.message))
        for number, call in enumerate(generation.message.tool_calls):
            content = f"    {self.task}: result {len(self.turns)}.{number}\n"
            result = {"role": "tool", "tool_call_id": call.id, "content": content}
            self.messages.append(result)
        if not generation.message.tool_calls:
            self.messages.append({"role": "tool", "content": "nothing was called"})


def of_calls(change: Callable[[JSONObject], object]) -> Callable[[list[JSONObject]], Any]:
    """Rewrites each call's `function` object."""

    def rewrite(messages: list[JSONObject]) -> list[JSONObject]:
        for message in messages:
            for call in message.get("tool_calls") or ():
                change(call["function"])
        return messages

    return rewrite


def of_answers(change: Callable[[JSONObject], object]) -> Callable[[list[JSONObject]], Any]:
    """Rewrites each assistant message."""

    def rewrite(messages: list[JSONObject]) -> list[JSONObject]:
        for message in messages:
            if message["role"] == "assistant":
                change(message)
        return messages

    return rewrite


def arguments_as(
    dump: Callable[[Any], object],
) -> Callable[[list[JSONObject]], list[JSONObject]]:
    """Writes each call's arguments anew."""

    def change(function: JSONObject) -> None:
        function["arguments"] = dump(json.loads(function["arguments"]))

    return of_calls(change)


def escaped(value: Any) -> str:
    """JSON in which every character of a string is a Unicode escape."""
    text = json.dumps(value)
    return text.replace("a", "\\u0061") if "\\" not in text else text


def renamed_ids(messages: list[JSONObject]) -> list[JSONObject]:
    """New ids at each call, the same in calls and results."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["id"] = names.setdefault(call["id"], f"toolu_{len(names)}")
        if message.get("tool_call_id"):
            message["tool_call_id"] = names[message["tool_call_id"]]
    return messages


def without_ids(messages: list[JSONObject]) -> list[JSONObject]:
    for message in messages:
        message["tool_call_id"] = None
        for call in message.get("tool_calls") or ():
            call["id"] = None
    return messages


def results_reversed(messages: list[JSONObject]) -> list[JSONObject]:
    """Parallel results in the order in which the tools ended."""
    ordered: list[JSONObject] = []
    run: list[JSONObject] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            run.insert(0, message)
        else:
            ordered += [*run, message]
            run = []
    return ordered[:-1]


def in_parts(messages: list[JSONObject]) -> list[JSONObject]:
    """Lists of parts, `cache_control`, and fields that nobody asked for."""
    for message in messages:
        text = message["content"] or ""
        parts = [text[: len(text) // 2], text[len(text) // 2 :]]
        message["content"] = [{"type": "text", "text": part} for part in parts]
        message["content"][-1]["cache_control"] = {"type": "ephemeral"}
        message |= {"function_call": None, "refusal": None, "annotations": []}
        message["role"] = {"system": "developer"}.get(message["role"], message["role"])
    return messages


def shuffled_tools(tools: list[JSONObject], turn: int) -> list[JSONObject]:
    """Another order of tools, and of the keys of their schemas, at every other call."""
    if turn % 2 == 0:
        return tools
    for tool in tools:
        parameters = tool["function"]["parameters"]
        parameters["properties"] = dict(reversed(parameters["properties"].items()))
        tool["function"]["parameters"] = dict(reversed(parameters.items()))
    return tools[::-1]


def rename_reasoning(message: JSONObject) -> None:
    message["reasoning"] = message.pop("reasoning_content", None)


def think_inline(message: JSONObject) -> None:
    """Thoughts spelled out before the content, where there is one; else an empty block."""
    thought = message.pop("reasoning_content", None) or ""
    message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content'] or ''}"


def edited(messages: Sequence[Message], index: int, **changes: Any) -> tuple[Message, ...]:
    """The same messages with one of them changed."""
    changed = list(messages)
    changed[index] = replace(changed[index], **changes)
    return tuple(changed)
