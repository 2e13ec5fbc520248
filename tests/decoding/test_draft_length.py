"""The best length of a draft, against all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.decoding.draft_length import best_length


def rates(chances: list[float], costs: list[float], certain: float) -> list[float]:
    expected = [0.0, *itertools.accumulate(itertools.accumulate(chances, lambda a, b: a * b))]
    return [(certain + e) / cost for e, cost in zip(expected, costs, strict=False)]


@given(
    chances=st.lists(st.floats(0.0, 1.0), max_size=12),
    steps=st.lists(st.floats(0.0, 2.0), min_size=12, max_size=12),
    certain=st.floats(1.0, 40.0),
)
def test_no_length_has_a_higher_rate(
    chances: list[float], steps: list[float], certain: float
) -> None:
    costs = [1.0, *itertools.accumulate(steps, initial=1.0)][: len(chances) + 1]
    length, expected = best_length(chances, costs, certain)
    all_rates = rates(chances, costs, certain)
    assert all_rates[length] == pytest.approx(max(all_rates))
    assert (certain + expected) / costs[length] == pytest.approx(all_rates[length])


def test_what_only_ties_with_plain_decoding_is_not_drafted() -> None:
    assert best_length([0.5], [1.0, 1.5]) == (0, 0.0)
    assert best_length([0.51], [1.0, 1.5]) == (1, 0.51)
    assert best_length([], [1.0]) == (0, 0.0)


def test_a_step_in_the_cost_is_looked_behind() -> None:
    assert best_length([0.9] * 4, [1.0, 2.0, 2.0, 2.0, 2.0])[0] == 4


def test_a_draft_has_to_pay_for_the_turns_that_wait_with_it() -> None:
    costs = [16.0, 17.0]  # a row of sixteen, all alike
    assert best_length([0.9], costs, 1.0)[0] == 1
    assert best_length([0.9], costs, 16.0)[0] == 0
