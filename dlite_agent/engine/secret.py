"""The secret with which this machine signs what clients carry for it."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

__all__ = ["machine_secret"]

logger = logging.getLogger(__name__)

_NUM_BYTES = 32
_NAME = "secret"


def machine_secret(folder: Path | None) -> bytes:
    """The machine's secret, made at the first call: 32 random bytes that only its user can read.

    Where the folder cannot be used, or others could have read or planted the file, the secret is
    new, and handles are worth nothing after this process.

    Args:
        folder: Of the cache; None keeps nothing.
    """
    fresh = secrets.token_bytes(_NUM_BYTES)
    if folder is None:
        return fresh
    path = folder / _NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _create(path, fresh) or _read(path)
    except (OSError, ValueError) as error:
        logger.warning("the secret of handles is not kept: path=%s error=%s", path, error)
        return fresh


def _create(path: Path, secret: bytes) -> bytes | None:
    """Write it whole before its name exists; None where somebody was first."""
    partial = path.with_name(f"{_NAME}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
        os.link(partial, path)
    except FileExistsError:
        return None
    finally:
        partial.unlink()
    return secret


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError("others may have read or written it; delete it")
        secret = file.read(_NUM_BYTES + 1)
    if len(secret) != _NUM_BYTES:
        raise ValueError(f"it has {len(secret)} bytes and not {_NUM_BYTES}; delete it")
    return secret
