"""The sessions that engines left in a folder, for somebody who has no model loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import CheckpointError, SessionNotFoundError
from dlite_agent.sessions.atomic_file import FolderLock, explained, make_folder
from dlite_agent.sessions.disk_journal import forget_turns, journal_path
from dlite_agent.sessions.kept import KeptSession
from dlite_agent.sessions.manifest import MANIFEST, Manifest, read_manifest

__all__ = ["SavedFolder", "export_session", "import_session", "purge_sessions", "saved_folders"]

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """A session's folder.

    Attributes:
        path: Where.
        manifest: What is saved there.
        kept: The same, as a tier has it.
    """

    path: Path
    manifest: Manifest
    kept: KeptSession


def saved_folders(root: Path) -> Iterator[SavedFolder]:
    """All sessions of all models under the folder of a disk tier; damaged ones are left out."""
    for path in sorted(root.glob(f"*/*/{MANIFEST}")):
        with suppress(CheckpointError, OSError):
            folder = path.parent
            manifest = read_manifest(folder)
            size = sum(file.stat().st_size for file in folder.iterdir())
            kept = KeptSession.of(manifest, size, path.stat().st_mtime)
            yield SavedFolder(folder, manifest, kept)


def purge_sessions(root: Path, folders: Iterable[SavedFolder]) -> int:
    """Delete sessions, and what was noted to replay their turns; returns how many.

    Raises:
        CheckpointError: An engine has the folder open, or it cannot be written.
    """
    count = 0
    by_model: dict[Path, list[SavedFolder]] = {}
    for folder in folders:
        by_model.setdefault(folder.path.parent, []).append(folder)
    for model, saved in by_model.items():
        with explained("purge the sessions in", root), FolderLock(model):
            for tenant in {folder.kept.tenant for folder in saved}:
                ids = {f.kept.session_id for f in saved if f.kept.tenant == tenant}
                forget_turns(journal_path(model, tenant), ids)
            for folder in saved:
                shutil.rmtree(folder.path)
                count += 1
    return count


def export_session(root: Path, session_id: str, target: Path) -> None:
    """Copy a session to a folder of its own, which `Session.load` and `import_session` read.

    Raises:
        SessionNotFoundError: There is no such session.
        CheckpointError: The folder exists or cannot be written.
    """
    found = [folder for folder in saved_folders(root) if folder.kept.session_id == session_id]
    if not found:
        raise SessionNotFoundError(
            f"{str(root)!r} has no session {session_id!r}; `dlite-agent sessions list` names all"
        )
    _copy(found[0].path, target)


def import_session(root: Path, source: Path) -> str:
    """Copy an exported session to where engines of its model find it; returns its id.

    Its KV is verified when it is used.

    Raises:
        CheckpointError: It is no saved session, an engine has the folder open, or there is one of
            that id.
    """
    with explained("read the session in", source):
        manifest = read_manifest(source)
    if not _NAME.fullmatch(manifest.session_id):
        raise CheckpointError(
            f"{str(source)!r} has a session with the id {manifest.session_id!r}, which cannot name "
            "a folder; save it under another id"
        )
    model = root / manifest.model.name
    with explained("import the session to", root):
        make_folder(model)
        with FolderLock(model):
            _copy(source, model / manifest.session_id)
    return manifest.session_id


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{str(target)!r} exists; name another folder, or delete it")
    with explained("copy the session to", target):
        make_folder(target)
        # The manifest last: without it there is no session.
        for path in [*sorted(source.glob("kv-*.safetensors")), source / MANIFEST]:
            shutil.copyfile(path, target / path.name)
            (target / path.name).chmod(0o600)
