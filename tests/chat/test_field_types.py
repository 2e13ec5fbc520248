"""Values that users build by hand: a wrong type is refused where it is made, by its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError, RequestError

CYCLE: list[Any] = []
CYCLE.append(CYCLE)
DEEP: Any = {}
for _ in range(200):
    DEEP = {"a": DEEP}

HELLO = (Message("user", "hello"),)
WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (Message, {"role": "robot"}, "Message.role"),
    (Message, {"role": None}, "Message.role"),
    (Message, {"role": ["user"]}, "Message.role"),
    (Message, {"role": "user", "content": None}, "Message.content"),
    (Message, {"role": "user", "content": b"hello"}, "Message.content"),
    (Message, {"role": "user", "content": [{"type": "text", "text": "x"}]}, "Message.content"),
    (Message, {"role": "assistant", "reasoning": 1}, "Message.reasoning"),
    (Message, {"role": "assistant", "tool_calls": "call"}, "Message.tool_calls"),
    (Message, {"role": "assistant", "tool_calls": None}, "Message.tool_calls"),
    (Message, {"role": "assistant", "tool_calls": ({"name": "f"},)}, "Message.tool_calls"),
    (Message, {"role": "tool", "tool_call_id": 7}, "Message.tool_call_id"),
    (Message, {"role": "user", "name": 7}, "Message.name"),
    (Message, {"role": "assistant", "turn": 7}, "Message.turn"),
    (ToolCall, {"name": None, "arguments": {}}, "ToolCall.name"),
    (ToolCall, {"name": "f", "arguments": {"a": object()}}, "ToolCall.arguments"),
    (ToolCall, {"name": "f", "arguments": {(1, 2): "a"}}, "ToolCall.arguments"),
    (ToolCall, {"name": "f", "arguments": {"a": CYCLE}}, "ToolCall.arguments"),
    (ToolCall, {"name": "f", "arguments": DEEP}, "ToolCall.arguments"),
    (ToolCall, {"name": "f", "arguments": {}, "id": 7}, "ToolCall.id"),
    (ToolCall, {"name": "f", "arguments": {}, "raw_arguments": {}}, "ToolCall.raw_arguments"),
    (ToolSpec, {"name": ""}, "ToolSpec.name"),
    (ToolSpec, {"name": 7}, "ToolSpec.name"),
    (ToolSpec, {"name": "f", "description": None}, "ToolSpec.description"),
    (ToolSpec, {"name": "f", "parameters": None}, "ToolSpec.parameters"),
    (ToolSpec, {"name": "f", "parameters": {"type": str}}, "ToolSpec.parameters"),
    (ToolSpec, {"name": "f", "parameters": DEEP}, "ToolSpec.parameters"),
    (ToolSpec, {"name": "f", "strict": "yes"}, "ToolSpec.strict"),
    (ToolChoice, {"mode": "foo"}, "ToolChoice.mode"),
    (ToolChoice, {"names": "read"}, "ToolChoice.names"),
    (ToolChoice, {"names": (1,)}, "ToolChoice.names"),
    (AnswerFormat, {"schema": "object"}, "AnswerFormat.schema"),
    (AnswerFormat, {"schema": {"type": int}}, "AnswerFormat.schema"),
    (AnswerFormat, {"strict": 1}, "AnswerFormat.strict"),
    (OutputRules, {"tool_choice": "auto"}, "OutputRules.tool_choice"),
    (OutputRules, {"parallel_tool_calls": None}, "OutputRules.parallel_tool_calls"),
    (OutputRules, {"answer": {}}, "OutputRules.answer"),
    (OutputRules, {"closes_calls": 1}, "OutputRules.closes_calls"),
    (ChatRequest, {"messages": "hello"}, "ChatRequest.messages"),
    (ChatRequest, {"messages": [{"role": "user"}]}, "ChatRequest.messages"),
    (ChatRequest, {"messages": None}, "ChatRequest.messages"),
    (ChatRequest, {"messages": HELLO, "tools": ("read",)}, "ChatRequest.tools"),
    (ChatRequest, {"messages": HELLO, "tools": ToolSpec("read")}, "ChatRequest.tools"),
    (ChatRequest, {"messages": HELLO, "stop": (1,)}, "ChatRequest.stop"),
    (ChatRequest, {"messages": HELLO, "is_partial": 1}, "ChatRequest.is_partial"),
]


@pytest.mark.parametrize(("make", "fields", "where"), WRONG)
def test_a_field_of_another_type_is_named_with_what_to_use(
    make: Callable[..., object], fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(RequestError, match=f"^{where} is .*; use "):
        make(**fields)


def test_lists_become_tuples() -> None:
    call = ToolCall("f", {"a": [1, 2.5, None, True, {}]})
    message = Message("assistant", tool_calls=[call])  # type: ignore[arg-type]  # what users pass
    assert message.tool_calls == (call,)
    assert ToolChoice("required", ["f"]).names == ("f",)  # type: ignore[arg-type]  # likewise
    request = ChatRequest([message], stop=["x"])  # type: ignore[arg-type]  # likewise
    assert (request.messages, request.stop) == ((message,), ("x",))


@pytest.mark.parametrize("option", ["max_kv_bytes", "max_context", "max_batch", "prefill_chunk"])
def test_a_number_that_no_machine_has_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} is 1{'0' * 30}, more than any machine"):
        EngineConfig(**{option: 10**30})  # type: ignore[arg-type]  # by name
