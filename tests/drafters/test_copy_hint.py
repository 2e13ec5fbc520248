"""Hints are what followed the newest of the longest matches in the session's own ids."""

from __future__ import annotations

import random

from dlite_agent.drafters.copy_hint import MAX_MATCH, NO_HINT, TokenHistory, copy_hints


def naive(ids: list[int]) -> tuple[int, int]:
    best = (-1, 0)
    for place in range(len(ids) - 1):
        matched = 0
        while (
            matched < min(MAX_MATCH, place + 1)
            and ids[place - matched] == ids[len(ids) - 1 - matched]
        ):
            matched += 1
        if matched and matched >= best[1]:
            best = (ids[place + 1], matched)
    return best


def test_hint_is_that_of_a_plain_search() -> None:
    rng = random.Random(1)
    for _ in range(40):
        ids = [rng.randrange(4) for _ in range(rng.randrange(1, 60))]
        assert tuple(TokenHistory(ids).cursor(1).hint) == naive(ids)


def test_hints_after_pushes_are_those_of_a_plain_search() -> None:
    rng = random.Random(2)
    for size in (2, 3, 200):
        ids = [rng.randrange(size) for _ in range(300)]
        cursor = TokenHistory(ids[:150]).cursor(150)
        for end in range(150, 300):
            assert tuple(cursor.hint) == naive(ids[:end])
            cursor.push(ids[end])


def test_pushed_tokens_count_as_the_end_and_are_forgotten_with_the_cursor() -> None:
    history = TokenHistory([1, 2, 3, 4, 9, 1, 2])
    cursor = history.cursor(7)
    assert cursor.hint == (3, 2)
    cursor.push(3)
    assert cursor.hint == (4, 3)
    cursor.push(7)
    assert cursor.hint == NO_HINT
    cursor.push(1)
    assert cursor.hint == (2, 1)
    assert history.cursor(7).hint == (3, 2)
    assert history.length == 7


def test_history_follows_append_truncate_and_fork() -> None:
    history = TokenHistory([5, 6, 7, 5])
    other = history.fork()
    history.append([6] + [8] * 300)
    assert history.cursor(7).hint == (8, MAX_MATCH)
    history.truncate_to(5)
    assert history.cursor(7).hint == (7, 2)
    assert other.cursor(7).hint == (6, 1)
    assert other.nbytes == 16


def test_hints_of_a_transcript_know_nothing_of_what_follows() -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2]
    assert copy_hints(ids, [0, 1, 4, 5, 7]).tolist() == [[0, 0], [0, 0], [3, 2], [0, 0], [4, 2]]
