"""A saved session on its way back: its rows are written straight into the pages of a new cache.

Segments are read and verified by threads, each segment by one of them: digests take most of the
time, and Python lets them run side by side. Nothing is copied in between, and nothing counts before
it is verified: the rows are tentative until then.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.kv_rows import append_rows
from dlite_agent.models.spans import RunViews
from dlite_agent.sessions.manifest import Manifest
from dlite_agent.sessions.segments import Segment, SegmentShape, read_segment

__all__ = ["SavedInMemory", "SavedOnDisk", "SavedSession"]

_NUM_READERS = 2


class SavedSession(ABC):
    """A saved session and its KV, which is fetched into an empty cache. Used by one thread.

    Args:
        manifest: What was saved.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.problem = ""
        """Why the KV ends before the rows that were asked for; empty when nothing is wrong."""
        self.num_bytes = 0
        """Fetched and verified so far."""
        self.read_s = 0.0
        """Seconds that it took."""

    @property
    def token_ids(self) -> array[int]:
        """All ids."""
        return self.manifest.token_ids

    @property
    def is_ready(self) -> bool:
        """Whether `finish` would not wait."""
        return True

    @abstractmethod
    def start(self, kv: KVCache, num_rows: int) -> None:
        """Begin to write the first `num_rows` rows to an empty cache, which nobody touches then.

        Raises:
            CapacityError: The pool has too few free pages.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait, and commit the rows that are verified, from the first one on."""

    @abstractmethod
    def close(self) -> None:
        """Write no more rows; returns when nobody does. Idempotent."""


class SavedInMemory(SavedSession):
    """One whose rows are in host memory.

    Args:
        manifest: What was saved.
        blocks: Rows [L, 2, K, n, D], in order.
    """

    def __init__(self, manifest: Manifest, blocks: Sequence[Tensor]) -> None:
        super().__init__(manifest)
        self._blocks = blocks

    def start(self, kv: KVCache, num_rows: int) -> None:
        """See `SavedSession.start`; writes everything at once."""
        began_s = time.perf_counter()
        for block in self._blocks:
            if rest := num_rows - kv.length:
                rows = block[:, :, :, :rest]
                append_rows(kv, rows)
                self.num_bytes += rows.nbytes
        self.read_s = time.perf_counter() - began_s

    def finish(self) -> None:
        """See `SavedSession.finish`: nothing is left to do."""

    def close(self) -> None:
        """See `SavedSession.close`: nobody does."""


class SavedOnDisk(SavedSession):
    """One whose rows are in the segments of a folder.

    Args:
        manifest: What was saved.
        folder: Where.
        shape: Of the rows.
    """

    def __init__(self, manifest: Manifest, folder: Path, shape: SegmentShape) -> None:
        super().__init__(manifest)
        self._folder = folder
        self._shape = shape
        self._kv: KVCache | None = None
        self._num_rows = 0
        self._changed = threading.Condition()
        self._jobs: Iterator[tuple[Segment, list[RunViews]]] = iter(())
        self._problems: dict[int, str] = {}  # by first row of the segment
        self._num_readers = 0
        self._is_stopped = False
        self._began_s = 0.0

    @property
    def is_ready(self) -> bool:
        """See `SavedSession.is_ready`."""
        with self._changed:
            return self._num_readers == 0

    def start(self, kv: KVCache, num_rows: int) -> None:
        """See `SavedSession.start`."""
        num_rows = min(num_rows, self.manifest.num_stored)
        if num_rows:
            kv.reserve(num_rows)
        self._kv, self._num_rows = kv, num_rows
        self._began_s = time.perf_counter()
        wanted = [segment for segment in self.manifest.segments if segment.start < num_rows]
        # Views are made here: the cache belongs to this thread.
        places = [
            [kv.pool.views(*run) for run in kv.runs(segment.start, min(segment.end, num_rows))]
            for segment in wanted
        ]
        self._jobs = iter(list(zip(wanted, places, strict=True)))
        self._num_readers = min(_NUM_READERS, len(wanted))
        for _ in range(self._num_readers):
            threading.Thread(target=self._read, name="dlite restore", daemon=True).start()

    def finish(self) -> None:
        """See `SavedSession.finish`."""
        self._wait()
        kv, self._kv = self._kv, None
        if kv is None or self._is_stopped:
            return
        num_whole = min(self._problems, default=self._num_rows)
        self.problem = self._problems.get(num_whole, "")
        kv.commit(num_whole)

    def close(self) -> None:
        """See `SavedSession.close`."""
        with self._changed:
            self._is_stopped = True
        self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_readers == 0)

    # ---- below: the readers' threads ---------------------------------------------------------

    def _must_stop(self) -> bool:
        return self._is_stopped

    def _read(self) -> None:
        try:
            while job := self._next_job():
                self._read_segment(*job)
        finally:
            with self._changed:
                self._num_readers -= 1
                self.read_s = time.perf_counter() - self._began_s
                self._changed.notify_all()

    def _read_segment(self, segment: Segment, places: Sequence[RunViews]) -> None:
        problem = "it was not read to its end"
        try:
            shape, ids = self._shape, self.token_ids
            if read_segment(self._folder, segment, shape, ids, places, self._must_stop):
                problem = ""
        except (OSError, ValueError, MemoryError) as error:
            problem = str(error) or type(error).__name__
        finally:
            with self._changed:
                if problem:
                    self._problems[segment.start] = problem
                else:
                    self.num_bytes += segment.num_rows * self._shape.row_bytes

    def _next_job(self) -> tuple[Segment, list[RunViews]] | None:
        with self._changed:
            return None if self._is_stopped or self._problems else next(self._jobs, None)
