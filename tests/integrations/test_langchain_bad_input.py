"""What is wrong with a call is said before anything is computed, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core import exceptions as core
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

import dlite_agent
from dlite_agent import ChatDLite, Engine
from dlite_agent.testing import ScriptedEngine


@pytest.fixture(scope="module")
def nano() -> Iterator[ChatDLite]:
    yield ChatDLite("nano", drafter="null", max_tokens=4, max_context=512)
    Engine.close_all()


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def spec(name: str = "add", **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def content(*blocks: dict[str, Any]) -> list[HumanMessage]:
    return [HumanMessage(list(blocks))]


NO_NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}}
IMAGE = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}

CASES: dict[str, tuple[Callable[[ChatDLite], tuple[Any, Any]], str, type, str]] = {
    "unknown tool in tool_choice": (
        lambda m: (m.bind_tools([add], tool_choice="subtract"), "?"),
        "RequestError",
        core.ModelInvalidRequestError,
        r"names the tool 'subtract', but tools has \['add'\]; name one of them",
    ),
    "unknown tool in allowed_tools": (
        lambda m: (
            m.bind_tools([add], tool_choice={"type": "allowed_tools", "tools": [spec("mul")]}),
            "?",
        ),
        "RequestError",
        core.ModelInvalidRequestError,
        "names the tool 'mul'",
    ),
    "a call is demanded of no tools": (
        lambda m: (m.bind_tools([], tool_choice="any"), "?"),
        "RequestError",
        core.ModelInvalidRequestError,
        "there are no tools; send tools",
    ),
    "duplicate tool names": (
        lambda m: (m.bind_tools([add, spec("add")]), "?"),
        "UnsupportedParameterError",
        core.ModelInvalidRequestError,
        r"tools\[1\].function.name is 'add'; every tool needs a name of its own",
    ),
    "a tool with an invalid schema": (
        lambda m: (
            m.bind_tools(
                [spec(type="object", properties={"a": {"type": "nr"}})], tool_choice="any"
            ),
            "?",
        ),
        "RequestError",
        core.ModelInvalidRequestError,
        "tool 'add': .*cannot be enforced: Invalid type: nr; simplify it, or .* strict=false",
    ),
    "a tool whose schema nothing satisfies": (
        lambda m: (m.bind_tools([spec(required=["a"], **NO_NUMBER)], tool_choice="any"), "?"),
        "RequestError",
        core.ModelInvalidRequestError,
        "tool 'add': at #/properties/a, .*Unsatisfiable schema: minimum .*; simplify it",
    ),
    "an answer with an invalid schema": (
        lambda m: (m.with_structured_output({"title": "t", "type": "nr"}), "?"),
        "RequestError",
        core.ModelInvalidRequestError,
        "nr",
    ),
    "an image": (
        lambda m: (m, content({"type": "text", "text": "What is it?"}, IMAGE)),
        "UnsupportedParameterError",
        core.ModelInvalidRequestError,
        r"messages\[0\].content\[1\].type is 'image'; this model reads text only; leave it out",
    ),
    "an image in OpenAI's form": (
        lambda m: (m, content(IMAGE_URL)),
        "UnsupportedParameterError",
        core.ModelInvalidRequestError,
        "'image_url'; this model reads text only",
    ),
    "no messages": (
        lambda m: (m, []),
        "RequestError",
        core.ModelInvalidRequestError,
        "messages is empty; send at least one message",
    ),
    "more than fits": (
        lambda m: (m, "word " * 2000),
        "ContextLengthExceededError",
        core.ContextOverflowError,
        "the limit is 512; shorten the history, lower max_tokens or raise max_context",
    ),
    "an unknown option": (
        lambda m: (m.bind(best_of=2), "?"),
        "UnsupportedParameterError",
        core.ModelInvalidRequestError,
        "best_of=2 is not an option of a call; leave it out",
    ),
}


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("case", CASES)
async def test_it_is_refused_by_name_with_advice(nano: ChatDLite, case: str) -> None:
    build, ours, theirs, message = CASES[case]
    rows = nano.cache_info().rows_computed
    for call in (
        lambda runnable, given: runnable.invoke(given),
        lambda runnable, given: list(runnable.stream(given)),
    ):
        with pytest.raises(theirs, match=message) as raised:
            call(*build(nano))
        assert isinstance(raised.value, getattr(dlite_agent, ours))
        assert raised.value.is_retryable is False  # type: ignore[attr-defined]
    for acall in (
        lambda runnable, given: runnable.ainvoke(given),
        lambda runnable, given: _drained(runnable.astream(given)),
    ):
        with pytest.raises(theirs, match=message):
            await acall(*build(nano))
    assert nano.cache_info().rows_computed == rows


CALLED = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "x"}])


@pytest.mark.parametrize(
    "messages",
    [
        [HumanMessage("1 + 2?"), ToolMessage("three", tool_call_id="nobody")],
        [HumanMessage("1 + 2?"), CALLED, ToolMessage("three", tool_call_id="nobody")],
        [HumanMessage("1 + 2?"), CALLED, *[ToolMessage("three", tool_call_id="x")] * 2],
        [ToolMessage("three", tool_call_id="nobody"), HumanMessage("1 + 2?")],
    ],
    ids=["no call", "another's", "twice", "first"],
)
def test_a_result_of_an_unknown_call_stays_in_the_prompt(messages: list[Any]) -> None:
    """History is data (design: never an error); the model reads all of it."""
    engine = ScriptedEngine(["ok"])
    model = ChatDLite(engine=engine)
    assert model.invoke(messages).text == "ok"
    (request,) = engine.requests
    assert sorted((m.role, m.content) for m in request.messages) == sorted(
        ({"human": "user", "ai": "assistant"}.get(m.type, m.type), m.content) for m in messages
    )
