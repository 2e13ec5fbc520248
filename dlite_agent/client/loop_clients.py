"""One `httpx.AsyncClient` for each event loop, closed in its loop without being told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable

import httpx

__all__ = ["LoopClients"]


class LoopClients:
    """Clients that keep their connections from one turn to the next. Of any thread.

    A client belongs to the loop that it was made in, and can only be closed there. So each is held
    by an async generator that waits: asyncio closes what is left of those when a loop ends, and
    also one that is dropped.

    Args:
        make: Makes a client.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._held: dict[asyncio.AbstractEventLoop, _Held] = {}

    async def of_this_loop(self) -> httpx.AsyncClient:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            held = self._held.get(loop)
            if held is None or held.client.is_closed:
                for other in [other for other in self._held if other.is_closed()]:
                    del self._held[other]
                held = self._held[loop] = _Held(self._make())
        await held.begin()
        return held.client

    def drop(self) -> None:
        """Close all of them, each when its loop runs."""
        with self._lock:
            self._held.clear()


class _Held:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self._holder = _hold(client)
        self._has_begun = False

    async def begin(self) -> None:
        """Let the loop know of the generator."""
        if not self._has_begun:
            self._has_begun = True
            await anext(self._holder)


async def _hold(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
