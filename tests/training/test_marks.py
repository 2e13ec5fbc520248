"""What an agent waits for is sampled more."""

from __future__ import annotations

from dlite_agent.training.marks import turn_marks

OPEN, CLOSE = 90, 91


def test_calls_and_what_follows_a_tool_result_are_marked() -> None:
    answer = [1, OPEN, 2, 3, CLOSE, 4, OPEN, 5, CLOSE]
    marks = turn_marks(answer, follows_tool=False, call_ids=(OPEN, CLOSE)).tolist()
    assert marks == [0, 1, 1, 1, 0, 0, 1, 1, 0]
    assert turn_marks([1] * 40, follows_tool=True, call_ids=None).tolist() == [1] * 32 + [0] * 8
    assert turn_marks(answer, follows_tool=False, call_ids=None).sum() == 0
