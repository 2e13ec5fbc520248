"""Answers end where they begin to repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlite_agent.decoding.loop import Round
from dlite_agent.training.on_policy import _until_loop


def rounds(*parts: tuple[int, ...]) -> Iterator[Round]:
    for part in parts:
        yield Round(part, 0, 0, "null", None)
        assert part != (99,), "nothing is decoded behind the loop"


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, [1, 2, 3, 4]), (2, [1, 2, 3, 4]), (4, [1, 2, 3, 4]), (1, [1, 2, 3, 4])],
)
def test_answer_ends_before_what_it_has_already(size: int, expected: list[int]) -> None:
    assert _until_loop(rounds((1, 2), (3, 4, 1), (2,), (3, 4, 5), (99,)), size) == expected


def test_answer_without_a_loop_or_a_limit_is_whole() -> None:
    parts = [(1, 2), (3, 1), (2,), (4,)]
    assert _until_loop(rounds(*parts), 3) == [1, 2, 3, 1, 2, 4]
    assert _until_loop(rounds(*parts), 0) == [1, 2, 3, 1, 2, 4]
    assert _until_loop(rounds((7, 7, 7, 7)), 2) == [7]
