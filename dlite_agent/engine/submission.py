"""A stream's turns on their way to the host, and whether anybody reads what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from dlite_agent.backend import ChatRequest
from dlite_agent.engine.tasks import Event, Failure, Finished, Sink, Task
from dlite_agent.engine.turnstile import Turnstile
from dlite_agent.outputs import GenerationChunk

__all__ = ["ReaderWatch", "TurnReader", "submit_choices"]


class ReaderWatch:
    """Notices that a stream has had something to read for long, and nobody read it. Any thread.

    Args:
        limit_s: Seconds from when on a reader counts as away.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._num_unread = 0
        self._waits_since_s = 0.0  # that of the oldest unread event, or of the last read

    def note_event(self) -> bool:
        """Something more is there to be read; returns whether the reader is away."""
        with self._lock:
            now = time.perf_counter()
            is_away = self._num_unread > 0 and now - self._waits_since_s >= self._limit_s
            if not self._num_unread:
                self._waits_since_s = now
            self._num_unread += 1
            return is_away

    def note_read(self) -> None:
        """Some of it was read."""
        with self._lock:
            self._num_unread -= 1
            self._waits_since_s = time.perf_counter()


class TurnReader:
    """Reads the turns of one stream; leaving its block cancels those that run.

    Args:
        num_turns: How many were submitted.
        cancel: Cancels them.
        watch: Hears what is read.

    Attributes:
        num_running: How many have not ended.
    """

    def __init__(self, num_turns: int, cancel: Callable[[], None], watch: ReaderWatch) -> None:
        self.num_running = num_turns
        self._cancel = cancel
        self._watch = watch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._cancel()

    def read(self, choice_index: int, event: Event) -> Iterator[GenerationChunk]:
        """The chunk of an event; none of the one that ends a turn.

        Raises:
            BaseException: What the turn failed with.
        """
        self._watch.note_read()
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, Finished):
            self.num_running -= 1
            return
        assert isinstance(event, GenerationChunk)
        yield replace(event, choice_index=choice_index) if choice_index else event


def submit_choices(
    submit: Callable[[Task, Sink], Callable[[], None]],
    choices: Sequence[ChatRequest],
    turnstile: Turnstile,
    sink: Callable[[int, Event], None],
    watch: ReaderWatch,
) -> Callable[[], None]:
    """Submit all or none; the sink gets each event with its choice's number.

    A choice gives its place in the turnstile back when its turn ends, read or not, or is cancelled.

    Returns:
        What cancels all of them.
    """
    cancels: list[Callable[[], None]] = []
    inside = set(range(len(choices)))
    lock = threading.RLock()  # a collected iterator may cancel from any frame

    def leave(indices: Iterable[int]) -> None:
        with lock:
            leaving = inside.intersection(indices)
            inside.difference_update(leaving)
        if leaving:
            turnstile.leave(len(leaving))

    def deliver(index: int, event: Event) -> bool:
        if isinstance(event, Finished | Failure):
            leave([index])
        sink(index, event)
        return watch.note_event()

    def cancel_all() -> None:
        for cancel in cancels:
            cancel()
        leave(range(len(choices)))

    try:
        for index, choice in enumerate(choices):
            cancels.append(submit(choice, partial(deliver, index)))
    except BaseException:
        cancel_all()
        raise
    return cancel_all
