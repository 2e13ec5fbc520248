"""The correction of a cost table by the rounds themselves."""

from __future__ import annotations

import random

import pytest

from dlite_agent.decoding.round_clock import RoundClock


def noted(plain: float, drafted: float, num_rounds: int, *, noise: float = 0.0) -> RoundClock:
    clock, rng = RoundClock(), random.Random(0)
    for _ in range(num_rounds):
        for share, is_drafted in ((plain, False), (drafted, True)):
            stall = 50.0 if rng.random() < noise else 1.0
            clock.note(share * rng.uniform(0.9, 1.1) * stall, 1.0, is_drafted=is_drafted)
    return clock


def test_a_table_that_is_right_or_wrong_for_both_alike_is_left_alone() -> None:
    assert noted(1.0, 1.0, 300).factor == pytest.approx(1.0, abs=0.05)
    assert noted(5.0, 5.0, 300).factor == pytest.approx(1.0, abs=0.05)


def test_drafted_rounds_that_are_dearer_are_priced_so() -> None:
    assert noted(1.0, 1.5, 300).factor == pytest.approx(1.5, rel=0.05)
    assert noted(2.0, 1.6, 300).factor == pytest.approx(0.8, rel=0.05)


def test_interruptions_count_little() -> None:
    assert noted(1.0, 1.3, 500, noise=0.05).factor == pytest.approx(1.3, rel=0.1)


def test_a_few_rounds_prove_nothing_and_nonsense_is_bounded() -> None:
    assert noted(1.0, 3.0, 10).factor == 1.0
    assert noted(1.0, 1e6, 3000).factor == 3.0
    clock = RoundClock()
    clock.note(0.0, 1.0, is_drafted=True)  # a clock that did not move
    assert clock.factor == 1.0


def test_pace_is_that_of_the_kind_of_round_that_is_seen_more() -> None:
    clock = RoundClock()
    assert clock.pace is None
    for _ in range(3):
        clock.note(5.0, 1.0, is_drafted=False)
    assert clock.pace is None
    for _ in range(400):
        clock.note(5.0, 1.0, is_drafted=False)
    assert clock.pace == pytest.approx(5.0, rel=0.05)
    for _ in range(800):
        clock.note(0.5, 1.0, is_drafted=True)
    assert clock.pace == 1.0
