"""The thinking budget over token ids alone."""

from __future__ import annotations

import pytest

from dlite_agent.decoding.thoughts import ThoughtBudget, ThoughtCounter

OPEN, CLOSE, GAP = 90, 91, 92


def make(max_tokens: int, *, starts_open: bool = False) -> ThoughtCounter:
    return ThoughtCounter(ThoughtBudget(max_tokens, (CLOSE, GAP), OPEN, starts_open))


def run(counter: ThoughtCounter, wanted: list[int], size: int = 1) -> list[int]:
    """What is committed when the target wants these tokens, `size` of them at a time."""
    committed: list[int] = []
    while wanted:
        tokens = list(counter.forced) or wanted[: 1 + counter.num_free(wanted[: size - 1])]
        wanted = wanted if counter.forced else wanted[len(tokens) :]
        counter.advance(tokens)
        committed += tokens
    return committed + list(counter.forced)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_spent_budget_closes_the_thought(size: int) -> None:
    counter = make(2)
    committed = run(counter, [OPEN, 1, 2, 3, 4], size)
    assert committed == [OPEN, 1, 2, CLOSE, GAP, 3, 4]
    assert counter.was_cut


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_thought_that_ends_in_time_is_left_alone(size: int) -> None:
    counter = make(3)
    assert run(counter, [OPEN, 1, 2, CLOSE, 5, 6, 7, 8], size) == [OPEN, 1, 2, CLOSE, 5, 6, 7, 8]
    assert not counter.was_cut


def test_a_thought_that_ends_exactly_in_time_is_closed_once() -> None:
    assert run(make(3), [OPEN, 1, 2, CLOSE, 5]) == [OPEN, 1, 2, CLOSE, 5]
    assert run(make(2), [OPEN, 1, 2, 5]) == [OPEN, 1, 2, CLOSE, GAP, 5]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_no_budget_closes_at_once(size: int) -> None:
    assert run(make(0, starts_open=True), [5, 6], size) == [CLOSE, GAP, 5, 6]
    assert run(make(0), [5, OPEN, 6], size) == [5, OPEN, CLOSE, GAP, 6]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_second_thought_has_what_the_first_left(size: int) -> None:
    committed = run(make(3), [OPEN, 1, 2, CLOSE, 5, OPEN, 3, 4, 6], size)
    assert committed == [OPEN, 1, 2, CLOSE, 5, OPEN, 3, CLOSE, GAP, 4, 6]
    assert run(make(1), [OPEN, 1, OPEN, 2], size) == [OPEN, 1, CLOSE, GAP, OPEN, CLOSE, GAP, 2]


def test_an_opening_inside_a_thought_is_a_token_of_it() -> None:
    assert run(make(2), [OPEN, OPEN, 1, 2]) == [OPEN, OPEN, 1, CLOSE, GAP, 2]


def test_a_draft_is_cut_where_something_is_forced() -> None:
    counter = make(2)
    assert counter.num_free([7, OPEN, 1, 2, 3]) == 3
    assert counter.num_free([7, 8]) == 2
    counter.advance([OPEN, 1])
    assert counter.num_free([2, 3]) == 0
    assert counter.forced == ()


def test_a_budget_without_a_closing_token_is_refused() -> None:
    with pytest.raises(ValueError, match="closing id"):
        ThoughtBudget(3, ())
    with pytest.raises(ValueError, match="at least 0"):
        ThoughtBudget(-1, (CLOSE,))
