"""A place in the queue for whoever would rather wait than be refused."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Turnstile"]


@dataclass(slots=True, eq=False)
class _Waiter:
    count: int
    let_in: Callable[[], None]


class Turnstile:
    """Counts who is inside, and lets others in, in order, as there is room. Any thread.

    Args:
        limit: Most that waiters fill; who enters without waiting may exceed it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_inside = 0
        self._waiting: deque[_Waiter] = deque()
        # Re-entrant: a collected iterator may leave from any frame.
        self._lock = threading.RLock()

    def enter(self, count: int, *, waits: bool) -> None:
        """Go in with `count`; block until there is room, or go in anyhow."""
        is_free = threading.Event()
        waiter = self._arrive(count, is_free.set, waits=waits)
        if waiter is None:
            return
        try:
            is_free.wait()
        except BaseException:
            self._give_up(waiter)
            raise

    async def aenter(self, count: int, *, waits: bool) -> None:
        """`enter` for asyncio."""
        loop = asyncio.get_running_loop()
        is_free: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not is_free.done():
                is_free.set_result(None)

        waiter = self._arrive(count, lambda: _call(loop, wake), waits=waits)
        if waiter is None:
            return
        try:
            await is_free
        except BaseException:
            self._give_up(waiter)
            raise

    def leave(self, count: int) -> None:
        """Go out with `count`, and let in who fits now."""
        with self._lock:
            self._num_inside -= count
            self._admit()

    def _arrive(self, count: int, let_in: Callable[[], None], *, waits: bool) -> _Waiter | None:
        with self._lock:
            if not waits or (not self._waiting and self._fits(count)):
                self._num_inside += count
                return None
            waiter = _Waiter(count, let_in)
            self._waiting.append(waiter)
            return waiter

    def _give_up(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:  # let in just now
                self._num_inside -= waiter.count
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0].count):
            waiter = self._waiting.popleft()
            self._num_inside += waiter.count
            waiter.let_in()

    def _fits(self, count: int) -> bool:
        """One that is larger than the limit goes in alone."""
        return not self._num_inside or self._num_inside + count <= self._limit


def _call(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
        loop.call_soon_threadsafe(wake)
