"""Reads an async iterator from code that is not async."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Final, TypeVar

__all__ = ["iterate"]

T = TypeVar("T")


class _End:
    """Behind the last item."""


_END: Final = _End()


def iterate(source: AsyncGenerator[T, None]) -> Iterator[T]:
    """Run an async generator in a thread and loop of its own, and yield its items.

    A thread, since the caller's may have a running loop (a notebook's). Whoever waits here can be
    interrupted, and closing this iterator cancels the source at once, wherever it waits.

    Raises:
        Exception: What the source raises.
    """
    items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()

    async def pump() -> None:
        async with aclosing(source):
            async for item in source:
                items.put(item)

    loop = asyncio.new_event_loop()
    task = loop.create_task(pump())

    def run() -> None:
        loop.run_until_complete(asyncio.wait([task]))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        items.put(_END)

    threading.Thread(target=run, name="dlite-reader", daemon=True).start()
    try:
        while not isinstance(item := items.get(), _End):
            yield item
        if (error := task.exception()) is not None:
            raise error
    finally:
        with suppress(RuntimeError):  # the loop is closed: the source has ended
            loop.call_soon_threadsafe(task.cancel)
