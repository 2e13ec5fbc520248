"""A long request is submitted beside the event loop, and is not left when its caller is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.engine.submit_beside import submitted

SHORT = ChatRequest((Message("user", "Hi."),))
LONG = ChatRequest((Message("user", "Hi."),) * 65)


@pytest.mark.parametrize("request_", [SHORT, LONG])
async def test_only_a_long_request_leaves_the_loops_thread(request_: ChatRequest) -> None:
    threads = []
    cancelled = []

    def submit() -> object:
        threads.append(threading.current_thread())
        return lambda: cancelled.append(True)

    cancel = await submitted(request_, submit)  # type: ignore[arg-type]  # as a lambda's is
    assert (threads == [threading.current_thread()]) is (request_ is SHORT)
    cancel()
    assert cancelled == [True]


async def test_what_is_submitted_for_nobody_is_cancelled() -> None:
    began, may_end = threading.Event(), threading.Event()
    cancelled = asyncio.Event()
    loop = asyncio.get_running_loop()

    def submit() -> object:
        began.set()
        assert may_end.wait(60)
        return lambda: loop.call_soon_threadsafe(cancelled.set)

    task = asyncio.create_task(submitted(LONG, submit))  # type: ignore[arg-type]  # as above
    await asyncio.to_thread(began.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    await cancelled.wait()


async def test_what_submitting_raises_is_raised() -> None:
    def submit() -> object:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        await submitted(LONG, submit)  # type: ignore[arg-type]  # as above
