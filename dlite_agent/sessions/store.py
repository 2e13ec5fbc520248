"""All sessions of one target: which one a prompt continues, and which ones have to go for it.

Tokens decide. Hints say where to look first and whose tokens a request may drop; a wrong one costs
time and never changes the prompt. A request hurts nobody: it takes over a session only where that
loses nothing that somebody else may want, and otherwise forks it, which costs pages and no tokens.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Self

from dlite_agent.config import OnConflict
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.errors import CapacityError, SessionBusyError, SessionNotFoundError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.budget import KVBudget, Need
from dlite_agent.sessions.prefix_search import WORTH_WAITING, PrefixSearch
from dlite_agent.sessions.request import ComingPrefix, Origin, PrefixRequest, make_request
from dlite_agent.sessions.resident import Resident, SessionInfo, num_pages, pages_to_grow
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["ComingPrefix", "Origin", "SessionStore"]

logger = logging.getLogger(__name__)


class SessionStore:
    """Finds, forks, keeps and evicts the sessions of one target. Owned by one thread.

    Args:
        target: The model; its pool's budget is the store's too.
        drafter: Given to every session; or what gives each tenant's.
        max_bytes: Budget for the KV of all sessions in bytes; None: all of the pool.
        prefill_chunk: Most prompt tokens of one forward.
        on_conflict: What a request does that names a session on which a turn runs: `fork` it, or
            raise `SessionBusyError` (`error`; and `wait`, since the store never blocks: its caller
            asks again when that turn ended). A request that only shares a prefix forks, and so does
            one that names a session whose turn is parked.
        clock: Seconds, for the age of sessions that wait for a tool.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | Callable[[str], Drafter],
        *,
        max_bytes: int | None = None,
        prefill_chunk: int = 256,
        on_conflict: OnConflict = "fork",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._drafter_of = drafter if callable(drafter) else lambda _: drafter
        self._pool = target.new_cache().pool
        self._budget = KVBudget(self._pool, max_bytes)
        self._prefill_chunk = prefill_chunk
        self._on_conflict = on_conflict
        self._clock = clock
        self._entries: dict[str, Resident] = {}  # the least recently used first
        self._search = PrefixSearch(self._entries, clock)
        self._is_closed = False
        self.on_evict: Callable[[Session], None] | None = None
        """Is given each session before its KV goes."""
        self.on_branch: Callable[[Session, str], None] | None = None
        """Is given each session before a turn drops much of it, and what the branch is called."""
        self.on_shortage: Callable[[], bool] | None = None
        """Gives back pages that no session holds; returns whether there were any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """How many sessions there are."""
        return len(self._entries)

    @property
    def max_bytes(self) -> int:
        """Budget for the KV of all sessions."""
        return self._budget.max_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of KV in use; a page that several sessions share counts once."""
        return self._pool.used_bytes

    def acquire(  # noqa: PLR0913  # all that decides which session it is
        self,
        prompt_ids: Sequence[int],
        *,
        hint_session_id: str | None = None,
        in_place_ids: Set[str] = frozenset(),
        turn_start: int | None = None,
        answer_rows: int = 1,
        drops_answers: bool = True,
        tenant: str = "",
    ) -> tuple[Session, Origin]:
        """Claim the session from which this prompt costs the fewest tokens; `release` it after.

        That is the one with the longest common prefix: taken over where that loses nothing which
        somebody may want, else forked at the end of the prefix. Sync it with this prompt, in place.
        Room for the prompt is made first, by evicting idle sessions, least recently used first.
        Beside other running turns there must also be room for what all of them are going to need.

        Args:
            prompt_ids: All ids of the prompt, at least one.
            hint_session_id: A session that the client suggests (the last one of its thread).
            in_place_ids: Sessions that the request proved to know, by an unguessable tool-call id.
            turn_start: Where the generation prompt begins; None: at the end. What follows belongs
                to the answer, which the next request may drop.
            answer_rows: KV rows that the answer is expected to need.
            drops_answers: It may take the place of an earlier answer to the same prompt. One of
                several answers must not.
            tenant: Whose request it is; of sessions only its own are looked at, and public ones.

        Returns:
            The session, busy, and why it or its donor was chosen: `tool_call` when `in_place_ids`
            names it, `hint` when the hint does, `prefix` when only tokens do, `cold` for a new one.

        Raises:
            RequestError: The prompt is empty or holds something that is no token id.
            SessionBusyError: A turn runs on the named session, and forks are not wanted.
            CapacityError: The prompt does not fit, whatever may be evicted; nothing was evicted.
        """
        request = make_request(prompt_ids, hint_session_id, in_place_ids, answer_rows)
        request = replace(request, drops_answers=drops_answers, tenant=tenant)
        donor, common = self._search.longest(request)
        if donor is None:
            return self._begin(self._open_new(request, _new_id()), request, 0, turn_start), "cold"
        origin = request.origin(donor)
        entry = self._take_or_fork(donor, common, request)
        return self._begin(entry, request, common, turn_start), origin

    def acquire_new(
        self, prompt_ids: Sequence[int], *, answer_rows: int = 1, tenant: str = ""
    ) -> Session:
        """Claim an empty session, whatever others hold; else as `acquire`."""
        request = replace(make_request(prompt_ids, answer_rows=answer_rows), tenant=tenant)
        return self.acquire_named(request, None, None)

    def acquire_named(
        self, request: PrefixRequest, session_id: str | None, turn_start: int | None
    ) -> Session:
        """Claim an empty session of this name, or of a new one where it is taken or None."""
        name = session_id if session_id and session_id not in self._entries else _new_id()
        return self._begin(self._open_new(request, name), request, 0, turn_start)

    def shared_length(self, request: PrefixRequest) -> int:
        """How many of a prompt's tokens some session holds."""
        return self._search.longest(request)[1]

    def coming_prefix(self, prompt_ids: Sequence[int], tenant: str = "") -> ComingPrefix | None:
        """The longest prefix that a running turn will hold soon, if waiting for it saves prefill.

        To be asked before `acquire` by whoever can wait: a fork of it costs pages only.
        """
        return self._search.coming(replace(make_request(prompt_ids), tenant=tenant))

    def release(self, session: Session, *, waits_for_tool: bool = False) -> None:
        """Make a session idle again, whatever became of its turn.

        One that is empty or closed is forgotten, and so is any session once the store is closed.

        Args:
            session: As `acquire` returned it.
            waits_for_tool: The turn ended in a tool call: for five minutes the session goes after
                others and keeps its last answer, and for one it is not evicted for a small request.
        """
        session.unclaim()
        entry = self._entries.get(session.session_id)
        if entry is None or session.is_closed or not session.token_ids:
            self.discard(session)
            return
        entry.end()
        entry.released_at = self._clock()
        entry.ended_in_call = waits_for_tool
        self._touch(entry)

    def adopt(self, session: Session, tenant: str = "") -> Resident:
        """Keep an idle session of this store's target that was made elsewhere."""
        trail = TokenTrail(session.token_ids)
        entry = Resident(session, trail, tenant=tenant, released_at=self._clock())
        self._entries[session.session_id] = entry
        return entry

    def discard(self, session: Session) -> None:
        """Close a session and forget it."""
        self._entries.pop(session.session_id, None)
        session.close()

    def make_room(self, session: Session, num_tokens: int) -> None:
        """Evict idle sessions until this one can grow; cheap when it can already.

        Args:
            session: A busy session.
            num_tokens: Rows that it is about to add.

        Raises:
            CapacityError: Nothing that may be evicted is enough, or it is more than was planned and
                other running turns are going to need it; nothing was evicted.
        """
        length = session.kv.length
        count = pages_to_grow(session.kv, length, length + num_tokens)
        if count:
            entry = self._entries.get(session.session_id)
            is_planned = entry is not None and length + num_tokens <= entry.planned_rows
            planned = None if is_planned else count
            self._make_room(Need(count, planned, len(session.token_ids), entry, grows=True))

    def get(self, session_id: str) -> Session:
        """The session with this id.

        Raises:
            SessionNotFoundError: There is none: it was never here, was evicted, or its turn failed.
        """
        if session_id not in self._entries:
            raise SessionNotFoundError(
                f"no session has the id {session_id!r}; it may have been evicted: send the whole "
                "history without an id, which continues from the longest prefix that is left"
            )
        return self._entries[session_id].session

    def sessions(self) -> tuple[SessionInfo, ...]:
        """All sessions, the least recently used first."""
        now = self._clock()
        return tuple(entry.info(now) for entry in self._entries.values())

    def close(self) -> None:
        """Close all sessions; a busy one's decode ends before its next round. Idempotent."""
        self._is_closed = True
        for entry in list(self._entries.values()):
            self.discard(entry.session)

    def _take_or_fork(self, donor: Resident, common: int, request: PrefixRequest) -> Resident:
        session = donor.session
        is_locked = session.busy and not session.is_parked and self._on_conflict != "fork"
        if is_locked and request.origin(donor) != "prefix":
            raise SessionBusyError(
                f"session {session.session_id!r} runs a turn, and on_conflict is "
                f"{self._on_conflict!r}; wait until that turn ends, or use on_conflict='fork'"
            )
        kept = min(common, len(request.prompt) - 1)  # the last prompt token is always forwarded
        in_place = self._search.may_take_over(donor, common, request)
        if not in_place:
            try:
                self._make_room(
                    request.need(lambda rows: num_pages(rows) - kept // PAGE_ROWS, donor)
                )
            except CapacityError:
                if not donor.may_be_evicted(len(request.prompt) + 1, self._clock()):
                    raise
                in_place = True  # the donor would have to go, and its prefix is what is needed
        if in_place:
            self._make_room(request.need(lambda rows: pages_to_grow(session.kv, kept, rows), donor))
            self._keep_sibling(donor, kept, request)
            return donor
        drafter = None if donor.tenant == request.tenant else self._drafter_of(request.tenant)
        fork = session.fork(kept, session_id=_new_id(), drafter=drafter)
        return self.adopt(fork, request.tenant)

    def _keep_sibling(self, donor: Resident, kept: int, request: PrefixRequest) -> None:
        """Let what a turn is about to drop live on for a while, where memory is free."""
        now = self._clock()
        for entry in [entry for entry in self._entries.values() if entry.is_old_sibling(now)]:
            self.discard(entry.session)
        # The copy of a begun page, and all that the turn takes without the pages that it drops.
        count = 1 + num_pages(request.num_planned) - kept // PAGE_ROWS
        num_spare = self._budget.num_spare(self._entries.values())
        if len(donor.trail) - kept < WORTH_WAITING:
            return
        name = _new_id()
        if self.on_branch is not None:
            self.on_branch(donor.session, name)
        if num_spare >= count:
            sibling = self.adopt(donor.session.fork(session_id=name), donor.tenant)
            sibling.turn_start, sibling.released_at = donor.turn_start, now
            sibling.sibling_of = donor.session.session_id

    def _open_new(self, request: PrefixRequest, session_id: str) -> Resident:
        self._make_room(request.need(num_pages))
        chunk = self._prefill_chunk
        drafter = self._drafter_of(request.tenant)
        session = Session(self._target, drafter, session_id=session_id, prefill_chunk=chunk)
        return self.adopt(session, request.tenant)

    def _begin(
        self, entry: Resident, request: PrefixRequest, common: int, turn_start: int | None
    ) -> Session:
        num_kept = min(common, len(request.prompt) - 1)
        entry.begin(request.prompt, num_kept, request.num_planned)
        entry.turn_start = len(request.prompt) if turn_start is None else turn_start
        entry.sibling_of = ""
        is_claimed = entry.session.try_claim()
        assert is_claimed, "only idle sessions are taken over"
        self._touch(entry)
        return entry.session

    def _touch(self, entry: Resident) -> None:
        self._entries[entry.session.session_id] = self._entries.pop(entry.session.session_id)

    def _make_room(self, need: Need) -> None:
        if self._is_closed:
            raise CapacityError("the session store is closed; load the model again")
        try:
            victims = self._budget.victims(need, self._entries.values(), self._clock())
        except CapacityError:
            if self.on_shortage is None or not self.on_shortage():
                raise
            victims = self._budget.victims(need, self._entries.values(), self._clock())
        for victim in victims:
            if self._budget.num_free >= need.now:
                break
            self._evict(victim)

    def _evict(self, entry: Resident) -> None:
        session = entry.session
        logger.debug("evicted session=%s tokens=%s", session.session_id, len(session.token_ids))
        if self.on_evict is not None and not entry.is_sibling:
            self.on_evict(session)
        self.discard(session)


def _new_id() -> str:
    return secrets.token_hex(8)
