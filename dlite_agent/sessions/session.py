"""A session: token ids, their target KV and the drafter's state, kept valid by every operation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Never, Self

from dlite_agent.decoding.loop import Round, decode_steps
from dlite_agent.decoding.prefill import prefill_steps
from dlite_agent.decoding.steps import Pause, Steps, drive, next_item, run_alone
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.errors import SessionError
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.target import TargetModel
from dlite_agent.sampling import Sampler
from dlite_agent.sessions.checkpoint import open_checkpoint, save_session
from dlite_agent.sessions.manifest import Manifest, ModelKey
from dlite_agent.sessions.prefix import SyncReport, check_prompt, common_prefix_length
from dlite_agent.sessions.refusals import check_last_turn
from dlite_agent.sessions.restore import restore_steps
from dlite_agent.sessions.saved_session import SavedSession
from dlite_agent.sessions.snapshot import KVSnapshot
from dlite_agent.sessions.timeline import Timeline

__all__ = ["Session", "SyncReport", "never"]


def never() -> bool:
    """A `should_stop` that lets the operation run."""
    return False


class Session(Timeline):
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

    _saved: SavedSession | None = None  # that is being read

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
                check_last_turn(self.session_id, common, self.last_turn_start)
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

    def save(self, folder: str | Path) -> None:
        """Write ids and KV to a folder; one that holds an earlier state gets what is new.

        A crash while it runs leaves the folder as it was.

        Raises:
            CheckpointError: The folder cannot be written, or somebody else writes it.
            SessionBusyError: Another operation runs.
        """
        with self._running("save"):
            save_session(Path(folder), self.manifest(), partial(rows_to_host, self.kv))

    def snapshot(self) -> tuple[Manifest, KVSnapshot]:
        """What `save` would write now, for another thread to write; release it here.

        Raises:
            SessionBusyError: Another operation runs.
        """
        with self._running("snapshot"):
            return self.manifest(), KVSnapshot(self.kv)

    def manifest(self) -> Manifest:
        """What a save writes about this session, without segments."""
        ids = array("i", self.token_ids)
        model = ModelKey.of(self._target)
        start = self.last_turn_start
        labels = dict(self.labels)
        return Manifest(self.session_id, model, ids, self.kv.length, start, labels=labels)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        target: TargetModel,
        drafter: Drafter,
        *,
        session_id: str | None = None,
        prefill_chunk: int = 256,
    ) -> Self:
        """A session that goes on from where `save` left it.

        One row is forwarded, for the taps and logits that are not saved, and compared with the
        saved one. KV that is damaged or missing is prefilled from the ids; a warning says so.

        Args:
            folder: As it was given to `save`.
            target: The model that computed it.
            drafter: As for `Session`, any.
            session_id: Another name; None: the saved one.
            prefill_chunk: As for `Session`.

        Raises:
            CheckpointError: The folder holds no session, a damaged manifest, or another model's.
            CapacityError: The KV pool is full.
        """
        saved = open_checkpoint(Path(folder), target)
        name = session_id or saved.manifest.session_id
        session = cls(target, drafter, session_id=name, prefill_chunk=prefill_chunk)
        ids, num_rows = list(saved.token_ids), saved.manifest.num_rows
        try:
            run_alone(target, session.restore_steps(saved, num_rows, never))
            if len(session.token_ids) < num_rows:
                session.sync(ids[:num_rows])
            session._append_pending(ids[num_rows:])
        except BaseException:
            session.close()
            raise
        session.last_turn_start = saved.manifest.turn_start
        return session

    def restore_steps(
        self, saved: SavedSession, num_rows: int, may_wait: Callable[[], bool]
    ) -> Steps[Never, int]:
        """Fill this empty session; see `sessions.restore.restore_steps`. Closes `saved`."""
        with self._running("restore"), closing(saved):
            assert not self.token_ids, "only an empty session is restored"
            self._saved = saved
            target, drafter, state = self._target, self._drafter, self._state
            restored = yield from restore_steps(target, drafter, state, saved, num_rows, may_wait)
            self._is_draft_state_valid = self._has_answer = restored > 0
            self.last_turn_start = min(saved.manifest.turn_start, restored)
            self.labels = dict(saved.manifest.labels)
            return restored

    def close(self) -> None:
        """See `Timeline.close`; nobody writes to its pages any more when they are given back."""
        if self._saved is not None:
            self._saved.close()
        super().close()

    def _begin_turn(self, cached: int, common: int) -> int:
        """Drop what the prompt does not repeat; returns where its turn begins."""
        is_next_turn = self._has_answer and common == len(self.token_ids)
        turn_start = common if is_next_turn else min(common, self.last_turn_start)
        self._ensure_draft_state()
        self._truncate_to(cached)
        self._has_answer = False
        return turn_start

    def _append_pending(self, token_ids: list[int]) -> None:
        """Add at most one id without its row."""
        if token_ids:
            self._ensure_draft_state()
            self._drafter.commit(self._state.draft_state, token_ids)
            self._state.commit(token_ids, num_rows=0, hidden=None)
