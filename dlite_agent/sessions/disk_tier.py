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
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from dlite_agent.errors import CheckpointError
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.atomic_file import FolderLock, explained, make_folder
from dlite_agent.sessions.checkpoint import (
    branch_checkpoint,
    open_checkpoint,
    segment_shape,
    write_checkpoint,
)
from dlite_agent.sessions.disk_entries import DiskEntry, DiskJob, scan_folder
from dlite_agent.sessions.disk_journal import JournalFile, journal_path
from dlite_agent.sessions.disk_writer import DiskWriter
from dlite_agent.sessions.journal import Journal
from dlite_agent.sessions.kept import (
    BRANCH_OF,
    BRANCH_UNTIL,
    HINT,
    KeptSession,
    longest_kept,
    now_s,
)
from dlite_agent.sessions.manifest import MANIFEST, Manifest, ModelKey
from dlite_agent.sessions.resident import SIBLING_S
from dlite_agent.sessions.saved_session import SavedSession
from dlite_agent.sessions.segments import Segment, held_bytes, plan_segments
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["DiskTier", "model_folder"]

logger = logging.getLogger(__name__)

# KV that waits to be written. A disk that is slower than the turns makes saves rarer and not the
# memory larger: what was left out is saved with a later turn, or when the engine is closed.
_MAX_BACKLOG_BYTES = 2**30


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
        self._complaint = ""
        self._journals: dict[str, JournalFile] = {}
        with explained("keep sessions in", self.folder):
            make_folder(self.folder)
            self._lock = FolderLock(self.folder)
            try:
                self._entries = scan_folder(self.folder, self._shape.row_bytes)
            except BaseException:
                self._lock.close()
                raise
        self._writer = DiskWriter()

    @property
    def used_bytes(self) -> int:
        """Bytes of all sessions, those included that are being written; shared ones count once."""
        with self._changed:
            entries = [(e.kept.tenant, e.kept.nbytes, e.segments) for e in self._entries.values()]
        return held_bytes(entries, self._shape.row_bytes)

    def sessions(self) -> list[KeptSession]:
        """All sessions."""
        with self._changed:
            kept = [entry.kept for entry in self._entries.values()]
        now = now_s()
        return [session for session in kept if not session.is_over(now)]

    def find(
        self, prompt: TokenTrail, tenant: str, more_than: int
    ) -> tuple[KeptSession | None, int]:
        """See `kept.longest_kept`."""
        return longest_kept(self.sessions(), prompt, tenant, more_than)

    def save(self, session: Session) -> bool:
        """Copy what is new of an idle session, to be written soon; False where too much waits."""
        manifest = session.manifest()
        trail, num_valid = TokenTrail(manifest.token_ids), 0
        before: tuple[Segment, ...] = ()
        with self._changed:
            entry = self._entries.get(session.session_id)
            if entry is not None:
                num_valid, before = entry.kept.trail.common_prefix(trail), entry.segments
        segments, new = plan_segments(before, num_valid, manifest.num_rows)
        is_same = entry is not None and num_valid == len(trail) == len(entry.kept.trail)
        if entry is not None and is_same and not new and not entry.kept.branch_of:
            entry.kept.used_at = now_s()
            return True
        kept = KeptSession.of(manifest, manifest.num_rows * self._shape.row_bytes, now_s())
        if kept.nbytes > self.max_bytes:
            self._complain(kept.session_id, f"it is larger than max_disk_bytes={self.max_bytes}")
            return False
        num_bytes = sum(end - start for start, end in new) * self._shape.row_bytes
        backlog = self._writer.num_bytes
        if backlog and backlog + num_bytes > _MAX_BACKLOG_BYTES:
            return False
        rows = [(start, rows_to_host(session.kv, start, end)) for start, end in new]
        with self._changed:
            if entry is None:
                entry = DiskEntry(kept, self.folder / session.session_id)
                self._entries[session.session_id] = entry
            entry.kept = kept
            entry.segments = segments + tuple(
                Segment("", start, end - start, "") for start, end in new
            )
            entry.num_jobs += 1
        job = DiskJob(entry, replace(manifest, segments=segments), rows)
        self._writer.put(partial(self._write, job), num_bytes)
        return True

    def branch(self, session_id: str, name: str) -> None:
        """Keep what a session is now under another name for a while; it is about to change.

        Costs a manifest: its segments are linked.
        """
        until = now_s() + SIBLING_S
        with self._changed:
            entry = self._entries.get(session_id)
            if entry is None:
                return
            kept = replace(entry.kept, session_id=name, hint="", branch_of=session_id, until=until)
            branch = DiskEntry(kept, self.folder / name, entry.segments, num_jobs=1)
            self._entries[name] = branch
        self._writer.put(partial(self._write_branch, entry, branch), 0)

    def attach(self, tenant: str, journal: Journal, made_by: str) -> None:
        """Fill a tenant's empty journal with what is on disk, and keep on disk what it gets.

        Args:
            tenant: Whose.
            journal: Its records are written behind the turns, each before its session's KV.
            made_by: See `disk_journal.journal_text`.
        """
        path = journal_path(self.folder, tenant)
        file = JournalFile(path, journal, made_by, self._writer, partial(self._complain, "journal"))
        try:
            file.attach()
        except OSError as error:
            logger.warning("journal=%s is not used: %s", path, error)
            return
        self._journals[tenant] = file

    def rewrite_journal(self, tenant: str) -> None:
        """Write a tenant's journal anew, after turns of it were forgotten."""
        if tenant in self._journals:
            self._journals[tenant].rewrite()

    def open(self, kept: KeptSession) -> SavedSession | None:
        """A session to be read; None, with a warning, where it cannot be used.

        Waits for what is still being written of it.
        """
        with self._changed:
            entry = self._entries.get(kept.session_id)
            if entry is None:
                return None
            self._changed.wait_for(lambda: entry.num_jobs == 0)
            entry.kept.used_at = now_s()
        try:
            saved = open_checkpoint(entry.folder, self._target)
        except CheckpointError as error:
            logger.warning("session=%s starts cold: %s", kept.session_id, error)
            self.remove([kept.session_id])
            return None
        with suppress(OSError):  # its time of change is when it was last used
            os.utime(entry.folder / MANIFEST)
        return saved

    def remove(self, session_ids: Collection[str]) -> int:
        """Delete sessions, and the branches that they dropped; returns how many there were."""
        with self._changed:
            entries = [
                self._entries.pop(name)
                for name, entry in list(self._entries.items())
                if name in session_ids or entry.kept.branch_of in session_ids
            ]
            self._changed.wait_for(lambda: all(entry.num_jobs == 0 for entry in entries))
        for entry in entries:
            shutil.rmtree(entry.folder, ignore_errors=True)
        return sum(not entry.kept.branch_of for entry in entries)

    def flush(self) -> None:
        """Wait until everything is written, or could not be."""
        self._writer.flush()

    def close(self) -> None:
        """Write what waits and let others have the folder. Idempotent."""
        self._writer.close()
        self._lock.close()

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

    # ---- below: the writer's thread ----------------------------------------------------------

    def _write(self, job: DiskJob) -> None:
        durable = job.entry.durable
        try:
            durable = self._written(job)
        finally:
            self._finish(job.entry, durable)
        self._keep_budget()

    def _write_branch(self, entry: DiskEntry, branch: DiskEntry) -> None:
        saved, kept, durable = entry.durable, branch.kept, None
        try:
            if saved is not None:
                labels = dict(saved.labels) | {HINT: ""}
                labels |= {BRANCH_OF: kept.branch_of, BRANCH_UNTIL: repr(kept.until)}
                manifest = replace(saved, session_id=kept.session_id, labels=labels)
                durable = branch_checkpoint(entry.folder, saved, branch.folder, manifest)
        except OSError as error:
            logger.debug("a branch of session=%s is not kept: %s", kept.branch_of, error)
            shutil.rmtree(branch.folder, ignore_errors=True)
        finally:
            self._finish(branch, durable)
        self._keep_budget()

    def _finish(self, entry: DiskEntry, durable: Manifest | None) -> None:
        """A write is over: `durable` is what is on the disk."""
        with self._changed:
            entry.num_jobs -= 1
            entry.durable = durable
            if entry.num_jobs == 0 and durable is None:
                self._entries.pop(entry.kept.session_id, None)
            elif entry.num_jobs == 0:  # now it is what is there, whatever was planned
                assert durable is not None
                entry.segments = durable.segments
                entry.kept = KeptSession.of(durable, entry.kept.nbytes, entry.kept.used_at)
            self._changed.notify_all()

    def _written(self, job: DiskJob) -> Manifest | None:
        """Write a job; returns what is on the disk then."""
        durable = job.entry.durable
        stored: dict[tuple[int, int], Segment] = {}
        if durable is not None:
            ids = TokenTrail(job.manifest.token_ids)
            num_valid = TokenTrail(durable.token_ids).common_prefix(ids)
            there = [s for s in durable.segments if (job.entry.folder / s.file).exists()]
            stored = {(s.start, s.num_rows): s for s in there if s.end <= num_valid}
        wanted = [(segment.start, segment.num_rows) for segment in job.manifest.segments]
        kept = tuple(stored[rows] for rows in takewhile(stored.__contains__, wanted))
        # Where an earlier job failed, what follows its rows has to wait for a later save.
        rows = job.rows if len(kept) == len(wanted) else []
        try:
            make_folder(job.entry.folder)
            manifest = replace(job.manifest, segments=kept)
            twins = self._twins(job.entry) if rows else {}
            durable = write_checkpoint(job.entry.folder, manifest, rows, twins)
            self._complaint = ""
        except OSError as error:
            self._complain(job.manifest.session_id, error.strerror or str(error))
        return durable

    def _twins(self, entry: DiskEntry) -> dict[Segment, Path]:
        """What other sessions of its tenant have on disk."""
        with self._changed:
            others = [other for other in self._entries.values() if other is not entry]
        return {
            segment: other.folder / segment.file
            for other in others
            if other.durable is not None and other.kept.tenant == entry.kept.tenant
            for segment in other.durable.segments
        }

    def _keep_budget(self) -> None:
        """Delete old branches; then, until the rest fits, other branches and old sessions."""
        now = now_s()
        with self._changed:
            old = [e for e in self._entries.values() if e.num_jobs == 0 and e.kept.is_over(now)]
            for entry in old:
                del self._entries[entry.kept.session_id]
        for entry in old:
            shutil.rmtree(entry.folder, ignore_errors=True)
        while self.used_bytes > self.max_bytes:
            with self._changed:
                idle = [entry for entry in self._entries.values() if entry.num_jobs == 0]
                if not idle:
                    return
                victim = min(idle, key=lambda e: (not e.kept.branch_of, e.kept.used_at))
                del self._entries[victim.kept.session_id]
            logger.debug("deleted session=%s from disk", victim.kept.session_id)
            shutil.rmtree(victim.folder, ignore_errors=True)
