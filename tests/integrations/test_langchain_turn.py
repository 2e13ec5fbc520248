"""`timeout`: nobody waits longer than that, and what is given up is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core import exceptions as core

from dlite_agent import ChatDLite, ChatRequest, GenerationChunk, UnsupportedParameterError
from dlite_agent.testing import ScriptedEngine

NEVER_S = 3600.0


def engine_of(model: ChatDLite) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


def slow(**options: Any) -> ChatDLite:
    """A round of it does not end while a test waits."""
    return ChatDLite(engine=ScriptedEngine(["An answer."], round_s=NEVER_S), **options)


async def drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


WAYS: dict[str, Callable[..., Any]] = {
    "invoke": lambda model, **kwargs: model.invoke("?", **kwargs),
    "stream": lambda model, **kwargs: list(model.stream("?", **kwargs)),
}
ASYNC_WAYS: dict[str, Callable[..., Any]] = {
    "ainvoke": lambda model, **kwargs: model.ainvoke("?", **kwargs),
    "astream": lambda model, **kwargs: drain(model.astream("?", **kwargs)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["model", "call"])
def test_a_turn_that_takes_longer_is_cancelled(way: str, where: str) -> None:
    model = slow(timeout=0.01) if where == "model" else slow()
    with pytest.raises(core.ModelTimeoutError, match=r"within timeout=0.01 s") as raised:
        WAYS[way](model, **({} if where == "model" else {"timeout": 0.01}))
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.is_retryable
    assert engine_of(model).num_cancelled == 1


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_turn_of_asyncio_that_takes_longer_is_cancelled(way: str) -> None:
    model = slow(timeout=0.01)
    with pytest.raises(core.ModelTimeoutError):
        await ASYNC_WAYS[way](model)
    assert engine_of(model).num_cancelled == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_turn_that_is_quick_enough_is_as_without_a_timeout(way: str) -> None:
    plain, bounded = (
        WAYS[way](ChatDLite(engine=ScriptedEngine(["An answer."]), timeout=timeout))
        for timeout in (None, 60.0)
    )
    first, second = (answer if way == "stream" else [answer] for answer in (plain, bounded))
    assert [m.content for m in first] == [m.content for m in second]
    assert first[-1].response_metadata == second[-1].response_metadata


class Stalls(ScriptedEngine):
    """Its streams stop behind the first chunk, for good."""

    def __init__(self) -> None:
        super().__init__(["An answer."])
        self.was_closed = threading.Event()

    async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
        try:
            async with aclosing(super().astream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    await asyncio.Event().wait()
        finally:
            self.was_closed.set()


def test_leaving_a_stream_with_a_timeout_ends_the_turn() -> None:
    engine = Stalls()
    stream = ChatDLite(engine=engine, timeout=60.0).stream("?")
    assert next(stream).content
    stream.close()  # type: ignore[attr-defined]
    assert engine.was_closed.wait(60)


def test_a_stream_that_stalls_is_given_up() -> None:
    engine = Stalls()
    chunks = []
    with pytest.raises(core.ModelTimeoutError, match="gave no chunk"):
        chunks.extend(ChatDLite(engine=engine, timeout=0.05).stream("?"))
    assert engine.was_closed.wait(60)


@pytest.mark.parametrize("timeout", [0, -1.0, True, "10"])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    model = ChatDLite(engine=ScriptedEngine(["a"]))
    with pytest.raises(UnsupportedParameterError, match=r"timeout is .*; use a number of seconds"):
        model.invoke("?", timeout=timeout)
    if timeout in (0, -1.0):  # pydantic makes numbers of the others
        with pytest.raises(UnsupportedParameterError):
            ChatDLite(timeout=timeout)
