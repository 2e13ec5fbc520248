"""LangChain's messages in, whatever client or checkpointer they went through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
)

from dlite_agent import Message, ToolCall, UnparsedToolCall, UnsupportedParameterError
from dlite_agent.integrations.langchain_messages import ChunkWriter, messages_from_langchain
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
from dlite_agent.testing import ScriptedEngine

CALL = {"name": "f", "args": {"a": 1}, "id": "x", "type": "tool_call"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (HumanMessage("Hi", name="bob"), Message("user", "Hi", name="bob")),
        (HumanMessageChunk("Hi"), Message("user", "Hi")),
        (SystemMessage("Be kind."), Message("system", "Be kind.")),
        (SystemMessageChunk("Be kind."), Message("system", "Be kind.")),
        (ChatMessage("Hi", role="user"), Message("user", "Hi")),
        (ChatMessage("Hi", role="developer"), Message("system", "Hi")),
        (ToolMessage("1", tool_call_id="x"), Message("tool", "1", tool_call_id="x")),
        (ToolMessageChunk("1", tool_call_id="x"), Message("tool", "1", tool_call_id="x")),
        (
            ToolMessage([{"type": "text", "text": "no"}], tool_call_id="x", status="error"),
            Message("tool", "no", tool_call_id="x"),
        ),
        (FunctionMessage("1", name="f"), Message("tool", "1", name="f")),
        (AIMessage("Hi"), Message("assistant", "Hi")),
        (
            AIMessage("Hi", additional_kwargs={"reasoning_content": "hm"}, tool_calls=[CALL]),
            Message("assistant", "Hi", "hm", (ToolCall("f", {"a": 1}, "x"),)),
        ),
        (
            AIMessageChunk("", tool_call_chunks=[{**CALL, "args": '{"a": 1}', "index": 0}]),
            Message("assistant", "", None, (ToolCall("f", {"a": 1}, "x"),)),
        ),
        # Anthropic's blocks, with and without LangChain's own list of calls
        (
            AIMessage(
                [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Hi"},
                    {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
                ],
                tool_calls=[CALL],
            ),
            Message("assistant", "Hi", "hm", (ToolCall("f", {"a": 1}, "x"),)),
        ),
        (
            AIMessage(["Hi", {"type": "tool_use", "id": "y", "name": "g", "input": {}}]),
            Message("assistant", "Hi", None, (ToolCall("g", {}, "y"),)),
        ),
        # Core's own blocks (output_version="v1")
        (
            AIMessage(
                content_blocks=[
                    {"type": "reasoning", "reasoning": "hm"},
                    {"type": "text", "text": "Hi"},
                    {"type": "tool_call", "id": "x", "name": "f", "args": {"a": 1}},
                ]
            ),
            Message("assistant", "Hi", "hm", (ToolCall("f", {"a": 1}, "x"),)),
        ),
        # A call that did not parse, of another provider
        (
            AIMessage(
                "",
                invalid_tool_calls=[
                    {
                        "name": "f",
                        "args": '{"a": ',
                        "id": "x",
                        "error": "?",
                        "type": "invalid_tool_call",
                    }
                ],
            ),
            Message("assistant", "", None, (ToolCall("f", '{"a": ', "x"),)),
        ),
    ],
)
def test_message_is_converted(message: BaseMessage, expected: Message) -> None:
    assert messages_from_langchain([message]) == (expected,)


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage([{"type": "image_url", "image_url": {"url": "data:"}}]),
        HumanMessage([{"type": "audio", "base64": ""}]),
        ToolMessage([{"type": "image", "base64": ""}], tool_call_id="x"),
        RemoveMessage(id="x"),
        ChatMessage("Hi", role="narrator"),
    ],
)
def test_what_cannot_be_read_is_refused(message: BaseMessage) -> None:
    with pytest.raises(UnsupportedParameterError):
        messages_from_langchain([message])


def test_conversion_changes_nothing_of_the_caller() -> None:
    content: list[Any] = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    message = HumanMessage(content)
    before = message.model_dump_json()
    messages_from_langchain([message])
    assert message.model_dump_json() == before


@given(st.text('{}[]"\\,:1a \n', max_size=25))
def test_every_text_that_is_no_call_can_be_spoilt(text: str) -> None:
    stats, item = TurnStats(), UnparsedToolCall(text, "why", "x", "f")
    generation = Generation(Message("assistant"), "stop", stats, unparsed=(item,))
    chunks = list(ChunkWriter(ScriptedEngine([])).write(GenerationChunk(generation=generation)))
    message = chunks[0].message + chunks[1].message
    assert isinstance(message, AIMessageChunk)
    assert message.tool_calls == []
    assert [call["id"] for call in message.invalid_tool_calls] == ["x"]
