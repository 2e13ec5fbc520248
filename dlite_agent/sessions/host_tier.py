"""Sessions in host memory, for targets on another device: what the KV pool has no room for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.sessions.kept import KeptSession, longest_kept, now_s
from dlite_agent.sessions.manifest import Manifest
from dlite_agent.sessions.saved_session import SavedInMemory, SavedSession
from dlite_agent.sessions.segments import SEGMENT_ROWS
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["HostTier"]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    kept: KeptSession
    manifest: Manifest
    blocks: tuple[Tensor, ...]


class HostTier:
    """KV of evicted sessions. Used by the model's thread.

    Args:
        max_bytes: Most bytes of all of them; the least recently used go.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}  # the least recently used first

    @property
    def used_bytes(self) -> int:
        """Bytes of all sessions."""
        return sum(entry.kept.nbytes for entry in self._entries.values())

    def sessions(self) -> list[KeptSession]:
        """All sessions."""
        return [entry.kept for entry in self._entries.values()]

    def find(
        self, prompt: TokenTrail, tenant: str, more_than: int
    ) -> tuple[KeptSession | None, int]:
        """See `kept.longest_kept`."""
        return longest_kept(self.sessions(), prompt, tenant, more_than)

    def save(self, session: Session) -> bool:
        """Copy the KV of a session that loses its own; False where it is too large."""
        manifest = session.manifest()
        num_rows = manifest.num_rows
        blocks = tuple(
            rows_to_host(session.kv, start, min(start + SEGMENT_ROWS, num_rows))
            for start in range(0, num_rows, SEGMENT_ROWS)
        )
        nbytes = sum(block.nbytes for block in blocks)
        self.remove([session.session_id])
        if nbytes > self.max_bytes:
            return False
        while self.used_bytes + nbytes > self.max_bytes:
            self.remove([next(iter(self._entries))])
        kept = KeptSession.of(manifest, nbytes, now_s())
        self._entries[session.session_id] = _Entry(kept, manifest, blocks)
        return True

    def open(self, kept: KeptSession) -> SavedSession | None:
        """A session, which stays here."""
        entry = self._entries.pop(kept.session_id, None)
        if entry is None:
            return None
        self._entries[kept.session_id] = entry
        kept.used_at = now_s()
        return SavedInMemory(entry.manifest, entry.blocks)

    def remove(self, session_ids: Collection[str]) -> int:
        """Forget sessions; returns how many there were."""
        return sum(self._entries.pop(name, None) is not None for name in session_ids)

    def close(self) -> None:
        """Forget all sessions. Idempotent."""
        self._entries.clear()
