"""Server-sent events: the answer of a request that streams."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "KEEP_ALIVE", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event. ASCII only: clients split lines at characters that JSON lets stand as they are."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends its headers at once, and then each event when it is there.

    Args:
        events: Closed at the end, whatever that is.
        on_end: Awaited then, also where no event was ever asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_end: Callable[[], Awaitable[None]]
    ) -> None:
        # The second is for nginx, which would collect the whole answer.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer; an ASGI application."""
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
            await self._on_end()
