"""What OpenAI's fields say about an answer."""

from __future__ import annotations

import pytest

from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.output_rules import (
    AnswerFormat,
    OutputRules,
    ToolChoice,
    answer_format_from_openai,
    tool_choice_from_openai,
)
from dlite_agent.errors import RequestError, UnsupportedParameterError

TOOLS = (ToolSpec("read"), ToolSpec("write"))
READ = {"type": "function", "function": {"name": "read"}}


@pytest.mark.parametrize(
    ("choice", "meaning"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        (False, ToolChoice("none")),
        ("required", ToolChoice("required")),
        ("any", ToolChoice("required")),
        (True, ToolChoice("required")),
        ({"type": "any"}, ToolChoice("required")),
        ("read", ToolChoice("required", ("read",))),
        (READ, ToolChoice("required", ("read",))),
        ({"type": "tool", "name": "read"}, ToolChoice("required", ("read",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [READ]}},
            ToolChoice("required", ("read",)),
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [READ, {"name": "write"}]},
            ToolChoice("auto", ("read", "write")),
        ),
    ],
)
def test_a_choice_is_read_in_every_spelling(choice: object, meaning: ToolChoice) -> None:
    assert tool_choice_from_openai(choice) == meaning


@pytest.mark.parametrize(
    "choice",
    [
        3,
        {"type": "function"},
        {"type": "function", "function": {"name": ""}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "sometimes", "tools": [READ]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ],
)
def test_another_choice_is_refused(choice: object) -> None:
    with pytest.raises(UnsupportedParameterError, match="tool_choice"):
        tool_choice_from_openai(choice)


def test_tools_that_may_be_called() -> None:
    assert OutputRules().allowed(TOOLS) == TOOLS
    assert OutputRules(ToolChoice("none")).allowed(TOOLS) == ()
    assert OutputRules(ToolChoice("auto", ("write",))).allowed(TOOLS) == TOOLS[1:]


def test_an_unknown_tool_cannot_be_chosen() -> None:
    with pytest.raises(RequestError, match=r"'delete', but tools has \['read', 'write'\]"):
        OutputRules(ToolChoice("required", ("delete",))).allowed(TOOLS)


def test_a_call_of_no_tool_cannot_be_demanded() -> None:
    with pytest.raises(RequestError, match="no tools"):
        OutputRules(ToolChoice("required")).allowed(())


@pytest.mark.parametrize(
    ("response_format", "meaning"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, AnswerFormat()),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
            AnswerFormat({"type": "integer"}),
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": False}},
            AnswerFormat({}, strict=False),
        ),
    ],
)
def test_a_format_is_read(response_format: object, meaning: AnswerFormat | None) -> None:
    assert answer_format_from_openai(response_format) == meaning


@pytest.mark.parametrize(
    "response_format",
    [
        "json",
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
    ],
)
def test_another_format_is_refused(response_format: object) -> None:
    with pytest.raises(UnsupportedParameterError, match="response_format"):
        answer_format_from_openai(response_format)


def test_a_bottomless_schema_is_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UnsupportedParameterError, match="nest at most"):
        answer_format_from_openai({"type": "json_schema", "json_schema": {"schema": schema}})
