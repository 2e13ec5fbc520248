"""What every session is, whatever runs on it: ids, KV and draft state that stay in step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from dlite_agent.decoding.state import DecodeState
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.target import TargetHidden, TargetModel
from dlite_agent.sessions.refusals import check_idle, check_length, check_open

__all__ = ["Timeline"]


class Timeline:
    """The part of a `Session` that computes nothing.

    Args:
        target: Owns the pool.
        drafter: Owns the draft state's form.
        session_id: A name for logs and hints.
        prefill_chunk: Most prompt tokens of one forward.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, *, session_id: str, prefill_chunk: int = 256
    ) -> None:
        self.session_id = session_id
        self.last_turn_start = 0
        """Where the last turn began: the ids before it were there when its sync extended them."""
        self.labels: dict[str, str] = {}
        """What its owner notes beside; saved with it."""
        self.is_parked = False
        """Whether nobody reads the turn that runs: who names the session may fork it meanwhile."""
        self.is_pinned = False
        """Whether its owner keeps it although others need its memory."""
        self._target = target
        self._drafter = drafter
        self._prefill_chunk = prefill_chunk
        self._state = DecodeState(target.new_cache())
        self._is_draft_state_valid = False
        self._has_answer = False
        self._operation: str | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._busy = False

    @property
    def token_ids(self) -> list[int]:
        """All ids, the pending one included. Not a copy: do not change it."""
        return self._state.token_ids

    @property
    def kv(self) -> KVCache:
        """Keys and values of the first n or n - 1 ids. Owned by the session."""
        return self._state.kv

    @property
    def hidden(self) -> TargetHidden | None:
        """Taps of the last KV row, [T, 1, E], where the drafter asks for them."""
        return self._state.hidden

    @property
    def nbytes(self) -> int:
        """Bytes of KV (shared pages in shares), logits, taps and draft state, and 8 for each id."""
        return self._state.nbytes

    @property
    def busy(self) -> bool:
        """Whether a turn has claimed this session."""
        with self._lock:
            return self._busy

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def set_room_short(self, is_room_short: bool) -> None:
        """Say whether KV rows behind the next belong to others, so that a decode must not draft."""
        self._state.is_room_short = is_room_short

    def try_claim(self) -> bool:
        """Mark the session busy; False when it already was. Any thread."""
        with self._lock:
            was_busy, self._busy = self._busy, True
            return not was_busy

    def unclaim(self) -> None:
        """Mark the session idle. Any thread."""
        self.is_parked = False
        with self._lock:
            self._busy = False

    def rewind(self, length: int) -> None:
        """Forget all ids from `length` on.

        Raises:
            ValueError: `length` is negative or more than the session has.
            SessionBusyError: Another operation runs.
        """
        check_length(self.session_id, length, len(self.token_ids))
        with self._running("rewind"):
            self._truncate_to(length)

    def fork(
        self,
        at: int | None = None,
        *,
        session_id: str | None = None,
        drafter: Drafter | None = None,
    ) -> Self:
        """A session with the first `at` ids (all by default), which shares KV pages with this one.

        May be called between the rounds of a running `decode`; this session is not changed. With
        another drafter it takes over nothing that this one's has seen but the ids.

        Raises:
            ValueError: `at` is negative or more than the session has.
            CapacityError: The KV pool has no page for the copy of the last one.
        """
        at = len(self.token_ids) if at is None else at
        check_length(self.session_id, at, len(self.token_ids))
        check_open(self.session_id, is_closed=self._is_closed)
        name = f"{self.session_id}-fork" if session_id is None else session_id
        other = type(self)(
            self._target,
            drafter or self._drafter,
            session_id=name,
            prefill_chunk=self._prefill_chunk,
        )
        other._state = self._state.fork(at)
        other.last_turn_start = min(at, self.last_turn_start)
        other._has_answer = self._has_answer
        if self._is_draft_state_valid and drafter is None:
            try:
                other._state.draft_state = self._drafter.fork(self._state.draft_state)
                self._drafter.truncate_to(other._state.draft_state, at)
            except BaseException:
                other.close()
                raise
            other._is_draft_state_valid = True
        return other

    def close(self) -> None:
        """Give the KV back. A decode that runs ends before its next round. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._state.truncate_to(0)
        self._state.kv.release()
        self._state.draft_state = None
        self._is_draft_state_valid = False

    def check_invariants(self) -> None:
        """Assert I1, I3, I5 and that no tentative row is left; I2 would take a recomputation."""
        self._state.check_invariants(may_be_tentative=self._operation is not None)
        assert 0 <= self.last_turn_start <= len(self.token_ids), "the last turn starts in the ids"
        assert self._operation is None or not self._is_closed, "I5: operation on a closed session"

    def _truncate_to(self, length: int) -> None:
        self._state.truncate_to(length)
        self.last_turn_start = min(self.last_turn_start, length)
        if self._is_draft_state_valid:
            self._drafter.truncate_to(self._state.draft_state, length)

    def _ensure_draft_state(self) -> None:
        """Give the drafter the ids again where an error left its state in doubt."""
        if not self._is_draft_state_valid:
            self._state.draft_state = self._drafter.start(list(self.token_ids))
            self._is_draft_state_valid = True

    @contextmanager
    def _running(self, operation: str) -> Iterator[None]:
        """Keep a second operation out, and the invariants when this one fails."""
        check_open(self.session_id, is_closed=self._is_closed)
        check_idle(self.session_id, self._operation, operation)
        self._operation = operation
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            self._is_draft_state_valid = False
            raise
        finally:
            self._operation = None
            if not self._is_closed:
                self._state.truncate_to(len(self.token_ids))
