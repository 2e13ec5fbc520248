"""Pages of the KV pool: who may take how many, and which idle sessions go for it.

A running turn takes its pages as it grows, so what is free now may be spoken for. Each running turn
therefore has a plan, the rows that it is expected to end with, and a new one is let in beside
others only where all plans fit. What a turn needs beyond its plan it gets while all plans still
fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from dlite_agent.errors import CapacityError
from dlite_agent.models.kv_pool import PAGE_ROWS, KVPool
from dlite_agent.sessions.resident import Resident, pages_held, pages_to_grow

__all__ = ["KVBudget", "Need"]


@dataclass(frozen=True, slots=True)
class Need:
    """Pages that a turn asks for.

    Attributes:
        now: Pages that have to be free now.
        planned: Pages until its planned end, `now` included; None: they are part of a plan that was
            accepted, so those of others do not count.
        num_tokens: Size of its request, for what it may evict.
        keep: The session that it continues or forks, never evicted for it.
        grows: `keep` is the turn's own session, and `planned` takes the place of its plan.
    """

    now: int
    planned: int | None
    num_tokens: int
    keep: Resident | None = None
    grows: bool = False


class KVBudget:
    """How much of a pool is left, by plan.

    Args:
        pool: The pool.
        max_bytes: Budget in bytes, at most the pool's.
    """

    def __init__(self, pool: KVPool, max_bytes: int | None = None) -> None:
        self._pool = pool
        self.max_bytes = min(max_bytes or pool.max_bytes, pool.max_bytes)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds now."""
        return (self.max_bytes - self._pool.used_bytes) // self._pool.page_bytes

    def num_spare(self, residents: Collection[Resident]) -> int:
        """Pages that nobody holds, and that no running turn is going to need by its plan."""
        return self.num_free - sum(_num_owed(entry) for entry in residents if entry.session.busy)

    def victims(self, need: Need, residents: Collection[Resident], now_s: float) -> list[Resident]:
        """Idle sessions that may go for it, in the order in which they should, until it is met.

        Branches that were dropped go first, and sessions that wait for a tool last; in each group
        the least recently used first.

        Args:
            need: What is asked for.
            residents: All sessions, the least recently used first.
            now_s: The store's clock.

        Raises:
            CapacityError: Even without all of them it is too much.
        """
        missing = need.now - self.num_free
        lacking = missing
        if need.planned is not None:
            own = need.keep if need.grows else None
            running = [entry for entry in residents if entry.session.busy and entry is not own]
            if running:
                owed = sum(map(_num_owed, running))
                lacking = max(missing, need.planned + owed - self.num_free)
        if lacking <= 0:
            return []
        idle = [entry for entry in residents if entry is not need.keep]
        victims = [entry for entry in idle if entry.may_be_evicted(need.num_tokens, now_s)]
        others = [entry for entry in residents if entry not in victims]
        if lacking > self._num_freed(victims):
            raise CapacityError(self._shortage(need, others))
        if missing <= 0:
            return []
        return sorted(victims, key=lambda e: (not e.is_sibling, e.is_waiting(now_s)))

    def _num_freed(self, victims: list[Resident]) -> int:
        """Pages that nobody holds when all of these are gone; a save may hold some, too."""
        held = Counter(page for entry in victims for page in entry.session.kv.pages)
        return sum(self._pool.num_references(page) == count for page, count in held.items())

    def _shortage(self, need: Need, others: list[Resident]) -> str:
        page_bytes = self._pool.page_bytes
        count = max(need.now, need.planned or 0)
        num_busy = sum(entry.session.busy for entry in others)
        held = len(pages_held(others)) * page_bytes
        return (
            f"the request needs {count * page_bytes} more bytes of KV ({count * PAGE_ROWS} tokens)"
            f", but max_kv_bytes is {self.max_bytes} and {held} bytes of it cannot be evicted "
            f"({num_busy} running turns, {len(others) - num_busy} sessions that wait for a tool or "
            "that the request reuses); try again in a minute, shorten the prompt, or raise "
            "max_kv_bytes"
        )


def _num_owed(entry: Resident) -> int:
    """Pages that a running turn's plan still has to take."""
    kv = entry.session.kv
    return pages_to_grow(kv, kv.length, max(entry.planned_rows, kv.length))
