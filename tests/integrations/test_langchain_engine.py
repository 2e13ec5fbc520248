"""ChatDLite over the real engine, with a tiny random model that calls tools."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from dlite_agent import ChatDLite, ConfigurationError, ContextLengthExceededError, Engine
from dlite_agent.testing import ScriptedEngine
from tests.tiny_checkpoint import write_checkpoint


@tool
def read_file(path: str, line: int = 0) -> str:
    """Read a text file."""
    return f"line {line} of {path}"


def _tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "description": name}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), max_positions=4096, seed=3
    )  # it calls tools in nearly every turn


@pytest.fixture
def model(folder: Path) -> Iterator[ChatDLite]:
    model = ChatDLite(
        str(folder), dtype="float64", temperature=0, max_tokens=120, max_kv_bytes=32 * 2**20
    )
    yield model
    Engine.shared(model._engine_config(model.model)).close()


def turn(message: BaseMessage) -> dict[str, Any]:
    stats: dict[str, Any] = message.response_metadata["dlite"]
    return stats


class Agent:
    """Calls the model and answers its calls, as an agent's loop does."""

    def __init__(self, model: ChatDLite, task: str) -> None:
        self._model = model.bind_tools([read_file])
        self.messages: list[BaseMessage] = [HumanMessage(task)]

    def step(self) -> AIMessage:
        answer = self._model.invoke(self.messages)
        results = [
            ToolMessage(read_file.invoke(call["args"]), tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
        results += [
            ToolMessage("cut off", tool_call_id=call["id"], status="error")
            for call in answer.invalid_tool_calls
        ]
        self.messages += [answer, *(results or [HumanMessage("Go on.")])]
        return answer


def test_stream_is_what_invoke_returns(model: ChatDLite) -> None:
    invoked = model.invoke("Look at it.")
    chunks = list(model.stream("Look at it."))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert streamed.content == invoked.content
    assert [call["args"] for call in streamed.tool_calls] == [c["args"] for c in invoked.tool_calls]
    assert turn(streamed)["prompt_hash"] == turn(invoked)["prompt_hash"]


def test_two_agents_without_ids_prefill_only_what_is_new(model: ChatDLite) -> None:
    agents = [Agent(model, "repair alpha"), Agent(model, "repair beta, please")]
    num_calls = 0
    for step in range(5):
        for agent in agents:
            answer = agent.step()
            num_calls += len(answer.tool_calls)
            if step and answer.tool_calls:
                stats = turn(answer)
                assert stats["prefilled_tokens"] <= stats["new_tokens"] + 1
                assert answer.usage_metadata is not None
                cached = answer.usage_metadata["input_token_details"]["cache_read"]
                assert cached == stats["cached_tokens"] > stats["new_tokens"]
    assert num_calls >= 4


def test_history_from_a_stream_is_spliced(model: ChatDLite) -> None:
    bound = model.bind_tools([read_file])
    chunks = list(bound.stream("Look at alpha."))
    answer = chunks[0]
    for chunk in chunks[1:]:
        answer += chunk
    result = [ToolMessage("42", tool_call_id=call["id"]) for call in answer.tool_calls]
    second = bound.invoke([HumanMessage("Look at alpha."), answer, *result, HumanMessage("Now?")])
    assert turn(second)["cached_tokens"] > 0


@pytest.mark.host
def test_agent_of_a_graph_stays_in_its_session(model: ChatDLite) -> None:
    agents = pytest.importorskip("langchain.agents")
    memory = pytest.importorskip("langgraph.checkpoint.memory")
    agent = agents.create_agent(model, [read_file], checkpointer=memory.InMemorySaver())
    config = {"configurable": {"thread_id": "one"}, "recursion_limit": 5}
    with contextlib.suppress(RecursionError):
        agent.invoke({"messages": [HumanMessage("Look.")]}, config)
    messages = agent.get_state(config).values["messages"]
    turns = [turn(message) for message in messages if isinstance(message, AIMessage)]
    assert len(turns) >= 2
    assert len({stats["session_id"] for stats in turns}) == 1
    for stats in turns[1:]:
        assert stats["prefilled_tokens"] == stats["new_tokens"] + 1
        assert set(stats["replayed"]) == {"generated"}


async def test_cancelled_turn_leaves_a_session_that_goes_on(model: ChatDLite) -> None:
    expected = await model.ainvoke("Look at it.")
    for _ in range(3):
        stream = model.astream("Look at it.")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(model.ainvoke("Look at it."))
        await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await model.ainvoke("Look at it.")).content == expected.content


def test_threads_get_what_each_gets_alone(model: ChatDLite) -> None:
    questions = [f"Look at {name}." for name in ("alpha", "beta", "gamma")]
    alone = [model.invoke(question).content for question in questions]
    together: dict[str, Any] = {}

    def ask(question: str) -> None:
        together[question] = model.invoke(question).content

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[question] for question in questions] == alone


def test_tokens_are_counted_as_they_are_rendered(model: ChatDLite) -> None:
    messages: list[BaseMessage] = [HumanMessage("Look at it.")]
    answer = model.invoke(messages)
    assert answer.usage_metadata is not None
    generation_prompt = len(b"<|im_start|>assistant\n") - len("<|im_start|>") + 1
    counted = model.get_num_tokens_from_messages(messages)
    assert counted == answer.usage_metadata["input_tokens"] - generation_prompt
    called = model.bind_tools([read_file]).invoke(messages)
    assert called.usage_metadata is not None
    counted = model.get_num_tokens_from_messages(messages, [read_file])
    assert counted == called.usage_metadata["input_tokens"] - generation_prompt


def test_a_forced_call_is_of_an_allowed_tool(model: ChatDLite) -> None:
    """A grammar decides; these weights would call `read_file` or nothing."""
    tools = [read_file, *(_tool(name) for name in ("stop", "begin", "wait"))]
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": name} for name in ("stop", "wait")],
    }
    for choice, names in (("any", None), ("begin", {"begin"}), (allowed, {"stop", "wait"})):
        forced = model.bind_tools(tools, tool_choice=choice, enable_thinking=False)
        answer = forced.invoke("Look at it.")
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        assert calls
        assert names is None or {call["name"] for call in calls} <= names


def test_prompt_that_does_not_fit_is_langchains_error_too(model: ChatDLite) -> None:
    from langchain_core.exceptions import ContextOverflowError

    for kind in (ContextLengthExceededError, ContextOverflowError):
        with pytest.raises(kind, match="the limit is 4096"):
            model.invoke("x" * 5000)


async def test_twenty_concurrent_calls_share_forwards(model: ChatDLite) -> None:
    bound = model.bind_tools([read_file])
    tasks = [[HumanMessage(f"sub-agent {number}, begin")] for number in range(20)]
    answers = await asyncio.gather(*(bound.ainvoke(task) for task in tasks))
    assert sum(turn(answer)["batch_size"] for answer in answers) / 20 > 2.0
    for task, answer in list(zip(tasks, answers, strict=True))[::5]:
        assert (await bound.ainvoke(task)).content == answer.content


def test_profile_has_what_fits_here_once_the_model_is_loaded(folder: Path) -> None:
    small = ChatDLite(str(folder), dtype="float64", max_tokens=8, max_kv_bytes=2**21)
    assert small.profile is not None
    declared = small.profile["max_input_tokens"]
    assert declared == 4096 - 8
    small.invoke("Hi.")
    fits = small.profile["max_input_tokens"]
    assert 0 < fits < declared
    prompt = small.get_num_tokens_from_messages([HumanMessage("")])
    generation_prompt = len(b"<|im_start|>assistant\n") - len("<|im_start|>") + 1
    room = fits - prompt - generation_prompt
    answer = small.invoke("x" * room)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == fits
    with pytest.raises(ContextLengthExceededError):
        small.invoke("x" * (room + 1))
    small._backend().close()


def test_profile_of_your_own_stays(model: ChatDLite) -> None:
    own = ChatDLite(engine=model._backend(), profile={"max_input_tokens": 7}, max_tokens=1)
    own.invoke("Hi.")
    assert own.profile == {"max_input_tokens": 7}


def test_memory_of_the_sessions_is_told(model: ChatDLite) -> None:
    assert model.cache_info().num_sessions == 0
    model.bind(history="as_generated").invoke("Look at it.")  # idle time has nothing to build
    usage = model.cache_info()
    assert usage.num_sessions == 1
    assert usage.kv_used_bytes > 0
    with pytest.raises(ConfigurationError, match="does not tell its memory"):
        ChatDLite(engine=ScriptedEngine([])).cache_info()
    with pytest.raises(ConfigurationError, match="the server's /metrics say what"):
        ChatDLite(base_url="http://127.0.0.1:9/v1").cache_info()


@pytest.mark.parametrize("mode", ["invoke", "stream"])
def test_the_last_miss_says_what_was_edited_and_what_it_cost(model: ChatDLite, mode: str) -> None:
    asked = model.bind(max_tokens=4, history="as_generated")
    assert model.explain_last_miss() is None
    history: list[BaseMessage] = [HumanMessage("Look at alpha, please, " * 9)]
    history += [asked.invoke(history), HumanMessage("And now?")]
    asked.invoke(history)
    history[0] = HumanMessage(str(history[0].content).replace("alpha", "omega", 1))
    again = getattr(asked, mode)(history)
    answer = again if mode == "invoke" else list(again)[-1]
    miss = model.explain_last_miss()
    assert miss is not None
    assert (miss.cause, miss.message_index) == ("message_edited", 0)
    assert "alpha" in miss.was
    assert "omega" in miss.now
    assert miss.tokens == turn(answer)["miss"]["tokens"] > 0
    assert miss.advice


def test_what_a_tool_prints_is_prefilled_before_it_ends(model: ChatDLite) -> None:
    agent = Agent(model, "repair alpha")
    while not (answer := agent.step()).tool_calls:
        pass
    before = agent.messages[:-1]
    printed = "collected 3 items\n" * 40
    part = ToolMessage(printed, tool_call_id=answer.tool_calls[0]["id"])
    model.feed([*before, part], tools=[read_file])
    whole = ToolMessage(printed + "1 failed\n", tool_call_id=answer.tool_calls[0]["id"])
    fed = model.bind_tools([read_file]).invoke([*before, whole])
    assert turn(fed)["fed_tokens"] > len(printed) - 20
    assert turn(fed)["prefilled_tokens"] < 60
