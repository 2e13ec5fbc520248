"""What clients send becomes one form of messages; what we cannot read is refused by name."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec, UnparsedToolCall
from dlite_agent.chat.openai_format import (
    message_to_openai,
    messages_from_openai,
    order_tool_results,
    parse_arguments,
    tools_from_openai,
)
from dlite_agent.errors import UnsupportedParameterError


def _one(**message: Any) -> Message:
    return messages_from_openai([message])[0]


def _call(arguments: Any, call_id: str | None = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


# Contents


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        (["a", "b"], "ab"),
        ([{"text": "untyped"}], "untyped"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "a"}]}], "a"),
        ([{"type": "text", "text": None}], ""),
        ({"ok": True, "ü": [1]}, '{"ok": true, "ü": [1]}'),
        (3, "3"),
    ],
)
def test_content_becomes_text(content: Any, text: str) -> None:
    for role in ("system", "user", "assistant", "tool"):
        assert _one(role=role, content=content).content == text


def test_missing_content_is_empty() -> None:
    assert _one(role="assistant") == Message("assistant")


@pytest.mark.parametrize(
    "kind", ["image_url", "input_image", "input_audio", "audio", "file", "video_url"]
)
def test_media_are_refused_by_name(kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]
    with pytest.raises(
        UnsupportedParameterError, match=rf"messages\[1\].content\[1\].type is '{kind}'"
    ):
        messages_from_openai(messages)


def test_unknown_part_is_refused_from_a_user_and_dropped_from_an_assistant() -> None:
    part = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    with pytest.raises(UnsupportedParameterError, match="tool_use"):
        _one(role="user", content=[part])
    assert _one(role="assistant", content=[part, {"type": "text", "text": "a"}]).content == "a"


@pytest.mark.parametrize(
    ("role", "ours"), [("developer", "system"), ("function", "tool"), ("assistant", "assistant")]
)
def test_roles(role: str, ours: str) -> None:
    assert _one(role=role, content="x").role == ours


@pytest.mark.parametrize("role", ["critic", None, 3])
def test_unknown_role_is_refused(role: Any) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"messages\[0\].role is"):
        _one(role=role, content="x")


def test_names_and_ids_are_kept_and_nulls_are_none() -> None:
    message = _one(role="tool", content="x", tool_call_id="1", name="f")
    assert (message.tool_call_id, message.name) == ("1", "f")
    message = _one(role="tool", content="x", tool_call_id=None, name="")
    assert (message.tool_call_id, message.name) == (None, None)


# Thoughts


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({"content": "a", "reasoning_content": "r"}, "r", "a"),
        ({"content": "a", "reasoning": "r"}, "r", "a"),
        ({"content": "a", "reasoning_content": "", "reasoning": None}, None, "a"),
        ({"content": "a", "reasoning": {"summary": "x"}}, None, "a"),
        ({"content": "<think>\nr\n</think>\n\na"}, "r", "a"),
        ({"content": "\n <think>r</think>a"}, "r", "a"),
        ({"content": "<think>\n\n</think>\n\na"}, None, "a"),
        ({"content": "<think>cut o"}, "cut o", ""),
        ({"content": "a <think>r</think>"}, None, "a <think>r</think>"),
        ({"content": "r</think>a"}, None, "r</think>a"),
        ({"content": "<think>r</think>a", "reasoning_content": "r"}, "r", "a"),
        ({"content": "<think>r</think>a", "reasoning_content": " "}, "r", "a"),
        (
            {"content": "<think>r</think>a", "reasoning_content": "other"},
            "other",
            "<think>r</think>a",
        ),
        ({"content": "<think> </think><think>r</think><think>r</think>a"}, "r", "a"),
        (
            {"content": [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "a"}]},
            "r",
            "a",
        ),
        ({"content": [{"type": "reasoning", "reasoning": "r"}, "a"]}, "r", "a"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, "a"]}, None, "a"),
    ],
)
def test_thoughts_move_to_the_reasoning(
    fields: dict[str, Any], reasoning: str | None, content: str
) -> None:
    message = _one(role="assistant", **fields)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_a_user_may_write_about_thoughts() -> None:
    message = _one(role="user", content="<think>r</think>a", reasoning_content="x")
    assert (message.reasoning, message.content) == (None, "<think>r</think>a")


# Calls


def _nested(depth: int) -> str:
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    ("sent", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        (' {"a":\t1.5,\n"b": [null, true]} ', {"a": 1.5, "b": [None, True]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("  ", {}),
        (None, {}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ('"hello"', '"hello"'),
        (json.dumps("[1]"), json.dumps("[1]")),
        ("[1]", [1]),
        ('{"a": "rm -rf', '{"a": "rm -rf'),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": -Infinity}', '{"a": -Infinity}'),
        ('{"a": 1e400}', '{"a": 1e400}'),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ('{"a": "\\ud83d\\ude00 \\u00e9"}', {"a": "😀 é"}),
        ("[" * 100_000, "[" * 100_000),
        ("1" * 5_000, "1" * 5_000),
        (_nested(101), _nested(101)),
        (_nested(100), json.loads(_nested(100))),
        (json.loads(_nested(500)), _nested(500)),
    ],
)
def test_arguments_are_parsed_or_stay_text(sent: Any, parsed: Any) -> None:
    assert parse_arguments(sent) == parsed
    message = _one(role="assistant", content=None, tool_calls=[_call(sent)])
    assert message.tool_calls == (ToolCall("f", parsed, id="1"),)


def test_the_same_call_in_other_spacing_and_order_is_the_same_message() -> None:
    one = _one(role="assistant", tool_calls=[_call('{"a": 1, "b": "x"}')], content=None)
    other = _one(role="assistant", tool_calls=[_call('{ "b":"x","a":1 }')], content="")
    assert one == other


def test_odd_calls_are_read_as_far_as_possible() -> None:
    calls: list[Any] = [
        {"name": "f", "arguments": "{}"},
        {"function": {}},
        "noise",
        _call("{}", ""),
    ]
    message = _one(role="assistant", tool_calls=calls, function_call=None)
    assert message.tool_calls == (ToolCall("f", {}), ToolCall("", {}), ToolCall("f", {}))
    assert _one(role="assistant", content="a", tool_calls=None).tool_calls == ()


def test_legacy_function_call_and_its_result() -> None:
    messages = messages_from_openai(
        [
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "f", "arguments": "{}"},
            },
            {"role": "function", "name": "f", "content": "x"},
        ]
    )
    assert messages == (
        Message("assistant", tool_calls=(ToolCall("f", {}),)),
        Message("tool", "x", name="f"),
    )


# Order of results


def _ordered(
    call_ids: list[str | None], result_ids: list[str | None]
) -> list[tuple[str, str | None]]:
    calls = tuple(ToolCall("f", {}, id=call_id) for call_id in call_ids)
    results = [
        Message("tool", str(i), tool_call_id=call_id) for i, call_id in enumerate(result_ids)
    ]
    messages = [Message("user", "q"), Message("assistant", tool_calls=calls), *results]
    first, second, *rest = order_tool_results([*messages, Message("user", "r")])
    assert [first, second, rest.pop()] == [*messages[:2], Message("user", "r")]
    return [(message.content, message.tool_call_id) for message in rest]


@pytest.mark.parametrize(
    ("calls", "results", "ordered"),
    [
        (["a", "b", "c"], ["c", "a", "b"], [("1", "a"), ("2", "b"), ("0", "c")]),
        (["a", "b", "c"], ["c", "a"], [("1", "a"), ("0", "c")]),
        (["a", "b"], [None, None], [("0", "a"), ("1", "b")]),
        (["a", "b"], [None, "a"], [("1", "a"), ("0", "b")]),
        (["a", "b"], ["x", "y"], [("0", "x"), ("1", "y")]),
        ([None, None], [None, None], [("0", None), ("1", None)]),
        (["a"], ["a", "a"], [("0", "a"), ("1", "a")]),
        (["a", "b"], ["a", "a"], [("0", "a"), ("1", "a")]),
        (["a"], ["a", "gone"], [("0", "a"), ("1", "gone")]),
        (["a", "a"], ["a", "a"], [("0", "a"), ("1", "a")]),
        (["a"], [], []),
    ],
)
def test_results_go_to_the_order_of_the_calls(
    calls: list[str | None], results: list[str | None], ordered: list[tuple[str, str | None]]
) -> None:
    assert _ordered(calls, results) == ordered


def test_results_without_calls_stay_where_they_are() -> None:
    messages = [Message("tool", "a", tool_call_id="1"), Message("user"), Message("tool", "b")]
    assert order_tool_results(messages) == tuple(messages)
    assert order_tool_results([]) == ()


# Tools


def test_tools_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tools = tools_from_openai(
        [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": schema, "strict": True},
                "cache_control": {"type": "ephemeral"},
            },
            {
                "type": "function",
                "function": {"name": "g", "description": None, "parameters": None},
            },
            {"name": "h", "input_schema": schema},
        ]
    )
    parameters = cast(dict[str, JSON], schema)
    assert tools == (
        ToolSpec("f", "d", parameters, strict=True),
        ToolSpec("g"),
        ToolSpec("h", "", parameters),
    )
    assert tools_from_openai(None) == ()


@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ({"type": "web_search"}, r"tools\[1\].type is 'web_search'"),
        ({"type": "function", "function": "f"}, r"tools\[1\].type"),
        ({"type": "function", "function": {}}, r"tools\[1\].function.name is None"),
        ({"type": "function", "function": {"name": "f"}}, r"tools\[1\].function.name is 'f'"),
        ({"name": "g", "parameters": "x"}, r"tools\[1\].function.parameters is 'x'"),
        ({"name": "g", "parameters": json.loads(_nested(101))}, r"parameters is .*; nest"),
        (len, r"tools\[1\] is <built-in function len>; .*bind_tools"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(tool: Any, names: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=names):
        tools_from_openai([{"type": "function", "function": {"name": "f"}}, tool])


# Back to OpenAI's form


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "hi", name="ann"),
        Message("assistant", "a", reasoning="r"),
        Message("assistant", "", tool_calls=(ToolCall("f", {"ü": 1}, id="1"),)),
        Message("assistant", "a", tool_calls=(ToolCall("f", "raw {", id="1"), ToolCall("g", {}))),
        Message("tool", "x", tool_call_id="1"),
        Message("assistant", ""),
    ],
)
def test_messages_survive_the_round_trip(message: Message) -> None:
    assert messages_from_openai([message_to_openai(message)]) == (message,)


def test_answer_has_the_fields_that_clients_read() -> None:
    call = ToolCall("f", {"a": "é"}, id="1", raw_arguments='{"a":"é"}')
    unparsed = UnparsedToolCall('{"name": "g', "cut off", id="2", name="g")
    answer = message_to_openai(
        Message("assistant", "", reasoning="r", tool_calls=(call,)), [unparsed]
    )
    assert answer == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}}
        ],
        "unparsed_tool_calls": [
            {"id": "2", "name": "g", "text": '{"name": "g', "error": "cut off"}
        ],
    }
    assert message_to_openai(Message("assistant", ""))["content"] == ""
