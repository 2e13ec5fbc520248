"""Random schemas in random roles, under random weights, with drafts and without."""

from __future__ import annotations

import pytest

from tests.decoding.random_turns import check_random_turn, new_compiler, new_target


@pytest.mark.parametrize(
    ("num_turns", "num_targets"),
    [
        pytest.param(100, 5, id="sample"),
        pytest.param(
            10_000, 10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(5400)]
        ),
    ],
)
def test_every_finished_turn_fits_and_drafts_change_nothing(
    num_turns: int, num_targets: int
) -> None:
    compiler, num_over = new_compiler(), 0
    for weights in range(num_targets):
        target = new_target(weights)
        for seed in range(weights, num_turns, num_targets):
            num_over += check_random_turn(seed, target, compiler)
        target.close()
    assert num_over > 0.8 * num_turns
