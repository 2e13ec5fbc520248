"""A real server on a free port of the loopback interface, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from dlite_agent.backend import ChatBackend
from dlite_agent.serving.app import create_app
from dlite_agent.serving.service import ServingService
from dlite_agent.serving.settings import ServerSettings

LIMIT_S = 60.0


@dataclass(frozen=True)
class LiveServer:
    """What a test needs of a server that runs.

    Attributes:
        url: Without a slash at the end, e.g. `http://127.0.0.1:41231`.
        backend: What it serves.
        service: Its state; belongs to its event loop.
    """

    url: str
    backend: ChatBackend
    service: ServingService

    def stop(self) -> None:
        """Begin a stop as a signal does; connections that are open stay so."""
        assert self.service.loop is not None
        self.service.loop.call_soon_threadsafe(self.service.stop)

    @property
    def base_url(self) -> str:
        """For clients that want OpenAI's."""
        return f"{self.url}/v1"


@contextmanager
def live_server(
    backend: ChatBackend, settings: ServerSettings | None = None
) -> Iterator[LiveServer]:
    """Serve a backend, which is not closed, and stop at the end."""
    app = create_app(backend, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    # Kept alive for longer than clients keep a connection: none is closed while it is used again.
    config = uvicorn.Config(
        app, log_config=None, timeout_keep_alive=75, timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="live server")
    thread.start()
    try:
        port = listener.getsockname()[1]  # connections wait in the listener until it answers
        yield LiveServer(f"http://127.0.0.1:{port}", backend, app.state.service)
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "the server did not stop"
