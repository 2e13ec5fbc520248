"""Rows of a drafter's history: what is added, cut, forgotten and copied."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.models.drafter_rows import DrafterRows


def rows_of(first: int, count: int) -> torch.Tensor:
    """[2, count, 1]: each row holds its position, and ten times that."""
    at = torch.arange(first, first + count, dtype=torch.float32).view(1, -1, 1)
    return torch.cat([at, 10 * at])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), max_size=8),
)
def test_rows_are_those_of_a_list(window: int, steps: list[tuple[int, int, bool]]) -> None:
    rows, held = DrafterRows(window), {}
    for first, count, is_cut in steps:
        if is_cut:
            rows.truncate_to(first)
            held = {position: value for position, value in held.items() if position < first}
            continue
        if held and first > max(held) + 1:
            held = {}  # a gap
        rows.append(rows_of(first, count), rows_of(first, count)[:1], first_position=first)
        held = {position: value for position, value in held.items() if position < first}
        held |= {position: float(position) for position in range(first, first + count)}
        first_kept, (both, one) = rows.all()
        kept = [held[position] for position in sorted(held)][-len(rows) :]
        assert both[0, :, 0].tolist() == kept
        assert both[1, :, 0].tolist() == [10 * value for value in kept]
        assert one[0, :, 0].tolist() == kept
        assert first_kept == rows.first == kept[0]
        assert rows.end == first + count
        least = min(window or len(held), len(held))
        assert len(rows) >= min(least, len(kept))
        assert not window or len(rows) <= 2 * window


def test_fork_is_independent_and_no_larger_than_it_must() -> None:
    rows = DrafterRows()
    assert (len(rows), rows.nbytes) == (0, 0)
    rows.append(rows_of(5, 3), first_position=5)
    assert rows.nbytes == 64 * 2 * 4
    fork = rows.fork()
    assert fork.nbytes == 3 * 2 * 4
    fork.append(rows_of(8, 100), first_position=8)
    rows.append(rows_of(7, 1) + 0.5, first_position=7)
    assert rows.all()[1][0][0, :, 0].tolist() == [5.0, 6.0, 7.5]
    assert fork.all()[1][0][0, :4, 0].tolist() == [5.0, 6.0, 7.0, 8.0]
    first, (before,) = rows.before(7)
    assert (first, before.shape[1]) == (5, 2)
