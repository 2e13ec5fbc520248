"""Ten thousand random schemas in random roles, under random weights, with drafts and without."""

from __future__ import annotations

import pytest

from tests.decoding.random_turns import check_random_turn, new_compiler, new_target

pytestmark = [pytest.mark.soak, pytest.mark.timeout(5400)]

NUM_TURNS = 10_000


def test_every_finished_turn_fits_and_drafts_change_nothing() -> None:
    compiler = new_compiler()
    num_over = 0
    for seed in range(NUM_TURNS):
        target = new_target(seed)
        num_over += check_random_turn(seed, target, compiler)
        target.close()
    assert num_over > 0.8 * NUM_TURNS
