"""Messages between two processes of our own, over a pipe.

A receiver acknowledges what it has handled, and only then the next batch is sent. What was sent
meanwhile travels together, so a receiver whose interpreter is busy gets fewer, larger batches
instead of falling behind: each batch costs it a few waits for the interpreter lock, whatever is in
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

__all__ = ["Channel"]

_POLL_S = 2.0


class Channel:
    """One end of a pipe. `send` may be called by any thread; `receive` by one.

    The objects are pickled by `multiprocessing`, which is sound here and only here: both ends are
    the same installation, one started the other, and nobody else holds the pipe.

    Args:
        connection: Owned from now on.
        name: Names the writing thread.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._outbox: list[bytes] = []
        self._is_unacknowledged = False
        self._must_acknowledge = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write, name=f"{name} writer", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """Queue a message; never blocks. Dropped when the other end is gone.

        Raises:
            Exception: What pickling raises for an object that cannot cross.
        """
        packed = bytes(ForkingPickler.dumps(message))
        with self._changed:
            self._outbox.append(packed)
            self._changed.notify_all()

    def receive(
        self, handle: Callable[[object], None], is_orphan: Callable[[], bool] = lambda: False
    ) -> None:
        """Handle messages until the other end is gone or `close` is called.

        Args:
            handle: Called with each message, in this thread.
            is_orphan: Asked every 2 s; True ends this as well.
        """
        try:
            while not self._is_closed:
                if not self._connection.poll(_POLL_S):
                    if is_orphan():
                        return
                    continue
                is_acknowledged, messages = self._connection.recv()
                for packed in messages:
                    handle(ForkingPickler.loads(packed))
                with self._changed:
                    self._is_unacknowledged &= not is_acknowledged
                    self._must_acknowledge |= bool(messages)
                    self._changed.notify_all()
        except (EOFError, OSError):
            return  # the other end closed or died; the caller knows what that means

    def close(self) -> None:
        """Close this end; what was not sent yet is dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_closed:
                    break
                messages: list[bytes] = []
                if not self._is_unacknowledged:
                    messages, self._outbox = self._outbox, messages
                acknowledge, self._must_acknowledge = self._must_acknowledge, False
                self._is_unacknowledged |= bool(messages)
            try:
                self._connection.send((acknowledge, messages))
            except OSError:
                break  # `receive` sees the end as well
        self._connection.close()

    def _has_work(self) -> bool:
        return (
            self._is_closed
            or self._must_acknowledge
            or (bool(self._outbox) and not self._is_unacknowledged)
        )
