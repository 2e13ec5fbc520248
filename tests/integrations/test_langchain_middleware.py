"""Middleware of `create_agent`: what a tool prints is prefilled, and old results go in batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import tool

from dlite_agent import CapacityError, ChatDLite, ChatRequest, Engine, GenerationChunk
from dlite_agent.testing import ScriptedEngine

pytest.importorskip("langchain.agents")

from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain.tools import ToolRuntime
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from dlite_agent.integrations.langchain_middleware import ElideToolResults, FeedToolOutput

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def nano() -> Iterator[ChatDLite]:
    yield ChatDLite("nano", drafter="null", temperature=0, max_tokens=24, enable_thinking=False)
    Engine.close_all()


class Prints:
    """A tool that emits its lines, and waits until they are prefilled before it ends."""

    def __init__(self, model: ChatDLite, word: str) -> None:
        self._lines = [f"src/{word}_{number}.py\n" for number in range(30)]
        self._rows = lambda: model.cache_info().rows_computed
        about = "Apply a magic function to an input."
        self.tool = tool("magic_function", description=about)(self._run)  # nano knows it

    def _run(self, x: int, runtime: ToolRuntime) -> str:
        assert x == 3
        before, waited = self._rows(), threading.Event()
        runtime.emit_output_delta("".join(self._lines))
        runtime.emit_output_delta({"not": "text"})
        for _ in range(6000):  # a minute
            if self._rows() > before + 100:
                break
            waited.wait(0.01)
        return "".join(self._lines) + "README.md\n"


def figures(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    return [m.response_metadata["dlite"] for m in messages if isinstance(m, AIMessage)]


@pytest.mark.parametrize("mode", ["invoke", "ainvoke"])
async def test_what_a_tool_prints_is_prefilled_while_it_runs(nano: ChatDLite, mode: str) -> None:
    agent = create_agent(
        nano, [Prints(nano, mode).tool], middleware=[FeedToolOutput()], checkpointer=InMemorySaver()
    )
    asked = f"What is the value of magic_function(3)? Use the tool. ({mode})"
    request: Any = {"messages": [HumanMessage(asked)]}
    config: Any = {"recursion_limit": 3, "configurable": {"thread_id": mode}}
    with suppress(RecursionError):  # nano would go on
        agent.invoke(request, config) if mode == "invoke" else await agent.ainvoke(request, config)
    first, second, *_ = figures(agent.get_state(config).values["messages"])
    assert first["fed_tokens"] == 0
    assert second["fed_tokens"] > 100
    assert second["prefilled_tokens"] < 40
    assert second["session_id"] == first["session_id"]


def engine_of(model: ChatDLite) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


@tool
def shout(word: str, runtime: ToolRuntime) -> str:
    """Print a word, and wait for nobody."""
    runtime.emit_output_delta(f"{word}\n{word}")
    return f"{word}\n{word}\n"


def call(word: str) -> str:
    return f'<tool_call>\n{{"name": "shout", "arguments": {{"word": "{word}"}}}}\n</tool_call>'


def chat(*turns: str) -> ChatDLite:
    return ChatDLite(engine=ScriptedEngine(turns))


def fed_texts(model: ChatDLite) -> list[list[str]]:
    return [[m.content for m in request.messages] for request in engine_of(model).partial_requests]


@pytest.mark.parametrize("mode", ["invoke", "ainvoke"])
async def test_whole_lines_of_the_first_open_call_are_fed(mode: str) -> None:
    model = chat(call("a"), call("b") + call("c"), "done")
    agent = create_agent(model, [shout], system_prompt="Be brief.", middleware=[FeedToolOutput()])
    question: Any = {"messages": [HumanMessage("?")]}
    result = agent.invoke(question) if mode == "invoke" else await agent.ainvoke(question)
    assert result["messages"][-1].content == "done"
    fed = fed_texts(model)
    seconds = ["Be brief.", "?", "", "a\na\n", ""]
    possible = (
        ["Be brief.", "?", "", "a\n"],
        [*seconds, "b\n"],
        [*seconds, "b\nb\n", "c\n"],
    )
    assert all(contents in possible for contents in fed)
    sent = engine_of(model).requests
    for request in engine_of(model).partial_requests:
        assert (request.tools, request.template_kwargs) == (sent[0].tools, sent[0].template_kwargs)


def test_an_agent_of_the_same_script_answers_the_same_without_it() -> None:
    answers = []
    for middleware in ([], [FeedToolOutput()]):
        agent = create_agent(chat(call("a") + call("b"), "done"), [shout], middleware=middleware)
        messages = agent.invoke({"messages": [HumanMessage("?")]})["messages"]
        answers.append([(m.type, m.content) for m in messages])
    assert answers[0] == answers[1]


class Answer(BaseModel):
    """An answer."""

    text: str


def test_an_answer_that_travels_as_a_tool_is_not_fed_for() -> None:
    """The model is shown one more tool than the middleware sees."""
    final = '<tool_call>\n{"name": "Answer", "arguments": {"text": "x"}}\n</tool_call>'
    model = chat(call("a"), final)
    agent = create_agent(
        model, [shout], response_format=ToolStrategy(Answer), middleware=[FeedToolOutput()]
    )
    result = agent.invoke({"messages": [HumanMessage("?")]})
    assert result["structured_response"] == Answer(text="x")
    assert fed_texts(model) == []


def test_a_feed_that_fails_does_not_fail_the_tool() -> None:
    class Refuses(ScriptedEngine):
        def stream(self, request: ChatRequest) -> Generator[GenerationChunk, None, None]:
            if request.is_partial:
                raise CapacityError("full")
            yield from super().stream(request)

    agent = create_agent(
        ChatDLite(engine=Refuses([call("a"), "done"])), [shout], middleware=[FeedToolOutput()]
    )
    assert agent.invoke({"messages": [HumanMessage("?")]})["messages"][-1].content == "done"


# Eliding


def history(num_results: int, result: str = "x" * 400, thought: str = "ok") -> list[AnyMessage]:
    messages: list[AnyMessage] = [HumanMessage("Begin.")]
    for number in range(num_results):
        calls = [{"name": "shout", "args": {"word": str(number)}, "id": f"c{number}"}]
        messages.append(AIMessage(thought, tool_calls=calls))
        messages.append(ToolMessage(f"{number} {result}", tool_call_id=f"c{number}"))
    return messages


def edited(edit: Any, messages: list[AnyMessage]) -> list[str]:
    copies = list(messages)
    edit.apply(copies, count_tokens=count_tokens_approximately)
    return [str(message.content) for message in copies]


def num_cleared(contents: list[str]) -> int:
    return contents.count("[cleared]")


def test_results_go_in_batches_and_stay_gone() -> None:
    edit = ElideToolResults(trigger=800, keep=2)
    counts = [num_cleared(edited(edit, history(number))) for number in range(40)]
    assert counts == sorted(counts)
    assert counts[-1] > 20
    jumps = [after - before for before, after in itertools.pairwise(counts) if after > before]
    assert len(jumps) > 3
    assert min(jumps) >= 3  # never one at a time
    assert ElideToolResults(trigger=10**6).apply(history(9), count_tokens=len) is None


def test_newest_results_short_ones_and_what_is_below_the_trigger_stay() -> None:
    contents = edited(ElideToolResults(trigger=500, keep=4), history(12))
    assert "[cleared]" not in contents[-8:]
    assert num_cleared(contents) > 0
    assert num_cleared(edited(ElideToolResults(trigger=50), history(12, result=""))) == 0
    assert num_cleared(edited(ElideToolResults(trigger=50_000), history(12))) == 0


def test_nothing_goes_where_it_does_not_pay() -> None:
    long_answers = history(30, result="x" * 40, thought="y" * 4000)
    assert num_cleared(edited(ElideToolResults(trigger=500), long_answers)) == 0
    assert num_cleared(edited(ElideToolResults(trigger=500, max_cost=1e9), long_answers)) == 27


def repeated(edit: Any) -> tuple[int, int]:
    """Tokens of old messages that all turns compute again, and tokens that are freed at the end."""
    count = count_tokens_approximately
    before: list[AnyMessage] = []
    again = 0
    for number in range(1, 40):
        messages = history(number)
        edit.apply(messages, count_tokens=count)
        same = [a.content == b.content for a, b in zip(before, messages, strict=False)]
        kept = same.index(False) if False in same else len(same)
        again += count(messages[kept : len(before)])
        before = messages
    return again, count(history(39)) - count(before)


def test_edits_cost_no_more_than_they_free() -> None:
    again, freed = repeated(ElideToolResults(trigger=800, keep=2))
    assert 0 < again <= freed
    theirs, _ = repeated(ClearToolUsesEdit(trigger=800, keep=2))
    assert theirs > 1.5 * again


def test_the_model_reads_an_elided_history() -> None:
    model = chat("done")
    edit = ElideToolResults(trigger=800, keep=2)
    agent = create_agent(model, [shout], middleware=[ContextEditingMiddleware(edits=[edit])])
    agent.invoke({"messages": [*history(20), HumanMessage("And?")]})
    (request,) = engine_of(model).requests
    assert num_cleared([message.content for message in request.messages]) > 10


@pytest.mark.soak
def test_turns_of_nano_compute_what_the_edit_says(nano: ChatDLite) -> None:
    model = nano.bind_tools([shout]).bind(max_tokens=1)
    totals = {}
    for name, edit in {
        "batches": ElideToolResults(trigger=600, keep=2),
        "every turn": ClearToolUsesEdit(trigger=600, keep=2),
    }.items():
        totals[name] = 0
        for number in range(2, 16):
            messages = history(number, result=name * 20)
            edit.apply(messages, count_tokens=count_tokens_approximately)
            answer = model.invoke(messages, session_id=name)
            totals[name] += answer.response_metadata["dlite"]["prefilled_tokens"]
    assert totals["batches"] < 0.8 * totals["every turn"]
