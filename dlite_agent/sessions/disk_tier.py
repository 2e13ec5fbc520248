"""Sessions on disk: written behind the turns by a thread, found again by the next process.

The thread that owns the model copies what is new of a session and goes on; another one writes. Both
agree in advance on which rows each segment will have, so that nobody waits for a digest. One
process at a time owns a folder.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from dlite_agent.errors import CheckpointError
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.atomic_file import FolderLock, explained, make_folder
from dlite_agent.sessions.checkpoint import (
    SavedSession,
    open_checkpoint,
    segment_shape,
    write_checkpoint,
)
from dlite_agent.sessions.kept import KeptSession, longest_kept, now_s
from dlite_agent.sessions.manifest import MANIFEST, Manifest, ModelKey, read_manifest
from dlite_agent.sessions.segments import Segment, plan_segments
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["DiskTier", "model_folder"]

logger = logging.getLogger(__name__)

# KV that waits to be written. A disk that is slower than the turns makes saves rarer and not the
# memory larger: what was left out is saved with a later turn, or when the engine is closed.
_MAX_BACKLOG_BYTES = 2**30


@dataclass(slots=True, eq=False)
class _Entry:
    """A session of this tier.

    Attributes:
        kept: As it will be when all its jobs are done.
        folder: Where it is.
        segments: Likewise; of those that are not written yet, only the rows are right.
        durable: As it is on the disk; None before the first write.
        num_jobs: Writes that wait or run.
    """

    kept: KeptSession
    folder: Path
    segments: tuple[Segment, ...] = ()
    durable: Manifest | None = None
    num_jobs: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A save to be written.

    Attributes:
        entry: Of which session.
        manifest: Its segments are those that stay.
        rows: First row and rows of the new ones.
    """

    entry: _Entry
    manifest: Manifest
    rows: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for _, block in self.rows)


def model_folder(root: Path, target: TargetModel) -> Path:
    """Where under `root` the sessions of a model are."""
    return root / ModelKey.of(target).name


class DiskTier:
    """Saved sessions of one model. Used by the model's thread; closing it waits for its writer.

    Args:
        root: Folder of all models; made where it is missing.
        target: Whose sessions.
        max_bytes: Most bytes of all of them; the least recently used go.

    Raises:
        CheckpointError: The folder cannot be used, or another process owns it.
    """

    def __init__(self, root: Path, target: TargetModel, max_bytes: int) -> None:
        self.folder = model_folder(root, target)
        self.max_bytes = max_bytes
        self._target = target
        self._shape = segment_shape(target.new_cache().pool)
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._backlog_bytes = 0
        self._is_closed = False
        self._complaint = ""
        with explained("keep sessions in", self.folder):
            make_folder(self.folder)
            self._lock = FolderLock(self.folder)
            try:
                self._entries = self._scan()
            except BaseException:
                self._lock.close()
                raise
        self._writer = threading.Thread(target=self._run, name="dlite disk tier", daemon=True)
        self._writer.start()

    @property
    def used_bytes(self) -> int:
        """Bytes of all sessions, those included that are being written."""
        with self._changed:
            return sum(entry.kept.nbytes for entry in self._entries.values())

    def sessions(self) -> list[KeptSession]:
        """All sessions."""
        with self._changed:
            return [entry.kept for entry in self._entries.values()]

    def find(
        self, prompt: TokenTrail, tenant: str, more_than: int
    ) -> tuple[KeptSession | None, int]:
        """See `kept.longest_kept`."""
        return longest_kept(self.sessions(), prompt, tenant, more_than)

    def save(self, session: Session) -> bool:
        """Copy what is new of an idle session, to be written soon; False where too much waits."""
        manifest = session.manifest()
        trail = TokenTrail(manifest.token_ids)
        num_valid = 0
        before: tuple[Segment, ...] = ()
        with self._changed:
            entry = self._entries.get(session.session_id)
            if entry is not None:
                num_valid, before = entry.kept.trail.common_prefix(trail), entry.segments
        segments, new = plan_segments(before, num_valid, manifest.num_rows)
        if entry is not None and num_valid == len(trail) == len(entry.kept.trail) and not new:
            entry.kept.used_at = now_s()
            return True
        kept = KeptSession.of(manifest, manifest.num_rows * self._shape.row_bytes, now_s())
        if kept.nbytes > self.max_bytes:
            self._complain(kept.session_id, f"it is larger than max_disk_bytes={self.max_bytes}")
            return False
        num_bytes = sum(end - start for start, end in new) * self._shape.row_bytes
        with self._changed:
            if self._jobs and self._backlog_bytes + num_bytes > _MAX_BACKLOG_BYTES:
                return False
        rows = [(start, rows_to_host(session.kv, start, end)) for start, end in new]
        with self._changed:
            if entry is None:
                entry = _Entry(kept, self.folder / session.session_id)
                self._entries[session.session_id] = entry
            entry.kept = kept
            entry.segments = segments + tuple(
                Segment("", start, end - start, "") for start, end in new
            )
            entry.num_jobs += 1
            self._jobs.append(_Job(entry, replace(manifest, segments=segments), rows))
            self._backlog_bytes += num_bytes
            self._changed.notify_all()
        return True

    def open(self, kept: KeptSession, num_rows: int) -> SavedSession | None:
        """Begin to read a session; None, with a warning, where it cannot be used.

        Waits for what is still being written of it.
        """
        with self._changed:
            entry = self._entries.get(kept.session_id)
            if entry is None:
                return None
            self._changed.wait_for(lambda: entry.num_jobs == 0)
            entry.kept.used_at = now_s()
        try:
            saved = open_checkpoint(entry.folder, self._target, num_rows=num_rows)
        except CheckpointError as error:
            logger.warning("session=%s starts cold: %s", kept.session_id, error)
            self.remove([kept.session_id])
            return None
        with suppress(OSError):  # its time of change is when it was last used
            os.utime(entry.folder / MANIFEST)
        return saved

    def remove(self, session_ids: Collection[str]) -> int:
        """Delete sessions; returns how many there were."""
        with self._changed:
            entries = [self._entries.pop(name) for name in session_ids if name in self._entries]
            self._changed.wait_for(lambda: all(entry.num_jobs == 0 for entry in entries))
        for entry in entries:
            shutil.rmtree(entry.folder, ignore_errors=True)
        return len(entries)

    def flush(self) -> None:
        """Wait until everything is written, or could not be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog)

    def close(self) -> None:
        """Write what waits and let others have the folder. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._writer.join()
        self._lock.close()

    @property
    def _backlog(self) -> bool:
        return any(entry.num_jobs for entry in self._entries.values()) or bool(self._jobs)

    def _complain(self, session_id: str, complaint: str) -> None:
        """Warn once, and not at every turn."""
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning(
                "session=%s is not saved: %s; folder=%s; it goes on in memory, and a later turn "
                "tries again",
                session_id,
                complaint,
                self.folder,
            )

    def _scan(self) -> dict[str, _Entry]:
        """What is there. A damaged session is removed, with a warning."""
        entries: dict[str, _Entry] = {}
        for folder in sorted(path for path in self.folder.iterdir() if path.is_dir()):
            try:
                manifest = read_manifest(folder)
            except CheckpointError as error:
                logger.warning("a saved session is removed and will start cold: %s", error)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            if manifest.session_id != folder.name:
                continue
            size = manifest.num_stored * self._shape.row_bytes
            kept = KeptSession.of(manifest, size, (folder / MANIFEST).stat().st_mtime)
            entries[folder.name] = _Entry(kept, folder, manifest.segments, manifest)
        return entries

    # ---- below: the writer's thread ----------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            durable = self._written(job)
            entry = job.entry
            with self._changed:
                self._backlog_bytes -= job.nbytes
                entry.num_jobs -= 1
                entry.durable = durable
                if entry.num_jobs == 0 and durable is None:
                    self._entries.pop(entry.kept.session_id, None)
                elif entry.num_jobs == 0:  # now it is what is there, whatever was planned
                    assert durable is not None
                    entry.segments = durable.segments
                    entry.kept = KeptSession.of(durable, entry.kept.nbytes, entry.kept.used_at)
                self._changed.notify_all()
            self._keep_budget()

    def _written(self, job: _Job) -> Manifest | None:
        """Write a job; returns what is on the disk then."""
        durable = job.entry.durable
        stored: dict[tuple[int, int], Segment] = {}
        if durable is not None:
            ids = TokenTrail(job.manifest.token_ids)
            num_valid = TokenTrail(durable.token_ids).common_prefix(ids)
            stored = {(s.start, s.num_rows): s for s in durable.segments if s.end <= num_valid}
        wanted = [(segment.start, segment.num_rows) for segment in job.manifest.segments]
        kept = tuple(stored[rows] for rows in takewhile(stored.__contains__, wanted))
        # Where an earlier job failed, what follows its rows has to wait for a later save.
        rows = job.rows if len(kept) == len(wanted) else []
        try:
            make_folder(job.entry.folder)
            durable = write_checkpoint(job.entry.folder, replace(job.manifest, segments=kept), rows)
            self._complaint = ""
        except OSError as error:
            self._complain(job.manifest.session_id, error.strerror or str(error))
        return durable

    def _keep_budget(self) -> None:
        """Delete the sessions that were not used for longest, until the rest fits."""
        with self._changed:
            idle = [entry for entry in self._entries.values() if entry.num_jobs == 0]
            excess = sum(entry.kept.nbytes for entry in self._entries.values()) - self.max_bytes
            victims = []
            for entry in sorted(idle, key=lambda entry: entry.kept.used_at):
                if excess <= 0:
                    break
                excess -= entry.kept.nbytes
                victims.append(self._entries.pop(entry.kept.session_id))
        for entry in victims:
            logger.debug("deleted session=%s from disk", entry.kept.session_id)
            shutil.rmtree(entry.folder, ignore_errors=True)
