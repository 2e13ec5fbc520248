"""Common prefixes of id lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.sessions.prefix import common_prefix_length

IDS = st.lists(st.integers(0, 1), max_size=40)


@given(IDS, IDS, IDS)
def test_common_prefix_is_where_a_walk_stops(
    shared: list[int], left: list[int], right: list[int]
) -> None:
    left, right = shared + left, shared + right
    walked = 0
    while walked < min(len(left), len(right)) and left[walked] == right[walked]:
        walked += 1
    assert common_prefix_length(left, right) == walked
