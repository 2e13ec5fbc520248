"""A session: token ids, their target KV and the drafter's state, kept valid by every operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Never

from dlite_agent.decoding.loop import Round, decode_steps
from dlite_agent.decoding.prefill import prefill_steps
from dlite_agent.decoding.state import DecodeState
from dlite_agent.decoding.steps import Pause, Steps, drive, next_item, run_alone
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.errors import SessionBusyError, SessionError
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.target import TargetHidden, TargetModel
from dlite_agent.sampling import Sampler
from dlite_agent.sessions.prefix import SyncReport, check_prompt, common_prefix_length

__all__ = ["Session", "SyncReport", "never"]


def never() -> bool:
    """A `should_stop` that lets the operation run."""
    return False


class Session:
    """One timeline of tokens that outlives the turns that wrote it.

    Used by one thread at a time, except `busy`, `try_claim` and `unclaim`, which any thread may
    call. After every operation, one that raised or was cancelled too, these hold for n token ids:

    - I1: `kv.length` is n - 1 or n.
    - I2: KV row i was computed from `token_ids[: i + 1]` and nothing else.
    - I3: `hidden` is None or belongs to row `kv.length - 1`.
    - I4: a failed or cancelled operation leaves a shorter session; finished prefill chunks and
      committed tokens stay.
    - I5: one operation at a time; a second one raises `SessionBusyError`.

    `sync` and `decode` run alone; `sync_steps` and `decode_steps` are the same as generators whose
    forwards somebody else runs, maybe together with those of other sessions.

    Args:
        target: Computes the rows and owns the pool.
        drafter: Proposes tokens in `decode`.
        session_id: A name for logs and hints.
        prefill_chunk: Most prompt tokens of one forward; bounds the time to cancel.
    """

    def __init__(
        self, target: TargetModel, drafter: Drafter, *, session_id: str, prefill_chunk: int = 256
    ) -> None:
        self.session_id = session_id
        self.last_turn_start = 0
        """Where the last turn began: the ids before it were there when its sync extended them."""
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
        state = self._state
        tensors = [state.logits, state.hidden.states if state.hidden is not None else None]
        kept = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        drafted = state.draft_state.nbytes if state.draft_state is not None else 0
        return state.kv.nbytes + kept + drafted + 8 * len(state.token_ids)

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
        with self._lock:
            self._busy = False

    def sync(
        self,
        prompt_ids: Sequence[int],
        *,
        in_place: bool = True,
        should_stop: Callable[[], bool] = never,
    ) -> SyncReport:
        """Run `sync_steps` alone."""
        steps = self.sync_steps(prompt_ids, in_place=in_place, should_stop=should_stop)
        return run_alone(self._target, steps)

    def sync_steps(
        self,
        prompt_ids: Sequence[int],
        *,
        in_place: bool = True,
        should_stop: Callable[[], bool] = never,
        chunk_rows: Callable[[], int] | None = None,
    ) -> Steps[Never, SyncReport]:
        """Make the session hold exactly `prompt_ids`, and the logits that follow them.

        Keeps the common prefix, drops the rest, and prefills what is new in chunks, with a pause
        before each. At least one prompt token is always forwarded, since logits and taps of cached
        positions are not stored.

        Args:
            prompt_ids: All ids of the prompt, at least one.
            in_place: The session may lose more than its last turn. False refuses that; fork it
                instead.
            should_stop: Asked before every chunk.
            chunk_rows: Most rows of the next chunk, asked after every pause; 0 pauses once more;
                None: `prefill_chunk`.

        Raises:
            RequestError: The prompt is empty or names an id outside the vocabulary.
            SessionError: `in_place` is False and the prompt leaves the session before its last
                turn; nothing was changed.
            SessionBusyError: Another operation runs.
            CapacityError: The KV pool is full; finished chunks are kept.
        """
        prompt = list(prompt_ids)
        check_prompt(prompt, self._target.config.vocab_size)
        with self._running("sync"):
            num_before = len(self.token_ids)
            common = common_prefix_length(self.token_ids, prompt)
            if not in_place:
                self._check_last_turn(common)
            # [0, cached) kept · [cached, len(prompt)) prefilled now
            cached = min(common, self.kv.length, len(prompt) - 1)
            yield Pause("prefill")
            prefilled = 0
            if may_start := not should_stop():
                turn_start = self._begin_turn(cached, common)
                size = chunk_rows or (lambda: self._prefill_chunk)
                try:
                    yield from prefill_steps(
                        self._target, self._drafter, self._state, prompt, should_stop, size
                    )
                finally:
                    prefilled = len(self.token_ids) - cached
                    if prefilled > 0:
                        self.last_turn_start = turn_start  # at most cached + 1
            return SyncReport(
                cached=cached,
                prefilled=prefilled,
                rewound=num_before - common if may_start else 0,
                origin="prefix" if cached else "cold",
                diverged_at=common if common < num_before else None,
                is_complete=cached + prefilled == len(prompt),
            )

    def decode(
        self, sampler: Sampler, limits: StopRules, should_stop: Callable[[], bool] = never
    ) -> Generator[Round, None, None]:
        """Run `decode_steps` alone; yields its rounds."""
        return drive(self._target, self.decode_steps(sampler, limits, should_stop))

    def decode_steps(
        self, sampler: Sampler, limits: StopRules, should_stop: Callable[[], bool] = never
    ) -> Steps[Round, None]:
        """Sample a turn, round by round; the last id stays pending.

        After a sync the first round holds the token that the prefill's logits gave, without a
        draft. A session that was rewound, or whose last turn was cut, goes on from its last token.
        Closing the generator, or `should_stop` (asked before every round), ends the turn; what was
        yielded is kept.

        Raises:
            SessionError: The session is empty or closed.
            SessionBusyError: Another operation runs.
            CapacityError: The KV pool is full.
        """
        with self._running("decode"):
            state = self._state
            if not state.token_ids:
                raise SessionError(f"session {self.session_id!r} is empty; sync a prompt first")
            state.ensure_successor()
            self._ensure_draft_state()

            def must_stop() -> bool:
                return self._is_closed or should_stop()

            target, drafter = self._target, self._drafter
            steps = decode_steps(target, drafter, state, sampler, limits, must_stop)
            with closing(steps):
                while round_ := (yield from next_item(steps)):
                    self._has_answer = True
                    yield round_

    def rewind(self, length: int) -> None:
        """Forget all ids from `length` on.

        Raises:
            ValueError: `length` is negative or more than the session has.
            SessionBusyError: Another operation runs.
        """
        self._check_length(length)
        with self._running("rewind"):
            self._truncate_to(length)

    def fork(self, at: int | None = None, *, session_id: str | None = None) -> Session:
        """A session with the first `at` ids (all by default), which shares KV pages with this one.

        May be called between the rounds of a running `decode`; this session is not changed.

        Raises:
            ValueError: `at` is negative or more than the session has.
            CapacityError: The KV pool has no page for the copy of the last one.
        """
        at = len(self.token_ids) if at is None else at
        self._check_length(at)
        self._check_open()
        name = f"{self.session_id}-fork" if session_id is None else session_id
        other = Session(
            self._target, self._drafter, session_id=name, prefill_chunk=self._prefill_chunk
        )
        other._state = self._state.fork(at)
        other.last_turn_start = min(at, self.last_turn_start)
        other._has_answer = self._has_answer
        if self._is_draft_state_valid:
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

    def _begin_turn(self, cached: int, common: int) -> int:
        """Drop what the prompt does not repeat; returns where its turn begins."""
        is_next_turn = self._has_answer and common == len(self.token_ids)
        turn_start = common if is_next_turn else min(common, self.last_turn_start)
        self._ensure_draft_state()
        self._truncate_to(cached)
        self._has_answer = False
        return turn_start

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
        self._check_open()
        if self._operation is not None:
            raise SessionBusyError(
                f"session {self.session_id!r} runs {self._operation}, so {operation} has to wait; "
                "finish or close that first, or fork"
            )
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

    def _check_last_turn(self, common: int) -> None:
        if common < self.last_turn_start:
            raise SessionError(
                f"session {self.session_id!r} shares {common} tokens with the prompt, but its "
                f"last turn starts at {self.last_turn_start}; fork it at {common}, or use "
                "in_place=True"
            )

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= len(self.token_ids):
            raise ValueError(
                f"length is {length!r}, but session {self.session_id!r} has "
                f"{len(self.token_ids)} tokens"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionError(
                f"session {self.session_id!r} is closed; sync the prompt in a new one"
            )
