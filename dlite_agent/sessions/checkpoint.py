"""A session in a folder: written so that a crash loses nothing sealed, and read with suspicion.

The order of a save is: new segments, then the manifest that names them, then the removal of what no
manifest names. Whoever dies in between leaves the session of the save before. A reader takes
verified segments up to the first one that is missing or damaged; what is behind them is computed
again from the token ids, which the manifest holds.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from dlite_agent.errors import CheckpointError
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.atomic_file import (
    FolderLock,
    explained,
    make_folder,
    sync_folder,
    write_file,
)
from dlite_agent.sessions.manifest import MANIFEST, Manifest, ModelKey, read_manifest
from dlite_agent.sessions.segments import (
    Segment,
    SegmentShape,
    plan_segments,
    read_segment,
    write_segment,
)
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = [
    "SavedSession",
    "open_checkpoint",
    "plan_save",
    "save_session",
    "segment_shape",
    "write_checkpoint",
]

_READ_AHEAD = 2
"""Segments that are read before they are asked for."""


def segment_shape(pool: KVPool) -> SegmentShape:
    """What this pool's rows look like."""
    keys = pool.layers[0].keys  # [K, P, D]
    return SegmentShape(pool.num_layers, keys.shape[0], keys.shape[2], keys.dtype)


def save_session(folder: Path, manifest: Manifest, kv: KVCache) -> Manifest:
    """Save a session, adding to what the folder holds of it.

    Args:
        folder: Made where it is missing.
        manifest: What to save, without segments.
        kv: Has at least `manifest.num_rows` rows.

    Returns:
        The manifest as it was written.

    Raises:
        CheckpointError: The folder cannot be written, or somebody else writes it.
    """
    with explained("save the session to", folder):
        make_folder(folder)
        with FolderLock(folder):
            try:
                before = read_manifest(folder)
            except CheckpointError:  # there is none, or none that could be added to
                before = None
            plan, new = plan_save(folder, manifest, before)
            rows = ((start, rows_to_host(kv, start, end)) for start, end in new)
            return write_checkpoint(folder, plan, rows)


def plan_save(
    folder: Path, manifest: Manifest, before: Manifest | None
) -> tuple[Manifest, list[tuple[int, int]]]:
    """What a save can keep, and the rows [start, end) of each segment that it writes.

    Args:
        folder: Where the segments of `before` are.
        manifest: What to save, without segments.
        before: What is saved.
    """
    stored: list[Segment] = []
    num_valid = 0
    if before is not None and before.model == manifest.model:
        num_valid = TokenTrail(before.token_ids).common_prefix(TokenTrail(manifest.token_ids))
        stored = list(takewhile(lambda segment: (folder / segment.file).exists(), before.segments))
    kept, new = plan_segments(stored, num_valid, manifest.num_rows)
    return replace(manifest, segments=kept), new


def write_checkpoint(
    folder: Path, manifest: Manifest, rows: Iterable[tuple[int, Tensor]]
) -> Manifest:
    """Save a session. The caller holds the folder's lock.

    Args:
        folder: Exists.
        manifest: What to save; its segments are in the folder and stay.
        rows: First row and rows [L, 2, K, n, D] of each new segment, in order; each is asked for
            when the one before is written.

    Returns:
        The manifest with the new segments.

    Raises:
        OSError: It cannot be written; what was saved before is still there.
    """
    segments = list(manifest.segments)
    for start, block in rows:
        segments.append(write_segment(folder, start, block, manifest.token_ids))
    saved = replace(manifest, segments=tuple(segments))
    sync_folder(folder)  # the segments' names before the manifest's
    write_file(folder / MANIFEST, [saved.to_bytes()])
    named = {segment.file for segment in saved.segments}
    for path in folder.glob("kv-*"):
        if path.name not in named:
            path.unlink(missing_ok=True)
    return saved


@dataclass(slots=True)
class SavedSession:
    """A saved session that is being read. Its KV comes in blocks, from row 0 on.

    A thread reads and verifies ahead of whoever takes the blocks.

    Attributes:
        manifest: What was saved.
        problem: Why the KV ends before `manifest.num_rows`; empty when nothing is wrong.
        num_bytes: Read and verified so far.
        read_s: Seconds that it took, without waiting for whoever takes the blocks.
    """

    manifest: Manifest
    problem: str = ""
    num_bytes: int = 0
    read_s: float = 0.0
    _blocks: deque[Tensor] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_over: bool = False

    @classmethod
    def of(cls, manifest: Manifest, blocks: Sequence[Tensor], num_rows: int) -> SavedSession:
        """A session whose rows are in memory; as many of them as are wanted are given."""
        saved = cls(manifest)
        done = 0
        for block in blocks:
            if done >= num_rows:
                break
            part = block[:, :, :, : num_rows - done]
            saved.num_bytes += part.nbytes
            saved._blocks.append(part)
            done += part.shape[3]
        saved.close()
        return saved

    @property
    def token_ids(self) -> array[int]:
        """All ids."""
        return self.manifest.token_ids

    @property
    def is_ready(self) -> bool:
        """Whether the next block, or the end, is there without waiting."""
        with self._changed:
            return self._is_over or bool(self._blocks)

    def blocks(self) -> Iterator[Tensor]:
        """Verified rows [L, 2, K, n, D], as long as there are any."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._blocks)
                if not self._blocks:
                    return
                block = self._blocks.popleft()
                self._changed.notify_all()
            yield block

    def close(self) -> None:
        """Read no further. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def read(self, folder: Path, shape: SegmentShape, num_rows: int) -> None:
        """Read the first `num_rows` rows, in this thread, no faster than they are taken."""
        done = 0
        try:
            for segment in self.manifest.segments:
                if done >= num_rows:
                    break
                began_s = time.perf_counter()
                block = read_segment(folder, segment, shape, self.token_ids)
                self.read_s += time.perf_counter() - began_s
                self.num_bytes += block.nbytes
                if not self._put(block[:, :, :, : num_rows - done]):
                    return
                done = segment.end
        except (OSError, ValueError, MemoryError) as error:
            self.problem = str(error) or type(error).__name__
        finally:
            self.close()

    def _put(self, block: Tensor) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._blocks) < _READ_AHEAD)
            if not self._is_over:
                self._blocks.append(block)
                self._changed.notify_all()
            return not self._is_over


def open_checkpoint(
    folder: Path, target: TargetModel, *, num_rows: int | None = None
) -> SavedSession:
    """Open a saved session and begin to read its KV.

    Args:
        folder: As it was given to a save.
        target: The model that goes on with it.
        num_rows: KV rows that are wanted; None: all.

    Raises:
        CheckpointError: It is no saved session, damaged, or of another model.
    """
    with explained("read the session in", folder):
        manifest = read_manifest(folder)
    if differences := ModelKey.of(target).differences(manifest.model):
        raise CheckpointError(
            f"the session in {str(folder)!r} was computed by another model: {differences}; load "
            "that model, or send the whole history to this one"
        )
    ids = manifest.token_ids
    if len(ids) and not 0 <= min(ids) <= max(ids) < target.config.vocab_size:
        raise CheckpointError(
            f"the session in {str(folder)!r} has token ids that this model's vocabulary of "
            f"{target.config.vocab_size} has not; delete it, and send the whole history"
        )
    saved = SavedSession(manifest)
    pool = target.new_cache().pool
    wanted = manifest.num_rows if num_rows is None else min(num_rows, manifest.num_rows)
    threading.Thread(
        target=saved.read,
        args=(folder, segment_shape(pool), wanted),
        name="dlite restore",
        daemon=True,
    ).start()
    return saved
