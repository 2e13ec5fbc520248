"""Saved sessions in folders that their owner named: found and read, never written."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from dlite_agent.errors import CheckpointError
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.checkpoint import open_checkpoint
from dlite_agent.sessions.kept import HINT, TENANT, KeptSession, longest_kept, now_s
from dlite_agent.sessions.saved_session import SavedSession
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["FolderTier"]

logger = logging.getLogger(__name__)


class FolderTier:
    """Used by the model's thread."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[KeptSession, Path, TargetModel]] = {}

    def add(self, folder: Path, target: TargetModel, tenant: str) -> KeptSession:
        """Let a tenant's requests find the session in a folder, under a new id.

        Raises:
            CheckpointError: It holds none, a damaged one, or another model's.
        """
        manifest = open_checkpoint(folder, target).manifest
        # The saved id may be in use, here or by another tenant, and it may be no name of a folder.
        session_id = secrets.token_hex(8)
        labels = {**manifest.labels, TENANT: tenant, HINT: ""}
        size = sum(path.stat().st_size for path in folder.glob("kv-*"))
        kept = KeptSession.of(
            replace(manifest, session_id=session_id, labels=labels), size, now_s()
        )
        self._folders[session_id] = kept, folder, target
        return kept

    def sessions(self) -> list[KeptSession]:
        """All sessions."""
        return [kept for kept, *_ in self._folders.values()]

    def find(
        self, prompt: TokenTrail, tenant: str, more_than: int
    ) -> tuple[KeptSession | None, int]:
        """See `kept.longest_kept`."""
        return longest_kept(self.sessions(), prompt, tenant, more_than)

    def save(self, session: Session) -> bool:
        """Write nothing: the folders are their owner's."""
        del session
        return False

    def open(self, kept: KeptSession) -> SavedSession | None:
        """A session to be read; None, with a warning, where it is not there any more."""
        found = self._folders.get(kept.session_id)
        if found is None:
            return None
        _, folder, target = found
        try:
            return open_checkpoint(folder, target)
        except CheckpointError as error:
            logger.warning("session=%s starts cold: %s", kept.session_id, error)
            self.remove([kept.session_id])
            return None

    def remove(self, session_ids: Collection[str]) -> int:
        """Look at them no more; their folders stay. Returns how many there were."""
        return sum(self._folders.pop(name, None) is not None for name in session_ids)

    def close(self) -> None:
        """Forget all. Idempotent."""
        self._folders.clear()
