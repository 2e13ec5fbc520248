"""One thread that writes what others have prepared, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

__all__ = ["DiskWriter"]

logger = logging.getLogger(__name__)


class DiskWriter:
    """Runs jobs one after the other in a thread of its own. Thread-safe.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str = "dlite disk tier") -> None:
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._num_jobs = 0  # waiting or running
        self._num_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of the jobs that wait or run."""
        with self._changed:
            return self._num_bytes

    def put(self, job: Callable[[], None], num_bytes: int) -> None:
        """Queue a job; never blocks.

        Args:
            job: Handles its own errors.
            num_bytes: Memory that it holds until it is done.
        """
        with self._changed:
            assert not self._is_closed, "nothing is written after the end"
            self._jobs.append((job, num_bytes))
            self._num_jobs += 1
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all jobs are done."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_jobs == 0)

    def close(self) -> None:
        """Do what waits, and end. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job, num_bytes = self._jobs.popleft()
            try:
                job()
            except Exception:  # others wait for this thread
                logger.exception("a save failed")
            del job  # and the memory that it holds, before anybody is told that it is free
            with self._changed:
                self._num_jobs -= 1
                self._num_bytes -= num_bytes
                self._changed.notify_all()
