"""Prompt lookup: it finds what a naive search finds, and undoes exactly what it did."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.drafters.lookup import LookupDrafter, LookupState
from dlite_agent.errors import ConfigurationError
from dlite_agent.sampling import KeyedNoise

NOISE = KeyedNoise(0)


def propose(
    drafter: LookupDrafter, state: LookupState, ids: list[int], budget: int = 7
) -> list[int]:
    block = drafter.propose(state, ids[-1], None, len(ids) - 1, NOISE, budget)
    assert block.source == "lookup"
    return list(block.token_ids)


def naive(ids: list[int], sizes: tuple[int, ...], budget: int) -> list[int]:
    for size in sizes:
        for end in range(len(ids) - 1, size - 1, -1):
            if len(ids) > size and ids[end - size : end] == ids[-size:]:
                longer = list(ids)
                for i in range(min(budget, 2 * size - 1)):
                    longer.append(longer[end + i])
                return longer[len(ids) :]
    return []


def test_copies_what_followed_the_newest_occurrence() -> None:
    ids = [1, 2, 3, 10, 11, 1, 2, 3, 20, 21, 1, 2, 3]
    drafter = LookupDrafter()
    assert propose(drafter, drafter.start(ids), ids, 2) == [20, 21]


def test_longer_match_wins_over_a_newer_one() -> None:
    ids = [5, 6, 7, 8, 30, 31, 0, 7, 8, 40, 41, 5, 6, 7, 8]
    drafter = LookupDrafter()
    assert propose(drafter, drafter.start(ids), ids, 2) == [30, 31]


def test_repetition_is_continued_past_the_end() -> None:
    ids = [9, 1, 2, 3, 1, 2, 3]
    drafter = LookupDrafter()
    assert propose(drafter, drafter.start(ids), ids) == [1, 2, 3, 1, 2]
    ids = [4, 4, 4]
    assert propose(drafter, drafter.start(ids), ids) == [4, 4, 4]


def test_longer_match_is_continued_further() -> None:
    drafter = LookupDrafter()
    phrase = [1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    for size, count in ((4, 7), (3, 5), (2, 3)):
        ids = [*phrase, 99, *phrase[4 - size : 4]]
        assert propose(drafter, drafter.start(ids), ids) == phrase[4 : 4 + count]


def test_nothing_is_proposed_for_new_tokens_or_without_a_budget() -> None:
    drafter = LookupDrafter()
    ids = [1, 2, 3, 4, 5]
    assert propose(drafter, drafter.start(ids), ids) == []
    ids = [1, 2, 1, 2]
    assert propose(drafter, drafter.start(ids), ids, 0) == []
    assert propose(drafter, drafter.start([]), [7]) == []


@settings(max_examples=150)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    cuts=st.lists(
        st.tuples(st.integers(0, 60), st.lists(st.integers(0, 3), max_size=20)), max_size=5
    ),
    sizes=st.sampled_from([(4, 3, 2), (2,), (3, 1), (1,)]),
)
def test_any_history_of_edits_equals_a_naive_search(
    ids: list[int], cuts: list[tuple[int, list[int]]], sizes: tuple[int, ...]
) -> None:
    drafter = LookupDrafter(sizes=sizes, max_probes=1000)
    state = drafter.start(ids)
    for cut, more in cuts:
        kept = drafter.fork(state)
        before = list(ids)
        drafter.truncate_to(state, cut)
        drafter.commit(state, more)
        ids = ids[:cut] + more
        assert state.length == len(ids)
        if ids:
            assert propose(drafter, state, ids) == naive(ids, sizes, 7)
        if before:
            assert propose(drafter, kept, before) == naive(before, sizes, 7)


def test_growth_keeps_everything() -> None:
    rng = random.Random(0)
    ids = [rng.randrange(50) for _ in range(5000)]
    drafter = LookupDrafter(max_probes=5000)
    state = drafter.start(ids[:10])
    for start in range(10, 5000, 37):
        drafter.commit(state, ids[start : start + 37])
    assert propose(drafter, state, ids) == naive(ids, (4, 3, 2), 7)
    assert state.nbytes <= 30 * 5000


def test_work_of_a_round_does_not_grow_with_the_context() -> None:
    rng = random.Random(1)
    drafter = LookupDrafter()

    def round_s(length: int) -> float:
        ids = [rng.randrange(1000) for _ in range(length)]
        state = drafter.start(ids)
        times = []
        for _ in range(40):
            started = time.thread_time()
            drafter.propose(state, ids[-1], None, length, NOISE, 7)
            drafter.commit(state, [1, 2, 3])
            drafter.truncate_to(state, state.length - 3)
            times.append(time.thread_time() - started)
        return min(times)

    assert round_s(40_000) < 10 * round_s(1_100)


@pytest.mark.parametrize("sizes", [(), (0,), (2, 3), (3, 3)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="descending"):
        LookupDrafter(sizes=sizes)


@pytest.mark.parametrize("limits", [{"max_block": 0}, {"max_probes": 0}])
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        LookupDrafter(**limits)  # type: ignore[arg-type]  # one of two integers
