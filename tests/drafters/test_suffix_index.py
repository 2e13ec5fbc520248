"""The index of a session's past equals a naive search, whatever is appended, rewound and forked."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlite_agent.drafters.ngram_table import NgramTable, hash_ngram
from dlite_agent.drafters.suffix_index import Match, SuffixIndex
from tests.kernels.native_library import ngram_kernels

SIZES = (4, 2, 1)
EVERYTHING = 100_000


def matched(ids: list[int], position: int, context: list[int]) -> int:
    count = 0
    while count < min(position + 1, len(context)):
        if ids[position - count] != context[-1 - count]:
            break
        count += 1
    return count


def naive_search(
    ids: list[int], context: list[int], before: int, sizes: tuple[int, ...], max_length: int
) -> list[Match]:
    context = context[-max_length:]
    for size in sizes:
        found = [Match(matched(ids, i, context), i) for i in range(before)]
        found = [match for match in found if match.length >= size]
        if found:
            return sorted(found, key=lambda match: -match.position)
    return []


def check(index: SuffixIndex, ids: list[int], ahead: list[int]) -> None:
    assert index.length == len(ids)
    assert [index.token(i) for i in range(len(ids))] == ids
    for more in ([], ahead):
        context = [*ids, *more]
        expected = naive_search(ids, context, len(ids) - (not more), SIZES, 8)
        found = index.search(EVERYTHING, 8, more)
        assert sorted(found, key=lambda match: -match.position) == expected
        for length, position in found[:1]:
            assert length >= 1
            copied = list(context)
            for i in range(6):
                copied.append(copied[position + 1 + i])
            assert index.continuation(position, 6, more) == copied[len(context) :]


class Timelines(RuleBasedStateMachine):
    """Several forks of one timeline, each beside a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[SuffixIndex, list[int]]] = [(SuffixIndex(SIZES), [])]

    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=60))
    def append(self, data: st.DataObject, more: list[int]) -> None:
        index, ids = data.draw(st.sampled_from(self.pairs))
        index.append(more)
        ids.extend(more)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index, ids = data.draw(st.sampled_from(self.pairs))
        length = data.draw(st.integers(0, len(ids) + 2))
        index.truncate_to(length)
        del ids[length:]

    @precondition(lambda self: len(self.pairs) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index, ids = data.draw(st.sampled_from(self.pairs))
        self.pairs.append((index.fork(), list(ids)))

    @invariant()
    def equals_the_naive_search(self) -> None:
        for index, ids in self.pairs:
            check(index, ids, [1, 0])


TestTimelines = Timelines.TestCase
TestTimelines.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), max_size=80),
    context=st.lists(st.integers(0, 3), min_size=1, max_size=10),
)
def test_context_of_another_timeline_is_found(ids: list[int], context: list[int]) -> None:
    index = SuffixIndex(SIZES)
    index.append(ids)
    found = index.find(context, EVERYTHING)
    assert found == naive_search(ids, context, len(ids), SIZES, len(context))


def test_one_by_one_equals_at_once() -> None:
    rng = random.Random(0)
    ids = [rng.randrange(40) for _ in range(3000)]
    whole, pieces = SuffixIndex(SIZES), SuffixIndex(SIZES)
    whole.append(ids)
    start = 0
    while start < len(ids):
        count = rng.choice((1, 2, 3, 17, 256))
        pieces.append(ids[start : start + count])
        start += count
    assert pieces.length == whole.length
    for _ in range(50):
        context = ids[(end := rng.randrange(8, 3000)) - 8 : end]
        assert pieces.find(context, EVERYTHING) == whole.find(context, EVERYTHING)


def test_both_hashes_agree() -> None:
    rng = random.Random(1)
    ids = [rng.randrange(-1, 152_000) for _ in range(200)]
    for pieces in (200, 3):
        index = SuffixIndex((8, 3, 1))
        for start in range(0, 200, pieces):
            index.append(ids[start : start + pieces])
        assert [match.position for match in index.find(ids[:120], 500)][-1] == 119


def colliding_bigrams(table_bits: int) -> list[tuple[int, int]]:
    """Different bigrams that a table with 2 ** table_bits buckets cannot tell apart."""
    wanted = hash_ngram([1, 2]) >> (64 - table_bits)
    found = []
    for second in range(3, 200_000):
        if hash_ngram([1, second]) >> (64 - table_bits) == wanted:
            found.append((1, second))
        if len(found) == 20:
            return found
    raise AssertionError("not enough collisions")


def test_hash_collisions_cost_probes_and_give_no_false_match() -> None:
    index = SuffixIndex((2,))
    index.append([1, 2, 77])
    others = colliding_bigrams(8)
    for i, pair in enumerate(others):
        index.append([*pair, 1000 + i])
    index.append([1, 2])
    assert index.search(EVERYTHING, 2) == [Match(2, 1)]
    assert index.search(len(others), 2) == []


@pytest.mark.parametrize("period", [1, 2, 3])
def test_repetition_is_found_and_continued(period: int) -> None:
    index = SuffixIndex((8, 3, 1))
    ids = [i % period for i in range(5000)]
    for start in range(0, 5000, 7):
        index.append(ids[start : start + 7])
    best = max(index.search(16, 32))
    assert best == Match(32, 4999 - period)
    assert index.continuation(best.position, 40) == [(5000 + i) % period for i in range(40)]


def array_bytes(index: SuffixIndex) -> dict[int, int]:
    """Size of each array that a index holds, by identity."""
    tokens = index._tokens.ids
    found = {id(tokens): tokens.nbytes}
    for table in index.tables:
        found |= {id(table): table.nbytes}
    return found


def test_fork_copies_nothing_and_appending_copies_the_ids_once() -> None:
    index = SuffixIndex((8, 3, 1))
    index.append(list(np.arange(32_000) % 30_011))
    index.append(list(np.arange(7_000)))
    before = array_bytes(index)
    fork = index.fork()
    new = {key: size for key, size in array_bytes(fork).items() if key not in before}
    assert sum(new.values()) <= 10_000  # an empty tail
    index.append([1, 2, 3])
    assert index._tokens is fork._tokens
    fork.append([4, 5, 6])
    new = {key: size for key, size in array_bytes(fork).items() if key not in before}
    assert sum(new.values()) <= 5 * 40_000 + 10_000
    assert index.search(9, 3) != fork.search(9, 3)


def test_many_forks_leave_few_tables() -> None:
    rng = random.Random(2)
    index = SuffixIndex((8, 3, 1))
    ids: list[int] = []
    indexed = 0
    for _ in range(200):
        more = [rng.randrange(50) for _ in range(rng.randrange(1, 40))]
        index.append(more)
        ids += more
        before = array_bytes(index)
        index.fork()
        fresh = [table for table in index.tables if id(table) not in before]
        indexed += sum(len(table) for table in fresh)
    assert len(index.tables) <= 14
    assert indexed <= 14 * len(ids)  # each token is indexed again a logarithmic number of times
    context = ids[1000:1008]
    assert Match(8, 1007) in index.find(context, EVERYTHING)


def test_40000_tokens_take_at_most_30_bytes_each_also_after_growth() -> None:
    rng = random.Random(3)
    index = SuffixIndex((8, 3, 1))
    worst = 0.0
    for start in range(0, 40_000, 50):
        index.append([rng.randrange(150_000) for _ in range(50)])
        if start >= 4_000:
            worst = max(worst, index.nbytes / index.length)
    assert worst <= 30
    assert index.nbytes / 40_000 <= 25


def test_rewound_table_is_still_searched_through() -> None:
    """Positions behind the end of a frozen table are walked past without using up the probes."""
    index = SuffixIndex((1,))
    index.append([5, 6])
    index.append([5, 7] * 40)
    index.fork()
    index.truncate_to(2)
    index.append([5])
    assert index.search(16, 4) == [Match(1, 0)]


def test_a_table_pops_what_it_pushed() -> None:
    rng = random.Random(4)
    ids = np.array([rng.randrange(6) for _ in range(3000)], dtype=np.int32)
    view = ids.data
    table = NgramTable((3, 1), 0, 3000)
    table.append(ids, view, ids.ctypes.data, 1500)
    last, previous = table._last.copy(), table._previous[:, :1500].copy()
    table.append(ids, view, ids.ctypes.data, 3000)
    table.truncate_to(ids, 1500)
    assert (table._last == last).all()
    assert (table._previous[:, :1500] == previous).all()


def check_twins(plain: SuffixIndex, native: SuffixIndex, rng: random.Random) -> None:
    assert native.length == plain.length
    context = [rng.randrange(-1, 4) for _ in range(rng.randrange(1, 12))]
    for probes in (1, 3, 16):
        assert native.search(probes, 8) == plain.search(probes, 8)
        assert native.search(probes, 8, context[:2]) == plain.search(probes, 8, context[:2])
        assert native.find(context, probes) == plain.find(context, probes)


def test_kernels_find_what_python_finds_after_any_history() -> None:
    rng = random.Random(5)
    pairs = [(SuffixIndex(SIZES), SuffixIndex(SIZES, ngram_kernels()))]
    check_twins(*pairs[0], rng)  # both are empty
    for _ in range(150):
        plain, native = rng.choice(pairs)
        kind = rng.random()
        if kind < 0.7:
            # often one, as while decoding; sometimes enough to grow every array
            more = [rng.randrange(-1, 4) for _ in range(rng.choice((0, 1, 1, 2, 17, 200)))]
            plain.append(more)
            native.append(more)
        elif kind < 0.9:
            length = max(0, plain.length - rng.choice((1, 2, 30, 200)))
            plain.truncate_to(length)
            native.truncate_to(length)
        elif len(pairs) < 6:
            pairs.append((plain.fork(), native.fork()))
        check_twins(plain, native, rng)
    assert max(native.length for _, native in pairs) > 500
    assert max(len(native.tables) for _, native in pairs) > 1
