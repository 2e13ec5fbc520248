"""Cases of the integration notes about histories, and the table that says which test has which.

Numbers in comments are the cases (T: template and history, S: streaming).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.chat.messages import Message
from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
from dlite_agent.chat.renderer import Renderer

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "turn-cases.md"
USER = {"role": "user", "content": "Look."}
TOOLS = tools_from_openai([{"name": "ls", "parameters": {"type": "object", "properties": {}}}])
CALLS = [
    {"id": name, "type": "function", "function": {"name": "ls", "arguments": f'{{"at": "{name}"}}'}}
    for name in ("a", "b", "c")
]


def tokens(renderer: Renderer, *messages: Mapping[str, Any]) -> tuple[int, ...]:
    return renderer.render(messages_from_openai(messages), TOOLS).token_ids


@pytest.mark.parametrize(
    "content",
    [
        {"content": None},
        {"content": ""},
        {},
        {"content": []},
        {"content": [{"type": "text", "text": ""}]},
        {"content": None, "function_call": None},
        {"content": "", "reasoning_content": None, "refusal": None, "audio": None},
    ],
)
@pytest.mark.parametrize("tool_calls", [{"tool_calls": CALLS[:1]}, {"tool_calls": None}, {}])
def test_an_answer_without_text_renders_the_same_in_every_spelling(
    qwen3_renderer: Renderer, content: dict[str, Any], tool_calls: dict[str, Any]
) -> None:  # 40
    turn = {"role": "assistant", **tool_calls}
    expected = tokens(qwen3_renderer, USER, {**turn, "content": ""}, USER)
    assert tokens(qwen3_renderer, USER, {**turn, **content}, USER) == expected


def result(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}", **fields}


def test_parallel_results_render_in_the_order_of_their_calls(
    qwen3_renderer: Renderer,
) -> None:  # 42
    head: tuple[Mapping[str, Any], ...] = (
        USER,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
    )
    in_order = tokens(qwen3_renderer, *head, *map(result, "abc"))
    assert tokens(qwen3_renderer, *head, *map(result, "cab")) == in_order
    said_otherwise = [
        result("b", name="ls"),
        result("a", content=[{"type": "text", "text": "of "}, {"type": "text", "text": "a"}]),
        result("c", status="error", is_error=True),
    ]
    assert tokens(qwen3_renderer, *head, *said_otherwise) == in_order
    without_b = tokens(qwen3_renderer, *head, *map(result, "ca"))
    assert without_b == tokens(qwen3_renderer, *head, *map(result, "ac"))
    assert without_b != in_order


def test_a_system_message_may_stand_anywhere(qwen3_renderer: Renderer) -> None:  # 43
    system, developer = ({"role": role, "content": "Hm."} for role in ("system", "developer"))
    said = {"role": "assistant", "content": "Yes."}
    for before, after in (((), (USER,)), ((system,), (USER,)), ((USER,), ()), ((said,), ())):
        expected = tokens(qwen3_renderer, *before, system, *after)
        assert tokens(qwen3_renderer, *before, developer, *after) == expected
    assert messages_from_openai([said]) == (Message("assistant", "Yes."),)
    assert tokens(qwen3_renderer, said), "a history may begin with an answer, and have no question"


def _named_tests(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(\w+(?:/\w+)*\.py)::(\w+)`", cell)


def test_every_case_has_a_test_that_is_there() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", TABLE.read_text("utf-8"), re.MULTILINE)
    numbers = [int(number) for number, _, _ in rows]
    gone = {4, 8, 13, 18, 22, 27, 30, 36, 39, 44, 50}  # numbers that the notes do not use
    assert numbers == sorted(set(range(1, 53)) - gone)
    for number, _, cell in rows:
        named = _named_tests(cell)
        assert named, f"case {number} names no test"
        for path, name in named:
            source = (ROOT / "tests" / path).read_text("utf-8")
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), (number, name)
