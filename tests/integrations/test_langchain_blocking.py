"""No call that blocks on an event loop, as `langgraph dev` checks: not even the first one.

Beside what blockbuster looks for by itself (files, sockets, sleeps), waiting for an item of a queue
is looked for.
"""

from __future__ import annotations

import _queue
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from langchain_core.exceptions import ModelTimeoutError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from dlite_agent import ChatDLite, Engine

blockbuster = pytest.importorskip("blockbuster")


@contextmanager
def armed() -> Iterator[None]:
    """Every blocking call on an event loop raises; locks do not count, most are held briefly."""
    detector = blockbuster.BlockBuster()
    functions = {k: f for k, f in detector.functions.items() if not k.startswith("threading.Lock")}
    functions["get"] = blockbuster.BlockBusterFunction(_queue.SimpleQueue, "get")
    detector.functions = functions
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
    with armed(), pytest.raises(blockbuster.BlockingError):
        ChatDLite("nano", drafter="null").get_num_tokens_from_messages([HumanMessage("Hi.")])
    Engine.close_all()


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
        assert ChatDLite("nano").bind(temperature=0)  # constructed in the loop
    assert answer.usage_metadata is not None
    assert counted > answer.usage_metadata["input_tokens"]
    assert model.profile is not None
    assert model.profile["max_input_tokens"] > 0


async def test_a_process_of_its_own_starts_beside_the_loop() -> None:
    model = ChatDLite("nano", isolation="process", timeout=0.2, max_tokens=1)
    with armed(), suppress(ModelTimeoutError):
        await model.ainvoke("Hi.")
    model._backend().close()
