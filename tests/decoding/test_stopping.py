"""When a turn ends."""

from __future__ import annotations

import pytest

from dlite_agent.decoding.stopping import StopRules


def test_stop_wins_over_length() -> None:
    rules = StopRules(frozenset({2}), 3)
    assert rules.finish(5, 1) is None
    assert rules.finish(2, 1) == "stop"
    assert rules.finish(5, 3) == "length"
    assert rules.finish(2, 3) == "stop"


def test_draft_budget_leaves_room_for_the_token_that_a_round_adds() -> None:
    rules = StopRules(frozenset(), 3)
    assert [rules.draft_budget(n) for n in range(4)] == [2, 1, 0, 0]


def test_max_tokens_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        StopRules(frozenset(), 0)
