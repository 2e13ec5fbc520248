"""Suffix drafts: what they copy, how sure they say they are, and that rewinds and forks hold."""

from __future__ import annotations

import random
import time

import pytest

from dlite_agent.drafters.drafter import DraftBlock
from dlite_agent.drafters.suffix import SuffixDrafter, SuffixState
from dlite_agent.drafters.suffix_index import Match, SuffixIndex
from dlite_agent.errors import ConfigurationError
from dlite_agent.sampling import KeyedNoise

NOISE = KeyedNoise(0)
WHOLE = SuffixDrafter(max_block=8, min_reached=0.0)


def propose(drafter: SuffixDrafter, state: SuffixState, budget: int = 8) -> DraftBlock:
    last = state.index.token(state.index.length - 1)
    block = drafter.propose(state, last, None, state.index.length - 1, NOISE, budget)
    assert block.source == "suffix"
    assert len(block.confidence) == len(block.token_ids) <= budget
    assert all(0.0 <= chance <= 1.0 for chance in block.confidence)
    return block


def drafted(ids: list[int], budget: int = 8) -> list[int]:
    return list(propose(WHOLE, WHOLE.start(ids), budget).token_ids)


def test_longest_match_wins_over_newer_ones() -> None:
    ids = [1, 2, 3, 4, 5, 60, 61, 0, 3, 4, 5, 70, 71, 9, 4, 5, 80, 81, 1, 2, 3, 4, 5]
    assert drafted(ids, 2) == [60, 61]


def test_newest_of_equal_matches_wins() -> None:
    assert drafted([1, 2, 10, 11, 1, 2, 20, 21, 1, 2], 2) == [20, 21]


def test_one_known_token_is_enough() -> None:
    assert drafted([1, 2, 3, 4, 1], 3) == [2, 3, 4]


def test_nothing_for_a_new_token_and_nothing_without_a_budget() -> None:
    assert drafted([1, 2, 3, 4]) == []
    assert drafted([1, 2, 1, 2], 0) == []
    assert propose(WHOLE, WHOLE.start([7])).token_ids == ()
    empty = WHOLE.start([])
    assert WHOLE.propose(empty, 0, None, 0, NOISE, 8) == DraftBlock(source="suffix")


def test_repetition_is_continued_past_the_end() -> None:
    assert drafted([9, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted([4, 4, 4]) == [4] * 8


def test_copy_goes_on_behind_an_edit() -> None:
    """The token behind the edit stood in many places; the one near the copy is taken."""
    call = [50, 51, 52, 53, 54, 55, 1, 56, 57, 58, 59]
    noise = [56, 90, 91, 56, 92, 93]
    state = WHOLE.start([*call, *noise, *call[:6]])
    assert list(propose(WHOLE, state).token_ids)[:2] == [1, 56]
    WHOLE.commit(state, [2])
    assert propose(WHOLE, state).token_ids == ()  # what replaces the value is new
    WHOLE.commit(state, [56])
    assert list(propose(WHOLE, state, 3).token_ids) == [57, 58, 59]
    cold = WHOLE.start([*call, *noise, *call[:6], 2, 56])
    assert list(propose(WHOLE, cold, 2).token_ids) == [92, 93]


def test_copy_goes_on_behind_an_insertion_and_a_deletion() -> None:
    source = list(range(100, 120))
    noise = [110, 5, 6, 110, 7, 8]
    for behind_edit in ([1, 2, 3, 110], [110]):
        state = WHOLE.start([*source, *noise, *source[:6]])
        propose(WHOLE, state)
        for token_id in behind_edit:
            WHOLE.commit(state, [token_id])
            block = propose(WHOLE, state, 3)
        assert list(block.token_ids) == [111, 112, 113]


def test_an_edit_long_ago_says_nothing() -> None:
    source = list(range(100, 120))
    state = WHOLE.start([*source, 110, 5, 6, *source[:6]])
    propose(WHOLE, state)
    WHOLE.commit(state, list(range(200, 280)))
    propose(WHOLE, state)
    WHOLE.commit(state, [110])
    assert list(propose(WHOLE, state, 2).token_ids) == [5, 6]


def test_confidence_grows_with_the_match_and_falls_with_disagreement() -> None:
    def first(ids: list[int]) -> float:
        return propose(WHOLE, WHOLE.start(ids)).confidence[0]

    phrase = list(range(10, 30))
    by_length = [first([*phrase, 99, *phrase[10 - n : 10]]) for n in (1, 2, 4, 8)]
    assert by_length == sorted(by_length)
    assert by_length[0] == pytest.approx(0.25)
    agreed = first([1, 2, 3, 50, 1, 2, 3, 51, 1, 2])
    split = first([1, 2, 3, 50, 1, 2, 4, 51, 1, 2])
    assert split < first([1, 2, 3, 50, 1, 2]) < agreed


def test_confidence_grows_along_a_copy() -> None:
    block = propose(WHOLE, WHOLE.start([1, 2, 3, 4, 5, 6, 7, 1, 2]))
    assert list(block.confidence) == sorted(block.confidence)


def test_block_ends_where_it_is_hardly_reached() -> None:
    drafter = SuffixDrafter(max_block=16, min_reached=0.1)
    ids = [1, *range(10, 40), 1]
    short = propose(drafter, drafter.start(ids), 16)
    assert 1 <= len(short.token_ids) < 16
    reached = 1.0
    for chance in short.confidence:
        reached *= chance
    assert reached >= 0.1
    long = [*range(10, 40), 99, *range(10, 26)]
    assert len(propose(drafter, drafter.start(long), 16).token_ids) == 16


def test_match_and_continuation_extend_a_draft_of_another() -> None:
    state = WHOLE.start([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert state.match() == Match(2, 1)
    match = state.match(ahead=[3, 4])
    assert match == Match(4, 3)
    assert state.continuation(match.position, 2, ahead=[3, 4]) == (5, 6)
    assert state.match(ahead=[77]) == Match(0, -1)
    assert state.index.length == 9


def test_matched_is_the_length_behind_the_last_proposal() -> None:
    state = WHOLE.start([1, 2, 3, 4, 1, 2, 3])
    propose(WHOLE, state)
    assert state.matched == 3
    WHOLE.commit(state, [50])
    propose(WHOLE, state)
    assert state.matched == 0


def test_rewind_and_fork_draft_as_a_session_that_never_had_the_rest() -> None:
    rng = random.Random(5)
    ids = [rng.randrange(12) for _ in range(600)]
    for length in (1, 50, 300, 599):
        state = WHOLE.start(ids)
        fork = WHOLE.fork(state)
        for other in (state, fork):
            WHOLE.truncate_to(other, length)
            fresh = WHOLE.start(ids[:length])
            assert propose(WHOLE, other) == propose(WHOLE, fresh)
        WHOLE.commit(state, [3, 4])
        assert fork.index.length == length
    assert WHOLE.fork(WHOLE.start(ids)).nbytes <= WHOLE.start(ids).nbytes + 10_000


def test_trail_after_a_rewind_proposes_only_what_the_session_holds() -> None:
    rng = random.Random(6)
    state = WHOLE.start([])
    for _ in range(300):
        WHOLE.commit(state, [rng.randrange(5) for _ in range(rng.randrange(1, 6))])
        block = propose(WHOLE, state)
        held = [state.index.token(i) for i in range(state.index.length)]
        assert set(block.token_ids) <= set(held)
        if rng.random() < 0.3:
            WHOLE.truncate_to(state, rng.randrange(state.index.length))
            if not state.index.length:
                WHOLE.commit(state, [0])


@pytest.mark.parametrize("ids", [[4] * 3000, [4, 5] * 1500, [4, 4, 5] * 1000])
def test_one_or_two_tokens_repeated_cost_a_bounded_search(ids: list[int]) -> None:
    drafter = SuffixDrafter()
    state = drafter.start(ids)
    started = time.thread_time()
    for _ in range(50):
        block = propose(drafter, state, 16)
        assert len(block.token_ids) == 16
        drafter.commit(state, list(block.token_ids[:3]))
    assert time.thread_time() - started < 1.0


def test_work_of_a_round_does_not_grow_with_the_context() -> None:
    rng = random.Random(1)

    def positions_read(length: int) -> int:
        index = SuffixIndex((8, 3, 1))
        index.append([rng.randrange(20) for _ in range(length)])
        return len(index.search(16, 32))

    assert max(positions_read(1_000), positions_read(40_000)) <= 16


@pytest.mark.parametrize("limits", [{"max_block": 0}, {"min_reached": -0.1}, {"min_reached": 1.1}])
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="use at least 1 and a chance"):
        SuffixDrafter(**limits)
