"""Counts of right tokens by evidence."""

from __future__ import annotations

import pytest

from dlite_agent.decoding.acceptance import AcceptanceCounts, evidence_cell


def test_cells_grow_with_the_match_in_powers_of_two_and_tell_confidence_apart() -> None:
    assert evidence_cell(2, None) == evidence_cell(3, None) != evidence_cell(4, None)
    assert evidence_cell(64, None) == evidence_cell(10_000, None)
    cells = {evidence_cell(4, sure) for sure in (None, 0.0, 0.3, 0.6, 0.8, 0.95, 0.99)}
    assert len(cells) == 7
    assert evidence_cell(4, 0.25) == evidence_cell(4, 0.0)
    assert evidence_cell(4, 1.0) == evidence_cell(4, 0.98)


def test_estimate_goes_from_the_prior_to_what_was_seen() -> None:
    counts = AcceptanceCounts()
    cell = evidence_cell(4, None)
    assert counts.estimate(cell, 0.8) == 0.8
    for _ in range(500):
        counts.observe(cell, is_hit=False)
    assert counts.estimate(cell, 0.8) < 0.1
    assert counts.estimate(evidence_cell(8, None), 0.8) == 0.8


def test_old_outcomes_are_forgotten() -> None:
    counts = AcceptanceCounts(memory=16.0)
    for _ in range(200):
        counts.observe(0, is_hit=True)
    for _ in range(40):
        counts.observe(0, is_hit=False)
    assert counts.estimate(0, 0.5) < 0.2
    assert counts.trials[0] == pytest.approx(16.0, abs=0.1)


def test_a_copy_is_independent() -> None:
    counts = AcceptanceCounts()
    copy = counts.copy()
    copy.observe(3, is_hit=True)
    assert counts.trials[3] == 0.0
    assert copy.nbytes == counts.nbytes > 0


def test_prior_is_the_sources_own_confidence_until_it_proves_wrong() -> None:
    counts = AcceptanceCounts.of_engine()
    cell = evidence_cell(4, 0.8)
    assert counts.prior(cell, 0.8) == 0.8
    for _ in range(100):
        counts.observe(cell, is_hit=False)
    assert counts.prior(cell, 0.8) < 0.05


def test_without_confidence_the_prior_is_that_of_less_evidence() -> None:
    counts = AcceptanceCounts.of_engine()
    assert counts.prior(evidence_cell(16, None), None) == 0.5
    for _ in range(100):
        counts.observe(evidence_cell(4, None), is_hit=True)
    assert counts.prior(evidence_cell(16, None), None) > 0.95
    assert counts.prior(evidence_cell(2, None), None) == 0.5
