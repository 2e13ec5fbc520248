"""A session as the store keeps it: its tokens as an array, and what is known of its last turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlite_agent.models.kv_pool import PAGE_ROWS, KVCache
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["SIBLING_S", "Resident", "SessionInfo", "num_pages", "pages_held", "pages_to_grow"]

# Of production agents' tool results, 90 % are back within 30 s; five minutes leave room for builds.
_TOOL_WAIT_S = 300.0
# So long small requests are turned away rather than served from a waiting session's memory. Short,
# since an agent that was killed also leaves a session that waits.
_PROTECTED_S = 60.0
SIBLING_S = 300.0
"""A branch that a turn dropped waits so long for a retry that goes back to it."""
# A request is small next to a session that has at least so many times its tokens.
_SMALL_FACTOR = 4


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session from outside.

    Attributes:
        session_id: Its id.
        num_tokens: Tokens that it holds.
        nbytes: Its share of the memory.
        is_busy: A turn runs on it.
        is_pinned: It is not evicted, whoever needs room.
        waits_for_tool: Its last turn ended in a tool call, less than five minutes ago.
        idle_s: Seconds since its last turn ended; 0 while one runs.
        tenant: Whose it is.
        is_sibling: A branch that another session dropped, kept for a retry.
        sibling_of: That session's id, or empty.
        is_parked: A turn runs on it whose stream nobody reads.
    """

    session_id: str
    num_tokens: int
    nbytes: int
    is_busy: bool
    waits_for_tool: bool
    idle_s: float
    tenant: str = ""
    is_pinned: bool = False
    is_sibling: bool = False
    sibling_of: str = ""
    is_parked: bool = False


@dataclass(slots=True, eq=False)
class Resident:
    """One session of a store.

    Attributes:
        session: The session.
        trail: All its tokens while it is idle; while a turn runs, that turn's prompt.
        num_kept: Tokens at the start of `trail` that the session holds, whatever its turn did yet.
        planned_rows: KV rows that the running turn is expected to end with; 0 while it is idle.
        turn_start: Where the answer of its last turn begins.
        released_at: When its last turn ended, in seconds of the store's clock.
        ended_in_call: That turn ended in a tool call.
        tenant: Whose it is; nobody else finds it, unless it is `public.PUBLIC`.
        sibling_of: The session that dropped this branch; empty once a turn has gone on with it.
    """

    session: Session
    trail: TokenTrail
    num_kept: int = 0
    planned_rows: int = 0
    turn_start: int = 0
    released_at: float = 0.0
    ended_in_call: bool = False
    tenant: str = ""
    sibling_of: str = ""

    @property
    def is_sibling(self) -> bool:
        """Whether it is what another session dropped, and no turn has gone on with it."""
        return bool(self.sibling_of)

    def is_waiting(self, now: float) -> bool:
        """Whether a tool's result is still expected."""
        return self.ended_in_call and now - self.released_at < _TOOL_WAIT_S

    def is_old_sibling(self, now: float) -> bool:
        """Whether nobody went back to this branch for a while."""
        is_old = now - self.released_at >= SIBLING_S
        return self.is_sibling and is_old and not self.session.is_pinned

    def may_be_taken_over(
        self, common: int, now: float, *, is_named: bool, drops_answers: bool
    ) -> bool:
        """Whether it may be rewound to `common` tokens, rather than forked there.

        Being named allows to drop the last answer of a session that waits for its tool, and up to
        half of one that does not. Beyond that even its owner may mean another branch (a title, a
        sub-agent, a summary), and a fork costs pages only.

        Args:
            common: Tokens that a request repeats.
            now: The store's clock.
            is_named: The request names this session.
            drops_answers: The request may take the place of an earlier answer.
        """
        if self.session.busy:
            return False
        if common >= len(self.trail) - 1:
            return True
        if not drops_answers:
            return False
        is_answer_dropped = common >= self.turn_start
        if self.is_waiting(now):
            return is_named and is_answer_dropped
        return is_answer_dropped or (is_named and 2 * common >= len(self.trail))

    def may_be_evicted(self, num_tokens: int, now: float) -> bool:
        """Whether a request of `num_tokens` may take this session's memory.

        For a minute, small requests (titles, probes, sub-agents) leave a session alone that waits
        for its tool.
        """
        if self.session.busy or self.session.is_pinned:
            return False
        is_protected = self.is_waiting(now) and now - self.released_at < _PROTECTED_S
        return not (is_protected and _SMALL_FACTOR * num_tokens <= len(self.trail))

    def shared_with(self, prompt: list[int], trail: TokenTrail, *, more_than: int) -> int:
        """Length of the prefix shared with a prompt if it is more than `more_than`, else 0.

        Args:
            prompt: The prompt's ids, with which the result is confirmed.
            trail: The same ids.
            more_than: What is known already.
        """
        shared = self.trail.common_prefix(trail, more_than=more_than)
        token_ids = self.session.token_ids
        if self.session.busy:  # its turn may not have come to all of its prompt yet
            held = min(shared, len(token_ids))
            if token_ids[:held] != prompt[:held]:  # nor have dropped its old tail
                held = min(shared, self.num_kept)
            return held if held > more_than else 0
        if token_ids[:shared] == prompt[:shared]:
            return shared
        self.follow(0)  # somebody rewound the session meanwhile: look again
        return self.trail.common_prefix(trail, more_than=more_than)

    def begin(self, prompt: list[int], num_kept: int, planned_rows: int) -> None:
        """A turn with this prompt runs now, and keeps the first `num_kept` tokens."""
        self.trail.truncate_to(num_kept)
        self.trail.extend(prompt[num_kept:])
        self.num_kept = num_kept
        self.planned_rows = planned_rows

    def end(self) -> None:
        """The turn is over: the trail is of what the session holds."""
        self.planned_rows = 0
        self.follow(self.num_kept)

    def follow(self, num_same: int) -> None:
        """Bring the trail up to the session's tokens, of which the first `num_same` are in it."""
        token_ids = self.session.token_ids
        self.trail.truncate_to(min(num_same, len(token_ids)))
        self.trail.extend(token_ids[len(self.trail) :])

    def info(self, now: float) -> SessionInfo:
        """What `SessionStore.sessions` says of it."""
        is_busy = self.session.busy
        return SessionInfo(
            session_id=self.session.session_id,
            num_tokens=len(self.session.token_ids),
            nbytes=self.session.nbytes,
            is_busy=is_busy,
            waits_for_tool=not is_busy and self.is_waiting(now),
            idle_s=0.0 if is_busy else now - self.released_at,
            tenant=self.tenant,
            is_pinned=self.session.is_pinned,
            is_sibling=self.is_sibling,
            sibling_of=self.sibling_of,
            is_parked=self.session.is_parked,
        )


def num_pages(num_rows: int) -> int:
    """Pages that so many KV rows take."""
    return -(-num_rows // PAGE_ROWS)


def pages_held(residents: Iterable[Resident]) -> set[int]:
    """Numbers of all pages that these sessions use."""
    return {page for resident in residents for page in resident.session.kv.pages}


def pages_to_grow(kv: KVCache, num_kept: int, num_rows: int) -> int:
    """Pages that a cache takes from the pool to keep `num_kept` rows and grow to `num_rows`."""
    num_kept = min(num_kept, kv.length)
    first_freed = num_pages(num_kept)
    pages, pool = kv.pages, kv.pool
    num_freed = sum(pool.num_references(page) == 1 for page in pages[first_freed:])
    is_copied = num_kept % PAGE_ROWS > 0 and pool.num_references(pages[first_freed - 1]) > 1
    return max(0, num_pages(num_rows) - first_freed + is_copied - num_freed)
