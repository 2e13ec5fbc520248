"""A source's record: what it may lose, and what it learns in rounds without a draft."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlite_agent.decoding.acceptance import AcceptanceCounts, evidence_cell
from dlite_agent.decoding.track_record import (
    ASKING_SHARE,
    NO_CELL,
    STAKE_SHARE,
    Purse,
    TrackRecord,
)

CELL = evidence_cell(4, None)
PLAIN_S = 1.0
COSTS = [1.0, 1.5, 2.0, 2.5]


def watched(ids: list[int]) -> TrackRecord:
    record = TrackRecord()
    assert record.settle(0, PLAIN_S, 0.0)
    record.watch(ids, [CELL] * len(ids), [0.5] * len(ids))
    return record


def test_a_watched_block_is_learnt_from_over_several_plain_rounds() -> None:
    record, engine = watched([1, 2, 3, 4]), AcceptanceCounts.of_engine()
    for token_ids in ([1], [2], [9], [4]):
        record.see(token_ids, engine)
    # two right, one wrong, and nothing behind that
    assert engine.trials[CELL] == pytest.approx(3.0, rel=0.01)
    assert engine.hits[CELL] == pytest.approx(2.0, rel=0.01)
    assert record.counts.trials[CELL] == pytest.approx(3.0, rel=0.05)


def test_a_watched_block_ends_where_it_ends_or_is_forgotten() -> None:
    engine = AcceptanceCounts.of_engine()
    record = watched([1])
    record.see([1, 7, 8], engine)
    assert engine.trials[CELL] == 1.0
    record = watched([1, 2])
    record.forget()
    record.see([1, 2], engine)
    assert engine.trials[CELL] == 1.0


def test_tokens_of_another_source_have_to_come_first_and_count_for_nothing() -> None:
    engine = AcceptanceCounts.of_engine()
    record = TrackRecord()
    record.settle(0, PLAIN_S, 0.0)
    for seen, trials in (([5, 1], 1.0), ([6, 1], 1.0)):
        record.watch([5, 1], [NO_CELL, CELL], [0.9, 0.5])
        record.see(seen, engine)
        assert engine.trials[CELL] == trials


def test_what_is_staked_is_paid_and_comes_back_with_every_accepted_token() -> None:
    record, engine = watched([1, 2, 3]), AcceptanceCounts.of_engine()
    before = record.purse.stake_s
    record.stake(2, COSTS[2] - COSTS[0])
    assert record.purse.stake_s == before - 1.0
    record.see([1, 2, 3, 9], engine)  # the third was not drafted
    assert record.purse.stake_s == before - 1.0 + 2 * PLAIN_S


def test_a_balance_is_never_overdrawn_and_earns_a_small_share_of_the_time() -> None:
    record, engine = watched([1]), AcceptanceCounts.of_engine()
    num_staked = 0
    for round_number in range(1, 4000):
        if record.settle(round_number, PLAIN_S, 0.0) and record.affordable(COSTS[:2]):
            record.watch([1], [CELL], [0.5])
            record.stake(1, COSTS[1] - COSTS[0])
            num_staked += 1
        record.see([2], engine)
        assert record.purse.stake_s >= 0.0
    grace = 2.0 / 0.5
    assert num_staked <= grace + STAKE_SHARE * 4000 / 0.5 + 1


def test_success_buys_a_bounded_number_of_losses() -> None:
    record, engine = watched([]), AcceptanceCounts.of_engine()
    for round_number in range(1, 500):
        record.settle(round_number, PLAIN_S, 0.0)
        record.watch([1, 2], [CELL] * 2, [0.5] * 2)
        record.stake(2, COSTS[2] - COSTS[0])
        record.see([1, 2, 3], engine)
    assert record.purse.stake_s <= 10 * PLAIN_S


def test_asking_waits_until_the_balances_can_pay_for_it() -> None:
    record = TrackRecord()
    asked = []
    for round_number in range(1000):
        is_awake = round_number >= record.wakes_at
        if is_awake and record.settle(round_number, PLAIN_S, 0.1):
            asked.append(round_number)
    grace = 2.0 + 4 * 0.1
    assert 0.1 * len(asked) <= (ASKING_SHARE + STAKE_SHARE) * 1000 + grace
    assert len(asked) > 30


@pytest.mark.parametrize("asking_s", [(0.001,), (0.05,), (0.4,), (0.05, 0.86), (0.05, 0.4, 0.86)])
def test_a_turn_of_128_rounds_cannot_lose_3_percent(asking_s: tuple[float, ...]) -> None:
    """Everything that may be spent is spent, and nothing is ever right, whoever is asked."""
    purse, engine, lost_s = Purse(), AcceptanceCounts.of_engine(), 0.0
    records = [TrackRecord(purse, 1 / len(asking_s)) for _ in asking_s]
    for round_number in range(128):
        for record, cost_s in zip(records, asking_s, strict=True):
            if round_number >= record.wakes_at and record.settle(round_number, PLAIN_S, cost_s):
                lost_s += cost_s
                row_s = purse.stake_s
                record.watch([1], [CELL], [0.5])
                record.stake(record.affordable([PLAIN_S, PLAIN_S + row_s]), row_s)
                lost_s += row_s
                record.see([2], engine)
    assert 0.02 * 128 < lost_s < 0.031 * 128


def test_success_pays_for_asking_only_where_asking_gains_more_than_it_costs() -> None:
    for usual_gain_s, is_asked in ((0.5, True), (0.3, False)):
        record, engine = watched([1] * 8), AcceptanceCounts.of_engine()
        record.stake(8, 0.1)
        record.see([1] * 8, engine)
        assert record.settle(1, PLAIN_S, 0.4, usual_gain_s) is is_asked


def test_a_source_that_earns_is_asked_every_round_however_much_it_costs() -> None:
    record, engine = TrackRecord(), AcceptanceCounts.of_engine()
    asked = 0
    for round_number in range(600):
        if round_number >= record.wakes_at and record.settle(round_number, PLAIN_S, 0.4):
            asked += 1
            record.watch([1, 2], [CELL] * 2, [0.5] * 2)
            record.stake(2, 0.1)
        record.see([1, 2, 3], engine)
    assert asked > 500


def test_recent_surprise_moves_the_chances_of_all_evidence() -> None:
    record, engine = TrackRecord(), AcceptanceCounts.of_engine()
    record.settle(0, PLAIN_S, 0.0)
    other = evidence_cell(16, None)
    before = record.chance(other, 0.9)
    assert before == pytest.approx(0.9)
    for _ in range(10):
        record.watch([1], [CELL], [0.9])
        record.see([2], engine)
    assert record.chance(other, 0.9) < 0.8
    assert 0.0 < record.chance(other, 0.0) < record.chance(other, 1.0) < 1.0


def test_a_copy_learns_for_itself() -> None:
    record, engine = watched([1, 2]), AcceptanceCounts.of_engine()
    copy = record.copy(replace(record.purse))
    copy.stake(1, 0.5)
    copy.see([1], engine)
    assert record.counts.trials[CELL] == 0.0
    record.see([9], engine)
    assert copy.counts.hits[CELL] == 1.0


def test_an_asking_that_took_longer_is_paid_for_and_slept_off() -> None:
    record = TrackRecord()
    assert record.settle(0, PLAIN_S, 0.05, 0.0)
    held_s = record.asking_s
    record.book(0.25)
    assert record.asking_s == pytest.approx(held_s - 0.2)
    # the share of the rounds until then pays for the next one
    earned_s = (record.wakes_at - 0) * ASKING_SHARE * PLAIN_S
    assert record.asking_s + earned_s == pytest.approx(0.25, abs=ASKING_SHARE * PLAIN_S)


def test_the_purse_pays_what_was_thought() -> None:
    record = TrackRecord()
    assert record.settle(0, PLAIN_S, 0.5, 3.0)  # more than its own balance holds
    held_s, own_s = record.purse.stake_s, record.asking_s
    record.book(0.75)
    assert (record.purse.stake_s, record.asking_s) == (held_s, own_s)


def test_only_an_accepted_token_that_was_in_the_forward_earns() -> None:
    record, engine = watched([1, 2, 3]), AcceptanceCounts.of_engine()
    record.stake(2, 0.0)
    assert record.see([1], engine)
    assert record.is_watching
    assert record.see([2], engine)
    assert not record.see([3], engine)
    assert not record.is_watching
