"""No call that blocks on an event loop, as `langgraph dev` checks: not even the first one.

Beside what blockbuster looks for by itself (files, sockets, sleeps, locks that somebody holds),
which is more than `langgraph dev` arms, waiting for an item of a queue is looked for.
"""

from __future__ import annotations

import _queue
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from langchain_core.exceptions import ModelTimeoutError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from dlite_agent import ChatDLite, Engine, EngineConfig, Message
from dlite_agent.engine.tasks import Progress, Service
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

blockbuster = pytest.importorskip("blockbuster")


@contextmanager
def armed() -> Iterator[None]:
    """Every blocking call on an event loop raises."""
    detector = blockbuster.BlockBuster()
    detector.functions["get"] = blockbuster.BlockBusterFunction(_queue.SimpleQueue, "get")
    detector.activate()
    try:
        yield
    finally:
        detector.deactivate()


class Finding(BaseModel):
    """What is wrong."""

    is_bug: bool


@tool
async def run_tests() -> str:
    """Run the tests."""
    return "1 failed"


@pytest.fixture
async def model() -> AsyncIterator[ChatDLite]:
    """Not loaded yet, and not constructed where it could be noticed."""
    Engine.close_all()
    yield ChatDLite("nano", drafter="null", temperature=0, max_tokens=12, enable_thinking=False)
    Engine.close_all()


async def test_the_detector_detects() -> None:
    is_over = threading.Event()

    def loads_for_ever(config: EngineConfig, progress: Progress) -> Service:
        is_over.wait()
        raise RuntimeError("it was not to load")

    with Engine("nano", loader=loads_for_ever) as engine:
        model = ChatDLite(engine=engine)
        for call in (
            lambda: model.get_num_tokens_from_messages([HumanMessage("Hi.")]),
            lambda: model.invoke("Hi."),
            model.cache_info,
            is_over.wait,
        ):
            with armed(), pytest.raises(blockbuster.BlockingError):
                call()
        is_over.set()


@pytest.mark.host
async def test_no_call_blocks_the_loop_not_even_while_the_model_loads(model: ChatDLite) -> None:
    agents = pytest.importorskip("langchain.agents")
    memory = pytest.importorskip("langgraph.checkpoint.memory")
    agent = agents.create_agent(model, [run_tests], checkpointer=memory.InMemorySaver())
    config: Any = {"configurable": {"thread_id": "one"}}
    with armed():
        answer = await model.ainvoke("Hi.")
        assert [chunk async for chunk in model.astream("Hi.")][-1].usage_metadata
        counted = await model.aget_num_tokens_from_messages([HumanMessage("Hi.")], [run_tests])
        assert await model.bind_tools([run_tests], tool_choice="any").ainvoke("Hi.")
        assert await model.with_structured_output(Finding).ainvoke("Hi.") is not None
        state = await agent.ainvoke({"messages": [HumanMessage("Hi.")]}, config)
        assert [part async for part in agent.astream(state, config, stream_mode="messages")]
        assert len(await model.abatch(["Hi."] * 20)) == 20
        assert (await model.acache_info()).num_sessions > 0
        assert ChatDLite("nano").bind(temperature=0)  # constructed in the loop
        assert model.explain_last_miss() is not None
    assert answer.usage_metadata is not None
    assert counted > answer.usage_metadata["input_tokens"]
    assert model.profile is not None
    assert model.profile["max_input_tokens"] > 0


async def test_what_a_tool_prints_is_fed_beside_the_loop(model: ChatDLite) -> None:
    call = AIMessage("", tool_calls=[{"name": "run_tests", "args": {}, "id": "1"}])
    asked = [HumanMessage("Do the tests pass?"), call]
    printed = "test_add FAILED\n" * 20
    bound = model.bind_tools([run_tests])
    with armed():
        await model.afeed([*asked, ToolMessage(printed, tool_call_id="1")], tools=[run_tests])
        answer = await bound.ainvoke([*asked, ToolMessage(f"{printed}1 failed", tool_call_id="1")])
    stats = answer.response_metadata["dlite"]
    assert stats["fed_tokens"] > 0
    assert stats["cached_tokens"] >= stats["fed_tokens"]


async def test_a_conversation_of_its_own_never_blocks_the_loop(model: ChatDLite) -> None:
    with armed():
        session = model.session("main")
        first = await session.aturn(Message("user", "Hi."))
        branch = session.fork()
        await branch.aregenerate()
        assert [chunk async for chunk in session.astream(Message("user", "And?"))][-1].generation
    assert [message.role for message in session.messages] == ["user", "assistant"] * 2
    assert session.messages[1].content == first.message.content
    assert len(branch.messages) == 2


@pytest.mark.parametrize("name", ["nano", "served"])
async def test_a_server_is_asked_beside_the_loop(name: str) -> None:
    call = '<tool_call>\n{"name": "run_tests", "arguments": {}}\n</tool_call>'
    backend = ScriptedEngine([call, "One.", "Two."])
    with live_server(backend, ServerSettings(model_names=("served",))) as server:
        model = ChatDLite(name, base_url=server.base_url)
        with armed():
            chunks = [chunk async for chunk in model.bind_tools([run_tests]).astream("Hi.")]
            answer = await model.ainvoke("Hi.")
            again = await model.session().aturn(Message("user", "Hi."))
    assert chunks[-1].response_metadata["model_name"] == "served"
    assert answer.content == "One."
    assert again.message.content == "Two."
    assert model.profile is not None
    assert model.profile["max_output_tokens"] == backend.max_context


async def test_a_process_of_its_own_starts_beside_the_loop() -> None:
    model = ChatDLite("nano", isolation="process", timeout=0.2, max_tokens=1)
    with armed(), suppress(ModelTimeoutError):
        await model.ainvoke("Hi.")
    model._backend().close()
