"""What all endpoints share: the backend, who is let in, and how a stop ends what runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.requests import Request

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.config import SamplingParams
from dlite_agent.outputs import GenerationChunk
from dlite_agent.serving.caller import check_key, tenant_of
from dlite_agent.serving.http_errors import StatusError
from dlite_agent.serving.json_body import parse_json, read_body
from dlite_agent.serving.last_turns import LastTurns
from dlite_agent.serving.metrics import ServerMetrics
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.serving.turn import ServedTurn

__all__ = ["ServingService"]

_RETRY_AFTER_S = 1
_SMALL_BYTES = 16 * 1024  # up to here, to start a thread costs more than it saves
T = TypeVar("T")
Build = Callable[[dict[str, Any], str], T]
"""Makes something of a body and of the tenant whose it is; called in any thread."""


class ServingService:
    """One server's state; used in its event loop only.

    Attributes:
        max_context: Most tokens of prompt and answer; None until the model is loaded.
        load_error: Why it cannot be loaded.
        last_turns: What `explain` tells.
        metrics: What `/metrics` tells.
        created_at: When the server began, in Unix seconds.
    """

    def __init__(self, backend: ChatBackend, settings: ServerSettings) -> None:
        self.backend = backend
        self.settings = settings
        self.max_context: int | None = None
        self.load_error: Exception | None = None
        self.created_at = int(datetime.now(UTC).timestamp())
        self.is_stopping = False
        self.on_load_error: Callable[[], None] = lambda: None
        """Called when the model cannot be loaded."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when it is loaded."""
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last_turns = LastTurns()
        self.metrics = ServerMetrics(
            settings.metrics_prefix,
            self.model_names[0],
            lambda: self.num_running,
            lambda: self.num_waiting,
        )
        self._turns: set[ServedTurn] = set()
        self._num_inside = 0

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.settings.model_names or (self.backend.model_name,)

    @property
    def num_running(self) -> int:
        """Turns that run."""
        return min(self._num_inside, self.settings.max_running)

    @property
    def num_waiting(self) -> int:
        """Turns that wait for one of those to end."""
        return self._num_inside - self.num_running

    def start_loading(self) -> None:
        """Load the model in a thread, which nobody waits for at the end."""
        self.loop = asyncio.get_running_loop()
        threading.Thread(target=self._load, name="dlite loading", daemon=True).start()

    def check_ready(self) -> int:
        """The context size of a model that is loaded.

        Raises:
            StatusError: 503; it is not yet, or the server stops. 500; it cannot be.
        """
        if self.is_stopping:
            message = "the server is shutting down; send the request to another one"
            raise StatusError(503, message, "shutting_down", retry_after_s=_RETRY_AFTER_S)
        if self.load_error is not None:
            raise StatusError(500, f"the model cannot be loaded: {self.load_error}", "load_failed")
        if self.max_context is None:
            message = f"the model {self.model_names[0]!r} is loading; try again soon"
            raise StatusError(503, message, "loading", retry_after_s=_RETRY_AFTER_S)
        return self.max_context

    async def read(self, http: Request, build: Build[T]) -> T:
        """What a request's body means; a wrong key is told before the body is read.

        Large bodies are looked at in a thread, so that the event loop serves others meanwhile.

        Raises:
            StatusError: See `check_key`, `read_body` and `parse_json`.
            Exception: What `build` raises.
        """
        check_key(http.headers, self.settings)
        data = await read_body(http, self.settings.max_body_bytes)

        def built() -> T:
            given = parse_json(data)
            return build(given, tenant_of(http.headers, given, self.settings))

        return built() if len(data) <= _SMALL_BYTES else await asyncio.to_thread(built)

    def served_name(self, asked: str | None) -> str:
        """The name to report for a model that was asked for; none is the first.

        Raises:
            StatusError: 404; it is another model.
        """
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"The model {asked!r} does not exist; this server has {known}"
            raise StatusError(404, message, "model_not_found", param="model")
        return asked

    def start(self, requests: Sequence[ChatRequest]) -> ServedTurn:
        """Run what one client asks for; the turn must be closed.

        Raises:
            StatusError: 429; too many wait already. 503; see `check_ready`.
        """
        self.check_ready()
        settings = self.settings
        limit = settings.max_running + settings.max_queue
        num_left = sum(request.num_choices for request in requests)
        # A request with many choices is let in where nobody is, as it could never be else.
        if self._num_inside and self._num_inside + num_left > limit:
            raise StatusError(
                429,
                f"{self.num_running} turns run and {self.num_waiting} wait; try again later, send "
                "fewer at a time, or start the server with a larger --max-queue",
                "queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_inside += num_left
        if settings.sampling_defaults is not None:
            requests = [_completed(request, settings.sampling_defaults) for request in requests]

        def note(number: int, chunk: GenerationChunk) -> None:
            nonlocal num_left
            if chunk.generation is not None:
                num_left -= 1
                self._num_inside -= 1
                self.metrics.note(chunk.generation)
                self.last_turns.note(requests[number], chunk.generation)

        def leave() -> None:
            self._num_inside -= num_left
            self._turns.discard(turn)
            for _ in range(0 if requests[0].is_partial else num_left):
                self.metrics.note_failure()

        turn = ServedTurn(self.backend, requests, note, leave)
        self._turns.add(turn)
        return turn

    def stop(self) -> None:
        """Let nobody in any more, and cancel what still runs when its time is over."""
        self.is_stopping = True
        loop = asyncio.get_running_loop()
        loop.call_later(self.settings.shutdown_timeout_s, self._cancel_turns)

    def cancel_turns_soon(self) -> None:
        """End all turns with an error; from any thread, and from a signal's handler."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._cancel_turns)

    def _cancel_turns(self) -> None:
        for turn in tuple(self._turns):
            turn.fail(StatusError(503, "the server was stopped during this turn", "shutting_down"))

    def _load(self) -> None:
        """In the loading thread."""
        error = max_context = None
        try:
            max_context = self.backend.max_context
        except Exception as raised:  # noqa: BLE001  # who started the server raises it
            error = raised
        assert self.loop is not None
        with suppress(RuntimeError):  # the server ended meanwhile
            self.loop.call_soon_threadsafe(self._note_loaded, max_context, error)

    def _note_loaded(self, max_context: int | None, error: Exception | None) -> None:
        self.max_context, self.load_error = max_context, error
        if error is not None:
            self.on_load_error()
        else:
            self.on_ready()


def _completed(request: ChatRequest, defaults: SamplingParams) -> ChatRequest:
    """A request with what it leaves open, and with further ids that end its turn."""
    sampling = request.sampling.with_defaults(defaults)
    ends = (*sampling.stop_token_ids, *defaults.stop_token_ids)
    return replace(request, sampling=replace(sampling, stop_token_ids=ends))
