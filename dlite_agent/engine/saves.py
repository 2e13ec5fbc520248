"""Saves that are written behind the turns, each answered when it is on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from dlite_agent.engine.tasks import Answer, Failure, Finished, Later, Sink
from dlite_agent.sessions.disk_writer import DiskWriter
from dlite_agent.sessions.snapshot import KVSnapshot

__all__ = ["Saves"]


class Saves:
    """Used by the model's thread; another one writes, one save after the other."""

    def __init__(self) -> None:
        self._writer: DiskWriter | None = None
        self._lock = threading.Lock()
        self._held: list[KVSnapshot] = []  # what is being written, or waits for that
        self._written: list[KVSnapshot] = []

    def put(self, write: Callable[[], Answer], snapshot: KVSnapshot | None) -> Later:
        """Begin a save.

        Args:
            write: Called in the writer's thread; what it raises is the answer's failure.
            snapshot: What it reads; given back when it is done.
        """
        if snapshot is not None:
            self._held.append(snapshot)

        def begin(sink: Sink) -> None:
            if self._writer is None:
                self._writer = DiskWriter("dlite saves")
            self._writer.put(partial(self._run, write, snapshot, sink), 0)

        return Later(begin)

    def settle(self) -> bool:
        """Give back the pages of saves that are done; returns whether there were any."""
        with self._lock:
            written, self._written = self._written, []
        for snapshot in written:
            self._held.remove(snapshot)
            snapshot.release()
        return bool(written)

    def reclaim(self) -> bool:
        """The same, after waiting for all saves: somebody needs their pages."""
        if self._writer is not None and self._held:
            self._writer.flush()
        return self.settle()

    def close(self) -> None:
        """Write what waits, and end. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self.settle()

    # ---- below: the writer's thread ----------------------------------------------------------

    def _run(self, write: Callable[[], Answer], snapshot: KVSnapshot | None, sink: Sink) -> None:
        try:
            answer: Answer | Failure = write()
        except BaseException as error:  # noqa: BLE001  # it belongs to who asked for the save
            answer = Failure(error)
        if snapshot is not None:
            with self._lock:
                self._written.append(snapshot)
        sink(answer)
        if not isinstance(answer, Failure):
            sink(Finished())
