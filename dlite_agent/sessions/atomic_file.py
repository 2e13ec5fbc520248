"""Files that are there whole or not at all, and the lock that lets one process write a folder."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlite_agent.errors import CheckpointError

__all__ = ["PARTIAL", "FolderLock", "explained", "make_folder", "sync_folder", "write_file"]

PARTIAL = ".partial"
"""Suffix of a file that is being written; after a crash it is garbage."""

_LOCK_NAME = "lock"
_ADVICE = {
    errno.ENOSPC: "free some space or name a folder on a larger disk",
    errno.EDQUOT: "free some of your quota or name a folder on another disk",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "name a folder that you may write",
    errno.EPERM: "name a folder that you may write",
}


class FolderLock:
    """The right to write a folder: one holder on this machine, freed when its process ends.

    Args:
        folder: Exists and can be written.

    Raises:
        CheckpointError: Somebody else holds it, in this process or in another one.
        OSError: The lock file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The kernel frees it with the descriptor, however its owner died.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError(
                f"{str(folder)!r} is being written by another engine or process; use another "
                "folder, or wait until that one is closed"
            ) from None
        self._descriptor: int | None = descriptor

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file durably under a temporary name, then move it to its own; 0600.

    Whoever reads `path` meanwhile, or after a crash, finds what was there before or all of it.

    Args:
        path: Replaced if it exists. One writer at a time.
        parts: Its content.

    Raises:
        OSError: It cannot be written; what was at `path` is still there.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600), "wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:  # a raw file may take less than it was given
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, 0700, and what is missing above it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def explained(action: str, folder: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what to do.

    Args:
        action: E.g. `"save the session to"`.
        folder: Where.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "look at the folder, or use another one")
        raise CheckpointError(
            f"cannot {action} {str(folder)!r}: {error.strerror or error}; {advice}"
        ) from error
