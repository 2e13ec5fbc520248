"""What a disk tier knows of each of its sessions, and how it learns that from its folder."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dlite_agent.errors import CheckpointError
from dlite_agent.sessions.kept import KeptSession, now_s
from dlite_agent.sessions.manifest import MANIFEST, Manifest, read_manifest
from dlite_agent.sessions.segments import Segment

__all__ = ["DiskEntry", "DiskJob", "scan_folder"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DiskEntry:
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
class DiskJob:
    """A save to be written.

    Attributes:
        entry: Of which session.
        manifest: Its segments are those that stay.
        rows: First row and rows of the new ones.
    """

    entry: DiskEntry
    manifest: Manifest
    rows: list[tuple[int, Tensor]]


def scan_folder(root: Path, row_bytes: int) -> dict[str, DiskEntry]:
    """What is there. A damaged session is removed, with a warning, and a branch that is too old.

    Args:
        root: Of one model's sessions.
        row_bytes: Of a KV row.

    Raises:
        OSError: It cannot be read.
    """
    entries: dict[str, DiskEntry] = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            logger.warning("a saved session is removed and will start cold: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
            continue
        except OSError as error:
            logger.warning("a saved session cannot be read: %s", error)
            continue
        size = manifest.num_stored * row_bytes
        kept = KeptSession.of(manifest, size, (folder / MANIFEST).stat().st_mtime)
        if kept.is_over(now_s()):
            shutil.rmtree(folder, ignore_errors=True)
        elif manifest.session_id == folder.name:
            entries[folder.name] = DiskEntry(kept, folder, manifest.segments, manifest)
    return entries
