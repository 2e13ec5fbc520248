"""A hundred random schemas under random weights, with drafts and without; `make soak` has more."""

from __future__ import annotations

from tests.decoding.random_turns import check_random_turn, new_compiler, new_target

SEEDS = range(100)


def test_every_finished_turn_fits_and_drafts_change_nothing() -> None:
    compiler, targets = new_compiler(), [new_target(seed) for seed in range(5)]
    num_over = sum(check_random_turn(seed, targets[seed % 5], compiler) for seed in SEEDS)
    assert num_over > 0.8 * len(SEEDS)
