"""The tiers below the KV pool: what goes there, and when it pays to fetch it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Never

import torch

from dlite_agent.config import EngineConfig
from dlite_agent.decoding.steps import Steps
from dlite_agent.errors import CapacityError, CheckpointError
from dlite_agent.models.device import free_memory_bytes
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.disk_tier import DiskTier
from dlite_agent.sessions.folder_tier import FolderTier
from dlite_agent.sessions.host_tier import HostTier
from dlite_agent.sessions.journal import Journal
from dlite_agent.sessions.kept import BRANCH_OF, BRANCH_UNTIL, KeptSession, Tier
from dlite_agent.sessions.manifest import MANIFEST
from dlite_agent.sessions.request import PrefixRequest
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.store import SessionStore

__all__ = ["Rate", "Tiers", "open_tiers"]

logger = logging.getLogger(__name__)

# Fewer tokens are prefilled sooner than looked for.
_MIN_GAIN = 32


class Rate:
    """Units a second, as measured: an average in which the latest half of the work counts half."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0

    def add(self, units: float, seconds: float) -> None:
        """Count some work."""
        self._units = self._units / 2 + units
        self._seconds = self._seconds / 2 + seconds

    def seconds(self, units: float) -> float | None:
        """How long so many units take; None before anything was measured."""
        return units * self._seconds / self._units if self._units else None


class Tiers:
    """Keeps sessions in host memory and on disk, and gives them back. Used by the model's thread.

    Args:
        store: The sessions in the pool.
        host: For what the pool evicts; None where the pool itself is in host memory.
        disk: For every session; None for no tier there.
        is_measured: Speeds decide whether a session is fetched or computed; False: it always is
            fetched, so that nothing that is measured decides how a turn is computed.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        host: HostTier | None = None,
        disk: DiskTier | None = None,
        is_measured: bool = True,
    ) -> None:
        self._store = store
        self._folders = FolderTier()
        self._tiers: dict[Tier, HostTier | DiskTier | FolderTier] = {}
        if host is not None:
            self._tiers["host"] = host
        if disk is not None:
            self._tiers["disk"] = disk
        self._tiers["folder"] = self._folders
        self.disk = disk
        self._is_measured = is_measured
        self._reads: dict[Tier, Rate] = {name: Rate() for name in self._tiers}
        self._prefill = Rate()
        store.on_evict = self._keep
        store.on_branch = self._keep_branch

    def kept(self) -> list[tuple[Tier, KeptSession]]:
        """All sessions of all tiers but the pool."""
        return [(name, kept) for name, tier in self._tiers.items() for kept in tier.sessions()]

    def attach(self, tenant: str, journal: Journal, made_by: str) -> None:
        """Keep a tenant's journal on disk, if there is such a tier; see `DiskTier.attach`."""
        if self.disk is not None:
            self.disk.attach(tenant, journal, made_by)

    def hints(self, tenant: str) -> list[tuple[str, str]]:
        """What a tenant's clients called the kept sessions, the latest used last."""
        sessions = [kept for _, kept in self.kept() if kept.tenant == tenant and kept.hint]
        sessions.sort(key=lambda kept: kept.used_at)
        return [(kept.hint, kept.session_id) for kept in sessions]

    def forget_turns(self, tenant: str, journal: Journal, session_ids: set[str] | None) -> None:
        """Forget what sessions, or all of a tenant (None), generated: in memory and on disk."""
        if session_ids is None:
            journal.clear()
        else:
            journal.forget(session_ids)
        if self.disk is not None:
            self.disk.rewrite_journal(tenant)

    def note_prefill(self, num_rows: int, seconds: float) -> None:
        """Count a prefill, for what it would take instead of a fetch."""
        if num_rows >= _MIN_GAIN and seconds > 0:
            self._prefill.add(num_rows, seconds)

    def save(self, session: Session, labels: Mapping[str, str]) -> None:
        """Keep an idle session on disk, if there is such a tier; costs a copy of what is new.

        Args:
            session: After its turn.
            labels: `kept.TENANT`, `kept.HINT` and `kept.ANSWER_START` of it.
        """
        if self.disk is None or session.is_closed or not session.token_ids:
            return
        for label in (BRANCH_OF, BRANCH_UNTIL):  # a turn has gone on with it
            session.labels.pop(label, None)
        session.labels.update(labels)
        self.disk.save(session)

    def restore_steps(
        self, request: PrefixRequest, turn_start: int | None, may_wait: Callable[[], bool]
    ) -> Steps[Never, Session | None]:
        """Claim a session that holds more of a prompt than any in the pool, from a tier; or None.

        It has the name of the kept one where it can take its place, as `SessionStore.acquire` has
        it, else a new one.

        Args:
            request: Whose prompt.
            turn_start: As `SessionStore.acquire` takes it.
            may_wait: There is something else to do meanwhile.
        """
        resident = self._store.shared_length(request)
        found = self._find(request, resident)
        if found is None:
            return None
        name, kept, common = found
        session_id = kept.session_id if _may_continue(kept, common, request) else None
        common = min(common, len(request.prompt) - 1)  # one is always forwarded
        saved = self._tiers[name].open(kept)  # before room is made, which may cost it
        if saved is None:
            return None
        restored = 0
        with closing(saved):
            try:
                session = self._store.acquire_named(request, session_id, turn_start)
            except CapacityError:
                return None  # whoever asks finds the same, with less to make room for
            try:
                restored = yield from session.restore_steps(saved, common, may_wait)
            except CapacityError:
                logger.debug("no room to restore session=%s", kept.session_id)
            finally:
                if restored == 0:
                    self._store.release(session)
        if saved.read_s > 0:
            self._reads[name].add(saved.num_bytes, saved.read_s)
        if restored == 0:
            if saved.problem:
                self._tiers[name].remove([kept.session_id])
            return None
        logger.info(
            "restored session=%s from=%s tokens=%d of=%d", kept.session_id, name, restored, common
        )
        return session

    def add_folder(self, folder: Path, target: TargetModel, tenant: str) -> int:
        """Let a tenant find a session that was saved to a folder; returns its KV rows, or 0.

        Raises:
            CheckpointError: It is damaged or another model's.
        """
        if not (folder / MANIFEST).exists():
            return 0
        return self._folders.add(folder, target, tenant).num_rows

    def forget_copies(self, session_ids: Collection[str]) -> None:
        """Drop sessions from memory; what is on disk stays."""
        for name, tier in self._tiers.items():
            if name != "disk":
                tier.remove(session_ids)

    def remove(self, session_ids: Collection[str]) -> None:
        """Delete sessions from all tiers."""
        for tier in self._tiers.values():
            tier.remove(session_ids)

    def flush(self) -> None:
        """Save every idle session of the pool, and wait until all is written."""
        if self.disk is None:
            return
        for info in self._store.sessions():
            session = self._store.get(info.session_id)
            if not info.is_busy and not info.is_sibling and session.token_ids:
                self.disk.flush()  # one at a time, so that none is turned away
                self.disk.save(session)
        self.disk.flush()

    def close(self) -> None:
        """Flush, and give the tiers' memory and folder back. Idempotent."""
        self.flush()
        self._store.on_evict = self._store.on_branch = None
        for tier in self._tiers.values():
            tier.close()
        self._tiers, self.disk = {}, None

    def _keep(self, session: Session) -> None:
        """A session loses its KV in the pool."""
        if session.token_ids and session.kv.length:
            for tier in self._tiers.values():
                tier.save(session)

    def _keep_branch(self, session: Session, name: str) -> None:
        """A turn drops what a session holds; a retry may want it, after a restart too."""
        if self.disk is not None:
            self.disk.branch(session.session_id, name)

    def _find(self, request: PrefixRequest, resident: int) -> tuple[Tier, KeptSession, int] | None:
        """The longest prefix that pays, the faster tier first."""
        best = resident + _MIN_GAIN - 1
        found = None
        for name, tier in self._tiers.items():
            kept, common = tier.find(request.trail, request.tenant, best)
            if kept is not None and self._pays(name, kept, common, resident):
                best, found = common, (name, kept, common)
        return found

    def _pays(self, name: Tier, kept: KeptSession, common: int, resident: int) -> bool:
        """Whether it is fetched sooner than computed; true as long as nobody knows."""
        row_bytes = kept.nbytes / max(1, kept.num_rows)
        fetch_s = self._reads[name].seconds(common * row_bytes)
        prefill_s = self._prefill.seconds(common - resident)
        if not self._is_measured or fetch_s is None or prefill_s is None:
            return True
        return fetch_s < prefill_s


def open_tiers(config: EngineConfig, store: SessionStore, target: TargetModel) -> Tiers:
    """The tiers of an engine. One whose folder cannot be used is left out, with a warning."""
    host = disk = None
    if target.device.type != "cpu":
        free_bytes = free_memory_bytes(torch.device("cpu"))
        host = HostTier(config.max_host_bytes or free_bytes // 4)
    folder = config.kv_folder()
    if folder is not None:
        try:
            disk = DiskTier(folder, target, config.max_disk_bytes)
        except CheckpointError as error:
            logger.warning("no session is kept on disk: %s", error)
    return Tiers(store, host=host, disk=disk, is_measured=not config.reproducible)


def _may_continue(kept: KeptSession, common: int, request: PrefixRequest) -> bool:
    """Whether the kept session may be rewound to `common` tokens and go on under its name."""
    if common >= len(kept.trail) - 1:
        return True
    return request.drops_answers and common >= kept.answer_start
