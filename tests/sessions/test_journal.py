"""The journal: what was sampled, found by key, within a budget."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.errors import ConfigurationError
from dlite_agent.sessions.journal import Journal, JournalRecord


def tokens(journal: Journal, key: bytes) -> list[list[int]]:
    return [list(record.token_ids) for record in journal.find(key)]


def test_recorded_turn_is_found_by_its_key_with_its_session_and_thought() -> None:
    journal = Journal()
    journal.record(b"key", JournalRecord([1, 2, 3], b"thought", "session"))
    (record,) = journal.find(b"key")
    assert list(record.token_ids) == [1, 2, 3]
    assert (record.reasoning_digest, record.session_id) == (b"thought", "session")
    assert len(journal) == 1


def test_unknown_key_finds_nothing() -> None:
    assert Journal().find(b"key") == ()


def test_turns_that_differ_only_in_their_thought_are_kept_apart_newest_first() -> None:
    journal = Journal()
    journal.record(b"key", JournalRecord([1], b"a"))
    journal.record(b"key", JournalRecord([2], b"b"))
    assert tokens(journal, b"key") == [[2], [1]]
    assert tokens(journal, b"key") == [[2], [1]], "looking does not change the order"


def test_same_key_and_thought_is_replaced() -> None:
    journal = Journal()
    journal.record(b"key", JournalRecord([1, 1, 1], b"a", "old"))
    before = journal.nbytes
    journal.record(b"key", JournalRecord([2], b"a", "new"))
    assert tokens(journal, b"key") == [[2]]
    assert journal.nbytes == before - 8


def test_least_recently_used_turn_goes_first() -> None:
    size = JournalRecord([0] * 10).nbytes
    journal = Journal(max_bytes=2 * size)
    journal.record(b"a", JournalRecord([0] * 10))
    journal.record(b"b", JournalRecord([1] * 10))
    journal.find(b"a")
    journal.record(b"c", JournalRecord([2] * 10))
    assert journal.find(b"b") == ()
    assert tokens(journal, b"a") == [[0] * 10]
    assert tokens(journal, b"c") == [[2] * 10]


def test_evicting_one_thought_keeps_the_other_of_the_same_key() -> None:
    size = JournalRecord([0]).nbytes
    journal = Journal(max_bytes=2 * size)
    for digest in (b"a", b"b", b"c"):
        journal.record(b"key", JournalRecord([digest[0]], digest))
    assert tokens(journal, b"key") == [[ord("c")], [ord("b")]]


def test_turn_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    journal = Journal(max_bytes=JournalRecord([0]).nbytes)
    journal.record(b"small", JournalRecord([7]))
    journal.record(b"large", JournalRecord(range(1000)))
    assert journal.find(b"large") == ()
    assert tokens(journal, b"small") == [[7]]


def test_clear_gives_all_back() -> None:
    journal = Journal()
    journal.record(b"key", JournalRecord([1]))
    journal.clear()
    assert (len(journal), journal.nbytes, journal.find(b"key")) == (0, 0, ())


def test_budget_below_one_byte_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_bytes is 0, but must be at least 1"):
        Journal(max_bytes=0)


def test_charged_bytes_cover_what_python_allocates() -> None:
    journal = Journal()
    turns = [(bytes([i % 256, i // 256]) * 8, list(range(200))) for i in range(500)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for key, token_ids in turns:
            session_id = f"session-{key[0]}"
            journal.record(bytes(key), JournalRecord(token_ids, bytes(16), session_id))
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * journal.nbytes < allocated < 1.1 * journal.nbytes


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 40), st.booleans()),
        max_size=60,
    )
)
def test_budget_holds_and_the_newest_turn_is_always_found(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    journal = Journal(max_bytes=5 * JournalRecord([0] * 20).nbytes)
    recorded: dict[tuple[bytes, bytes], list[int]] = {}
    for number, (name, thought, length, is_lookup) in enumerate(steps):
        key, digest = b"%d" % name, b"%d" % thought
        if is_lookup:
            for record in journal.find(key):
                assert list(record.token_ids) == recorded[key, record.reasoning_digest]
        else:
            recorded[key, digest] = [number] * length
            journal.record(key, JournalRecord([number] * length, digest))
            assert tokens(journal, key)[0] == [number] * length
        assert journal.nbytes <= journal.max_bytes
    total = sum(r.nbytes for name in range(6) for r in journal.find(b"%d" % name))
    assert total == journal.nbytes
    assert len(journal) == sum(len(journal.find(b"%d" % name)) for name in range(6))
