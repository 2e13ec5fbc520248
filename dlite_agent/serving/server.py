"""Run the application with uvicorn, and end so that every stream ends cleanly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from dlite_agent.backend import ChatBackend
from dlite_agent.errors import ConfigurationError
from dlite_agent.serving.app import create_app
from dlite_agent.serving.service import ServingService
from dlite_agent.serving.settings import ServerSettings

__all__ = ["open_listener", "serve", "serving"]

# An agent's tool may take its time; a connection that is closed meanwhile costs a failed request.
_KEEP_ALIVE_S = 75
_CANCEL_S = 5.0  # for cancelled turns to end
_BACKLOG = 2048
_MAX_PORT = 65_535


def open_listener(host: str, port: int) -> socket.socket:
    """Listen; connections wait until the server answers.

    Args:
        host: An address or a name; with a colon an IPv6 address.
        port: 0 for any that is free.

    Raises:
        ConfigurationError: It cannot be had.
    """
    if not 0 <= port <= _MAX_PORT:
        raise ConfigurationError(f"port is {port!r}; use 0 to {_MAX_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"port {port!r} of {host!r} cannot be opened: {error}; name another --host or --port"
        ) from error


def serve(
    backend: ChatBackend,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; in the main thread only. The backend stays the caller's.

    On a signal nobody is let in any more, and the turns that run have `shutdown_timeout_s` to end;
    a second signal cancels them at once. What is cancelled ends with an error, and its stream with
    `[DONE]`.

    Args:
        backend: Answers; loaded when the server has begun.
        settings: How.
        listener: Owned from now on.
        on_ready: Called when the model is loaded.

    Raises:
        DLiteError: The model cannot be loaded.
    """
    server = _server(backend, settings)
    server.service.on_ready = on_ready
    server.run([listener])
    if server.service.load_error is not None:
        raise server.service.load_error


@contextmanager
def serving(
    backend: ChatBackend, settings: ServerSettings, listener: socket.socket
) -> Iterator[None]:
    """Serve in a thread until the block is left; signals stay the caller's.

    Turns that run at the end have `shutdown_timeout_s`. The backend stays the caller's.
    """
    server = _server(backend, settings)
    thread = threading.Thread(target=server.run, args=([listener],), name="dlite server")
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def _server(backend: ChatBackend, settings: ServerSettings) -> _Server:
    app = create_app(backend, settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s + _CANCEL_S),
    )
    return _Server(config, app.state.service)


class _Server(uvicorn.Server):
    """uvicorn's, whose signals begin a stop of ours and do not end the process by themselves."""

    def __init__(self, config: uvicorn.Config, service: ServingService) -> None:
        super().__init__(config)
        self.service = service
        service.on_load_error = self._leave

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's
        if self.should_exit:
            self.service.cancel_turns_soon()
        self._leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stop()
        await super().shutdown(sockets)

    def _leave(self) -> None:
        self.should_exit = True
