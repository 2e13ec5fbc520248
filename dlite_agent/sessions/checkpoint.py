"""A session in a folder: written so that a crash loses nothing sealed, and read with suspicion.

The order of a save is: new segments, then the manifest that names them, then the removal of what no
manifest names. Whoever dies in between leaves the session of the save before. A reader takes
verified segments up to the first one that is missing or damaged; what is behind them is computed
again from the token ids, which the manifest holds.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from dlite_agent.errors import CheckpointError
from dlite_agent.models.kv_pool import KVPool
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.atomic_file import (
    FolderLock,
    explained,
    make_folder,
    sync_folder,
    write_file,
)
from dlite_agent.sessions.manifest import MANIFEST, Manifest, ModelKey, read_manifest
from dlite_agent.sessions.saved_session import SavedOnDisk, SavedSession
from dlite_agent.sessions.segments import Segment, SegmentShape, plan_segments, write_segment
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = [
    "branch_checkpoint",
    "open_checkpoint",
    "plan_save",
    "save_session",
    "segment_shape",
    "write_checkpoint",
]


def segment_shape(pool: KVPool) -> SegmentShape:
    """What this pool's rows look like."""
    keys = pool.layers[0].keys  # [K, P, D]
    return SegmentShape(pool.num_layers, keys.shape[0], keys.shape[2], keys.dtype)


def save_session(
    folder: Path, manifest: Manifest, read_rows: Callable[[int, int], Tensor]
) -> Manifest:
    """Save a session, adding to what the folder holds of it.

    Args:
        folder: Made where it is missing.
        manifest: What to save, without segments.
        read_rows: Gives rows [start, end) of the session, as `models.kv_rows.rows_to_host` does.

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
            rows = ((start, read_rows(start, end)) for start, end in new)
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
    folder: Path,
    manifest: Manifest,
    rows: Iterable[tuple[int, Tensor]],
    twins: Mapping[Segment, Path] | None = None,
) -> Manifest:
    """Save a session. The caller holds the folder's lock.

    Args:
        folder: Exists.
        manifest: What to save; its segments are in the folder and stay.
        rows: First row and rows [L, 2, K, n, D] of each new segment, in order; each is asked for
            when the one before is written.
        twins: See `write_segment`.

    Returns:
        The manifest with the new segments.

    Raises:
        OSError: It cannot be written; what was saved before is still there.
    """
    segments = list(manifest.segments)
    for start, block in rows:
        segments.append(write_segment(folder, start, block, manifest.token_ids, twins))
    saved = replace(manifest, segments=tuple(segments))
    sync_folder(folder)  # the segments' names before the manifest's
    write_file(folder / MANIFEST, [saved.to_bytes()])
    named = {segment.file for segment in saved.segments}
    for path in folder.glob("kv-*"):
        if path.name not in named:
            path.unlink(missing_ok=True)
    return saved


def branch_checkpoint(source: Path, saved: Manifest, target: Path, branch: Manifest) -> Manifest:
    """Give a saved session a second name, under which it stays when the first one changes.

    Args:
        source: Folder of the session.
        saved: What is there.
        target: Folder of the branch.
        branch: Its manifest, but for the segments.

    Raises:
        OSError: It cannot be written, or the session is gone.
    """
    make_folder(target)
    for segment in saved.segments:
        place = target / segment.file
        place.unlink(missing_ok=True)
        try:
            place.hardlink_to(source / segment.file)
        except OSError:  # a file system without links
            shutil.copyfile(source / segment.file, place)
            place.chmod(0o600)
    branch = replace(branch, segments=saved.segments)
    sync_folder(target)
    write_file(target / MANIFEST, [branch.to_bytes()])
    return branch


def open_checkpoint(folder: Path, target: TargetModel) -> SavedSession:
    """Open a saved session.

    Args:
        folder: As it was given to a save.
        target: The model that goes on with it.

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
    return SavedOnDisk(manifest, folder, segment_shape(target.new_cache().pool))
