"""One request's turns while they run: chunks as they come, however slowly somebody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.types import Receive

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.outputs import GenerationChunk

__all__ = ["ClientGoneError", "ServedTurn"]


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class ServedTurn:
    """Runs requests of one client in a task of its own, and hands out their chunks.

    The task never waits for the reader, so that the place that a turn takes is free when the turn
    ends. Must be closed, which cancels what still runs. An error of one request ends all.

    Args:
        backend: Runs them.
        requests: What was asked, at least one; each with the same number of choices. The choices of
            the second follow those of the first, and so on.
        on_chunk: Hears each chunk when it is there, and the number of its request.
        on_end: Called once when all is over, whatever became of it.
    """

    def __init__(
        self,
        backend: ChatBackend,
        requests: Sequence[ChatRequest],
        on_chunk: Callable[[int, GenerationChunk], None],
        on_end: Callable[[], None],
    ) -> None:
        self._requests = requests
        self._backend = backend
        self._on_chunk = on_chunk
        self._on_end = on_end
        self._events: asyncio.Queue[GenerationChunk | Exception | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        # Also of a task that was cancelled before it began.
        self._task.add_done_callback(lambda _: self._on_end())
        self._watcher: asyncio.Task[None] | None = None

    def watch(self, receive: Receive) -> None:
        """End as soon as the client is gone; the request's body must have been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    def fail(self, error: Exception) -> None:
        """Stop the turn; whoever reads gets the error after what was there before."""
        self._task.cancel()
        self._events.put_nowait(error)

    async def next(self, within_s: float | None = None) -> GenerationChunk | None:
        """The next chunk; None behind the last.

        Raises:
            TimeoutError: There is none yet.
            ClientGoneError: See `watch`.
            Exception: What ended the turn.
        """
        async with asyncio.timeout(within_s):
            event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def wait_for_first(self, within_s: float) -> None:
        """Return when the turn has begun to answer, or after that time.

        Raises:
            Exception: What ended the turn before it began.
        """
        try:
            first = await self.next(within_s)
        except TimeoutError:
            return
        rest: list[GenerationChunk | Exception | None] = [first]
        while not self._events.empty():
            rest.append(self._events.get_nowait())
        for event in rest:
            self._events.put_nowait(event)

    async def aclose(self) -> None:
        """Cancel the turn unless it is over, and wait until it is."""
        tasks = [task for task in (self._task, self._watcher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self._requests)):
                    group.create_task(self._pass_on(number))
        except* Exception as errors:  # noqa: BLE001  # the reader raises it
            self._events.put_nowait(errors.exceptions[0])
        else:
            self._events.put_nowait(None)

    async def _pass_on(self, number: int) -> None:
        request = self._requests[number]
        first = number * request.num_choices
        async for chunk in self._backend.astream(request):
            self._on_chunk(number, chunk)
            index = chunk.choice_index + first
            self._events.put_nowait(replace(chunk, choice_index=index) if first else chunk)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGoneError())
