"""Sessions: what sync keeps, what forks share, and that nothing that fails or stops does harm."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import DraftBlock, DraftState
from dlite_agent.drafters.lookup import LookupDrafter, LookupState
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import CapacityError, RequestError, SessionBusyError, SessionError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import TargetHidden, TargetModel
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session, SyncReport
from dlite_agent.testing import (
    FaultyTarget,
    OracleDrafter,
    assert_kv_is_of,
    cold_decode,
    cold_forward,
    tiny_config,
    tiny_qwen3,
)
from tests.sessions.tapped_lookup import TappedLookup

LONG = [i * 7 % 512 for i in range(2 * PAGE_ROWS + 40)]
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93] * 3 + [3, 14, 15]
SAMPLER = Sampler(SamplingParams(temperature=1.0, top_k=8, top_p=1.0), KeyedNoise(5))


def limits(max_tokens: int = 10) -> StopRules:
    return StopRules(frozenset(), max_tokens)


class TapReader(TappedLookup):
    """Compares the taps with those of a cold forward."""

    def __init__(self, target: TargetModel) -> None:
        super().__init__()
        self.num_checked = 0
        self._target = target

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        assert isinstance(state, LookupState)
        assert hidden is not None
        ids = [state.index.token(i) for i in range(state.length)]
        assert ids[-1] == pending
        with cold_forward(self._target, ids[:-1], taps=(0, 1)) as (output, _):
            assert output.hidden is not None
            wanted = output.hidden.row(position - 1)
        torch.testing.assert_close(hidden.states, wanted.states, rtol=0.0, atol=1e-10)
        self.num_checked += 1
        return super().propose(state, pending, hidden, position, noise, budget)


class FailingDrafter(LookupDrafter):
    """Raises in the method that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = ""

    def start(self, token_ids: list[int]) -> LookupState:
        self._check("start")
        return super().start(token_ids)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        super().commit(state, token_ids)
        self._check("commit")

    def fork(self, state: DraftState | None) -> LookupState:
        self._check("fork")
        return super().fork(state)

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        assert isinstance(state, LookupState)
        assert state.length == position + 1, "the drafter knows other tokens than the session"
        return super().propose(state, pending, hidden, position, noise, budget)

    def _check(self, method: str) -> None:
        if self.failing == method:
            raise RuntimeError(f"{method} was told to fail")


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


@pytest.fixture
def session(target: DenseTransformer) -> Iterator[Session]:
    session = Session(target, LookupDrafter(), session_id="test", prefill_chunk=8)
    yield session
    check(target, session)
    session.close()
    assert target.pool.used_bytes == 0


def check(target: TargetModel, session: Session) -> None:
    """I1 to I5."""
    session.check_invariants()
    assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)


def answer(session: Session, max_tokens: int = 10) -> list[int]:
    rounds = session.decode(SAMPLER, limits(max_tokens))
    return [token_id for round_ in rounds for token_id in round_.token_ids]


def countdown(polls: int) -> Callable[[], bool]:
    """A `should_stop` that is true after some polls."""
    left = iter([False] * polls)
    return lambda: next(left, True)


class TestSync:
    def test_first_prompt_is_prefilled_in_chunks(
        self, target: DenseTransformer, session: Session
    ) -> None:
        rows_before = target.rows_computed
        report = session.sync(PROMPT)
        assert report == SyncReport(0, len(PROMPT), 0, "cold", None)
        assert target.rows_computed - rows_before == len(PROMPT)
        assert session.token_ids == PROMPT
        assert session.kv.length == len(PROMPT)

    def test_next_turn_costs_its_new_tokens_and_the_pending_one(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        first = answer(session)
        rows_before = target.rows_computed
        prompt = PROMPT + first + [7, 8, 9]
        report = session.sync(prompt)
        assert report == SyncReport(len(prompt) - 4, 4, 0, "prefix", None)
        assert target.rows_computed - rows_before == 4
        assert answer(session) == cold_decode(target, prompt, SAMPLER, limits())

    def test_same_prompt_again_forwards_one_token(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        first = answer(session)
        report = session.sync(PROMPT)
        assert report == SyncReport(len(PROMPT) - 1, 1, 10, "prefix", len(PROMPT))
        assert answer(session) == first

    def test_divergence_is_reported_where_it_is(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        answer(session)
        prompt = [*PROMPT[:20], 500, 501]
        report = session.sync(prompt)
        assert report == SyncReport(20, 2, len(PROMPT) + 10 - 20, "prefix", 20)
        assert answer(session) == cold_decode(target, prompt, SAMPLER, limits())

    def test_shorter_prompt_drops_the_rest(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        report = session.sync(PROMPT[:5])
        assert report == SyncReport(4, 1, len(PROMPT) - 5, "prefix", 5)
        assert session.token_ids == PROMPT[:5]

    def test_other_prompt_starts_cold(self, target: DenseTransformer, session: Session) -> None:
        session.sync(PROMPT)
        assert session.sync([500, 501]) == SyncReport(0, 2, len(PROMPT), "cold", 0)

    def test_sync_without_in_place_never_drops_more_than_the_last_turn(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT, in_place=False)
        second = PROMPT + answer(session) + [7, 8, 9]
        session.sync(second, in_place=False)
        session.sync([*second[:-1], 10], in_place=False)  # the last turn is asked in other words
        answer(session)
        session.sync(second, in_place=False)
        answer(session)
        kept = list(session.token_ids)
        with pytest.raises(SessionError, match=r"fork it at 30, or use in_place=True"):
            session.sync([*PROMPT[:30], 500], in_place=False)
        assert session.token_ids == kept
        session.sync([*PROMPT[:30], 500], in_place=True)

    def test_last_turn_starts_where_a_prompt_continued_the_session(self, session: Session) -> None:
        assert session.last_turn_start == 0
        session.sync(PROMPT)
        assert session.last_turn_start == 0
        second = PROMPT + answer(session) + [7, 8, 9]
        session.sync(second)
        assert session.last_turn_start == len(second) - 3
        session.sync([*second, 1])  # the same turn, since there was no answer
        assert session.last_turn_start == len(second) - 3
        answer(session)
        session.sync([*second, 1])  # once more
        assert session.last_turn_start == len(second) - 3
        session.rewind(12)
        assert session.last_turn_start == 12

    @pytest.mark.parametrize("prompt", [[], [-1], [5, 512]])
    def test_impossible_prompt_is_refused(self, session: Session, prompt: list[int]) -> None:
        session.sync(PROMPT)
        with pytest.raises(RequestError, match="prompt"):
            session.sync(prompt)
        assert session.token_ids == PROMPT

    def test_stale_logits_are_not_sampled_from(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        session.rewind(len(PROMPT) - 1)
        assert answer(session) == cold_decode(target, PROMPT[:-1], SAMPLER, limits())


class TestDecode:
    def test_answer_can_be_continued_without_a_sync(
        self, target: DenseTransformer, session: Session
    ) -> None:
        session.sync(PROMPT)
        parts = answer(session, 3) + answer(session, 4) + answer(session, 3)
        assert parts == cold_decode(target, PROMPT, SAMPLER, limits())

    def test_rewound_session_repeats_itself(self, session: Session) -> None:
        session.sync(PROMPT)
        first = answer(session)
        for length in (len(PROMPT) + 9, len(PROMPT) + 4, len(PROMPT)):
            session.rewind(length)
            assert session.token_ids == (PROMPT + first)[:length]
            assert answer(session, len(PROMPT) + 10 - length) == first[length - len(PROMPT) :]

    def test_empty_session_has_nothing_to_continue(self, session: Session) -> None:
        with pytest.raises(SessionError, match="sync a prompt first"):
            answer(session)

    def test_taps_of_the_last_row_reach_the_drafter(self, target: DenseTransformer) -> None:
        drafter = TapReader(target)
        session = Session(target, drafter, session_id="taps", prefill_chunk=8)
        session.sync(PROMPT)
        assert session.hidden is not None
        assert session.hidden.states.shape == (2, 1, 64)
        first = answer(session)
        session.sync(PROMPT + first + [3, 14])
        answer(session)
        assert drafter.num_checked > 4
        other = session.fork()
        assert other.hidden is not None
        answer(other, 3)
        session.rewind(session.kv.length)  # the last KV row stays
        assert session.hidden is not None
        session.rewind(session.kv.length - 1)
        assert session.hidden is None
        check(target, session)
        session.close()
        other.close()

    @pytest.mark.parametrize("polls", range(12))
    def test_stopped_answer_resumes_where_it_was(
        self, target: DenseTransformer, polls: int
    ) -> None:
        expected = cold_decode(target, PROMPT, SAMPLER, limits())
        drafter = OracleDrafter(PROMPT + expected, max_block=polls % 3)
        session = Session(target, drafter, session_id="test")
        session.sync(PROMPT)
        rounds = list(session.decode(SAMPLER, limits(), countdown(polls)))
        assert len(rounds) <= polls
        check(target, session)
        num_left = len(PROMPT) + 10 - len(session.token_ids)
        if num_left:
            assert rounds == [] or rounds[-1].finish is None
            answer(session, num_left)
        assert session.token_ids == PROMPT + expected
        session.close()

    @pytest.mark.parametrize("num_rounds", range(11))
    def test_closed_generator_keeps_what_it_gave(
        self, target: DenseTransformer, num_rounds: int
    ) -> None:
        session = Session(target, LookupDrafter(), session_id="test")
        session.sync(PROMPT)
        rounds = session.decode(SAMPLER, limits())
        given = [
            token_id
            for _, round_ in zip(range(num_rounds), rounds, strict=False)
            for token_id in round_.token_ids
        ]
        rounds.close()  # type: ignore[attr-defined]  # a generator
        check(target, session)
        assert session.token_ids == PROMPT + given
        prompt = [*session.token_ids, 7, 8]
        session.sync(prompt)
        assert answer(session) == cold_decode(target, prompt, SAMPLER, limits())
        session.close()

    def test_second_operation_has_to_wait(self, session: Session) -> None:
        session.sync(PROMPT)
        rounds = session.decode(SAMPLER, limits())
        next(rounds)
        for operation in (
            lambda: session.sync(PROMPT),
            lambda: session.rewind(3),
            lambda: answer(session),
        ):
            with pytest.raises(SessionBusyError, match="runs decode"):
                operation()
        assert len(list(rounds)) > 0
        session.rewind(3)


class TestCancelAndFail:
    @pytest.mark.parametrize("polls", range(6))
    def test_cancelled_prefill_keeps_its_chunks(
        self, target: DenseTransformer, session: Session, polls: int
    ) -> None:
        report = session.sync(PROMPT, should_stop=countdown(polls))
        kept = min(8 * polls, len(PROMPT))
        assert report == SyncReport(0, kept, 0, "cold", None, is_complete=kept == len(PROMPT))
        assert session.token_ids == PROMPT[:kept]
        check(target, session)
        again = session.sync(PROMPT)
        assert again.cached == min(kept, len(PROMPT) - 1)
        assert again.is_complete
        assert answer(session) == cold_decode(target, PROMPT, SAMPLER, limits())

    def test_sync_that_is_stopped_at_once_changes_nothing(self, session: Session) -> None:
        session.sync(PROMPT)
        answer(session)
        kept = list(session.token_ids)
        report = session.sync([1, 2, 3], should_stop=lambda: True)
        assert not report.is_complete
        assert (report.prefilled, report.rewound) == (0, 0)
        assert session.token_ids == kept

    def test_cut_prefill_is_still_the_same_turn(self, session: Session) -> None:
        session.sync(PROMPT)
        second = PROMPT + answer(session) + list(range(30))
        session.sync(second, should_stop=countdown(2))
        session.sync(second)
        assert session.last_turn_start == len(second) - 30

    @pytest.mark.parametrize("number", range(5))
    def test_failed_prefill_keeps_its_chunks(self, target: DenseTransformer, number: int) -> None:
        faulty = FaultyTarget(target, lambda n: n == number)
        session = Session(faulty, LookupDrafter(), session_id="test", prefill_chunk=8)
        with pytest.raises(RuntimeError, match="told to fail"):
            session.sync(PROMPT)
        assert session.token_ids == PROMPT[: 8 * number]
        check(target, session)
        assert session.sync(PROMPT).cached == 8 * number
        assert answer(session) == cold_decode(target, PROMPT, SAMPLER, limits())
        session.close()

    @pytest.mark.parametrize("number", range(10))
    def test_failed_round_keeps_what_was_committed(
        self, target: DenseTransformer, number: int
    ) -> None:
        expected = cold_decode(target, PROMPT, SAMPLER, limits())
        faulty = FaultyTarget(target, lambda n: n == number + 1)
        session = Session(faulty, LookupDrafter(), session_id="test")
        session.sync(PROMPT)
        given: list[int] = []
        try:
            for round_ in session.decode(SAMPLER, limits()):
                given += round_.token_ids
        except RuntimeError:
            check(target, session)
            assert session.token_ids == PROMPT + given
            given += answer(session, 10 - len(given))
        assert given == expected
        session.close()

    def test_full_pool_keeps_the_finished_chunks(self) -> None:
        page_bytes = PAGE_ROWS * tiny_config().kv_bytes_per_token(8)
        small = tiny_qwen3(dtype="float64", max_kv_bytes=2 * page_bytes)
        other = Session(small, NullDrafter(), session_id="other")
        other.sync([1, 2, 3])
        session = Session(small, NullDrafter(), session_id="test", prefill_chunk=64)
        prompt = [i % 500 for i in range(300)]
        with pytest.raises(CapacityError):
            session.sync(prompt)
        assert session.token_ids == prompt[:PAGE_ROWS]
        session.check_invariants()
        with pytest.raises(CapacityError):
            session.fork(3)
        other.close()
        check(small, session)
        assert session.sync(prompt).prefilled == 300 - PAGE_ROWS

    @pytest.mark.parametrize("method", ["start", "commit"])
    def test_failing_drafter_does_no_harm(self, target: DenseTransformer, method: str) -> None:
        drafter = FailingDrafter()
        session = Session(target, drafter, session_id="test", prefill_chunk=8)
        drafter.failing = method
        with pytest.raises(RuntimeError, match=method):
            session.sync(PROMPT)
        check(target, session)
        drafter.failing = ""
        session.sync(PROMPT)
        drafter.failing = "commit"
        with pytest.raises(RuntimeError, match="commit"):
            answer(session)
        check(target, session)
        assert session.token_ids == PROMPT
        drafter.failing = ""
        assert answer(session) == cold_decode(target, PROMPT, SAMPLER, limits())
        drafter.failing = "fork"
        used_before = target.pool.used_bytes
        with pytest.raises(RuntimeError, match="fork"):
            session.fork()
        assert target.pool.used_bytes == used_before
        session.close()


class TestFork:
    def test_fork_shares_pages_and_goes_its_own_way(self, target: DenseTransformer) -> None:
        session = Session(target, LookupDrafter(), session_id="donor")
        session.sync(LONG)
        used_before = target.pool.used_bytes
        other = session.fork()
        assert target.pool.used_bytes - used_before == target.pool.page_bytes
        assert other.nbytes < session.kv.pool.page_bytes * 3
        assert other.session_id == "donor-fork"
        named = other.fork(5, session_id="x")
        assert named.session_id == "x"
        named.close()
        expected = cold_decode(target, LONG, SAMPLER, limits())
        assert answer(other) == expected  # from the donor's logits, without a forward
        assert session.token_ids == LONG
        other.sync([*LONG, 5, 6])
        assert answer(session) == expected
        for one in (session, other):
            check(target, one)
            one.close()

    @pytest.mark.parametrize("at", [0, 1, PAGE_ROWS - 1, PAGE_ROWS, PAGE_ROWS + 1, 2 * PAGE_ROWS])
    def test_fork_at_a_prefix_is_that_prefix(self, target: DenseTransformer, at: int) -> None:
        session = Session(target, LookupDrafter(), session_id="donor")
        session.sync(LONG)
        answer(session, 3)
        other = session.fork(at)
        assert other.token_ids == LONG[:at]
        prompt = [*LONG[:at], 9, 9, 9]
        assert other.sync(prompt).cached == at
        assert answer(other, 3) == cold_decode(target, prompt, SAMPLER, limits(3))
        assert len(session.token_ids) == len(LONG) + 3
        for one in (session, other):
            check(target, one)
            one.close()

    def test_running_session_can_be_forked_between_rounds(self, target: DenseTransformer) -> None:
        expected = cold_decode(target, PROMPT, SAMPLER, limits())
        session = Session(target, LookupDrafter(), session_id="donor")
        session.sync(PROMPT)
        for round_ in session.decode(SAMPLER, limits()):
            other = session.fork()
            check(target, other)
            num_left = len(PROMPT) + 10 - len(other.token_ids)
            if round_.finish is None:
                answer(other, num_left)
            assert other.token_ids == PROMPT + expected
            other.close()
        assert session.token_ids == PROMPT + expected
        session.close()

    def test_fork_knows_its_last_turn(self, session: Session) -> None:
        session.sync(PROMPT)
        answer(session)
        other = session.fork()
        second = [*session.token_ids, 7]
        other.sync(second)
        assert other.last_turn_start == len(second) - 1
        other.close()

    def test_fork_of_a_new_session_is_empty(self, session: Session) -> None:
        assert session.fork().token_ids == []

    @pytest.mark.parametrize("length", [-1, len(PROMPT) + 1])
    def test_impossible_length_is_refused(self, session: Session, length: int) -> None:
        session.sync(PROMPT)
        with pytest.raises(ValueError, match="33 tokens"):
            session.fork(length)
        with pytest.raises(ValueError, match="33 tokens"):
            session.rewind(length)


class TestLife:
    def test_close_gives_everything_back(self, target: DenseTransformer) -> None:
        session = Session(target, LookupDrafter(), session_id="test")
        session.sync(PROMPT)
        assert session.nbytes > target.pool.page_bytes
        assert target.pool.used_bytes > 0
        session.close()
        session.close()
        assert session.is_closed
        assert target.pool.used_bytes == 0
        for operation in (lambda: session.sync(PROMPT), lambda: answer(session), session.fork):
            with pytest.raises(SessionError, match="closed"):
                operation()

    def test_closing_ends_a_running_answer(self, target: DenseTransformer) -> None:
        session = Session(target, LookupDrafter(), session_id="test")
        session.sync(PROMPT)
        rounds = session.decode(SAMPLER, limits())
        next(rounds)
        session.close()
        assert list(rounds) == []
        assert target.pool.used_bytes == 0

    def test_one_thread_gets_the_claim(self, session: Session) -> None:
        claims: list[bool] = []
        gate = threading.Barrier(8)

        def claim() -> None:
            gate.wait()
            claims.append(session.try_claim())

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(claims) == [False] * 7 + [True]
        assert session.busy
        session.unclaim()
        assert not session.busy
        assert session.try_claim()
