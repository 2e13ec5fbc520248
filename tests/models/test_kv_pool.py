"""Pages, spans, forks and tentative rows; a random machine against lists of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.models.kv_pool import PAGE_ROWS, KVCache, KVPool
from dlite_agent.testing import tiny_config

CONFIG = tiny_config()
PAGE_BYTES = PAGE_ROWS * CONFIG.kv_bytes_per_token(4)
NUM_KV_HEADS, HEAD_DIM = CONFIG.num_kv_heads, CONFIG.head_dim


def open_pool(num_pages: int) -> KVPool:
    return KVPool(CONFIG, dtype=torch.float32, max_bytes=num_pages * PAGE_BYTES + 17)


def append(kv: KVCache, stamps: list[int], *, keep: int | None = None) -> None:
    """Write one row a stamp, the stamp in every element; commit the first `keep`, or all."""
    kv.reserve(len(stamps))
    rows = torch.tensor(stamps, dtype=torch.float32)[None, :, None]
    rows = rows.expand(NUM_KV_HEADS, -1, HEAD_DIM)
    for layer in range(CONFIG.num_layers):
        kv.write(layer, rows + layer / 4, -rows - layer / 4)
    kv.commit(len(stamps) if keep is None else keep)


def stamps_of(kv: KVCache) -> list[int]:
    """What `append` wrote, after checking that all layers, heads and both halves agree."""
    columns = []
    for layer in range(CONFIG.num_layers):
        spans = kv.spans(layer)
        if not spans:
            columns.append([])
            continue
        keys = torch.cat([span.keys for span in spans], dim=1) - layer / 4
        values = torch.cat([span.values for span in spans], dim=1) + layer / 4
        assert torch.equal(keys, -values)
        assert torch.equal(keys, keys[:1, :, :1].expand_as(keys))
        columns.append([int(stamp) for stamp in keys[0, :, 0]])
    assert all(column == columns[0] for column in columns)
    return columns[0]


def test_new_cache_is_empty_and_takes_nothing() -> None:
    with open_pool(3) as pool:
        kv = pool.new_cache()
        assert (kv.length, kv.num_tentative, kv.nbytes, kv.pages) == (0, 0, 0, ())
        assert kv.spans(0) == []
        assert kv.span_rows() == []
        assert (pool.used_bytes, pool.free_bytes) == (0, 3 * PAGE_BYTES)


def test_rows_come_back_in_order_over_page_borders() -> None:
    with open_pool(4) as pool:
        kv = pool.new_cache()
        append(kv, list(range(250)))
        append(kv, list(range(250, 700)))
        assert stamps_of(kv) == list(range(700))
        assert kv.span_rows() == [700]


def test_tentative_rows_are_seen_but_not_kept() -> None:
    with open_pool(4) as pool:
        kv = pool.new_cache()
        append(kv, list(range(254)))
        kv.reserve(8)
        assert (kv.length, kv.num_tentative, kv.span_rows()) == (254, 8, [262])
        assert pool.used_bytes == 2 * PAGE_BYTES
        kv.commit(1)
        assert (kv.length, kv.num_tentative, kv.span_rows()) == (255, 0, [255])
        assert pool.used_bytes == PAGE_BYTES, "a page that only dropped rows had is free again"


def test_reserving_again_drops_tentative_rows() -> None:
    with open_pool(4) as pool:
        kv = pool.new_cache()
        append(kv, [1, 2, 3])
        kv.reserve(600)
        append(kv, [4])
        assert stamps_of(kv) == [1, 2, 3, 4]
        assert pool.used_bytes == PAGE_BYTES


def test_growth_neither_moves_nor_copies_rows() -> None:
    with open_pool(8) as pool:
        kv = pool.new_cache()
        append(kv, list(range(10)))
        before = kv.spans(0)[0].keys.data_ptr()
        append(kv, list(range(10, 1500)))
        assert kv.spans(0)[0].keys.data_ptr() == before
        assert kv.span_rows() == [1500]


def test_two_growing_sessions_stay_contiguous() -> None:
    with open_pool(20) as pool:
        first, second = pool.new_cache(), pool.new_cache()
        for _ in range(4):
            append(first, list(range(512)))
            append(second, list(range(512)))
        assert (first.span_rows(), second.span_rows()) == ([2048], [2048])


def test_fork_shares_full_pages_and_copies_the_begun_one() -> None:
    with open_pool(6) as pool:
        kv = pool.new_cache()
        append(kv, list(range(600)))
        fork = kv.fork()
        assert pool.used_bytes == 4 * PAGE_BYTES, "three pages and the copy of the last"
        assert (kv.nbytes, fork.nbytes) == (2 * PAGE_BYTES, 2 * PAGE_BYTES)
        append(kv, [-1])
        append(fork, [-2])
        assert stamps_of(kv) == [*range(600), -1]
        assert stamps_of(fork) == [*range(600), -2]


@pytest.mark.parametrize("at", [0, 1, 256, 300, 512])
def test_fork_may_be_shorter(at: int) -> None:
    with open_pool(6) as pool:
        kv = pool.new_cache()
        append(kv, list(range(600)))
        fork = kv.fork(at)
        assert stamps_of(fork) == list(range(at))
        assert stamps_of(kv) == list(range(600))


def test_fork_leaves_tentative_rows_behind() -> None:
    with open_pool(6) as pool:
        kv = pool.new_cache()
        append(kv, [1, 2])
        kv.reserve(5)
        fork = kv.fork()
        assert (fork.length, fork.num_tentative, stamps_of(fork)) == (2, 0, [1, 2])
        assert kv.num_tentative == 5


def test_writing_into_a_shared_page_copies_it_first() -> None:
    with open_pool(6) as pool:
        kv = pool.new_cache()
        append(kv, list(range(512)))
        fork = kv.fork()
        kv.truncate_to(300)
        append(kv, [-1, -2])
        assert stamps_of(fork) == list(range(512))
        assert stamps_of(kv) == [*range(300), -1, -2]
        assert pool.used_bytes == 3 * PAGE_BYTES


def test_full_pool_leaves_the_cache_as_it_was() -> None:
    with open_pool(2) as pool:
        kv = pool.new_cache()
        append(kv, list(range(300)))
        with pytest.raises(CapacityError, match=r"1 more KV pages .* 0 of 2 are free"):
            kv.reserve(300)
        assert (kv.length, kv.num_tentative, stamps_of(kv)) == (300, 0, list(range(300)))
        kv.reserve(3)
        with pytest.raises(CapacityError):
            kv.reserve(300)
        assert kv.num_tentative == 3, "tentative rows are part of what does not change"
        with pytest.raises(CapacityError):
            kv.fork()
        assert pool.used_bytes == 2 * PAGE_BYTES
        assert kv.nbytes == 2 * PAGE_BYTES


def test_full_pool_refuses_to_copy_a_shared_page() -> None:
    with open_pool(1) as pool:
        kv = pool.new_cache()
        append(kv, list(range(256)))
        fork = kv.fork()
        kv.truncate_to(255)
        with pytest.raises(CapacityError):
            kv.reserve(1)
        fork.release()
        append(kv, [-1])
        assert stamps_of(kv) == [*range(255), -1]


def test_released_cache_can_be_used_again() -> None:
    with open_pool(2) as pool:
        with pool.new_cache() as kv:
            append(kv, list(range(400)))
        assert (kv.length, pool.used_bytes) == (0, 0)
        kv.release()
        append(kv, [7])
        assert stamps_of(kv) == [7]


def test_budget_below_one_page_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigurationError, match=f"max_kv_bytes is 100.*{PAGE_BYTES} bytes"):
        KVPool(CONFIG, dtype=torch.float32, max_bytes=100)


def test_budget_that_cannot_be_reserved_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="lower max_kv_bytes"):
        KVPool(CONFIG, dtype=torch.float32, max_bytes=2**60)


def test_reserved_memory_is_not_committed() -> None:
    before = resident_bytes()
    with KVPool(CONFIG, dtype=torch.float32, max_bytes=2**32) as pool:
        append(pool.new_cache(), list(range(1000)))
        assert resident_bytes() - before < 2**27


def test_closing_gives_memory_back_and_empties_caches() -> None:
    pool = KVPool(CONFIG, dtype=torch.float32, max_bytes=2**28)
    kv = pool.new_cache()
    append(kv, list(range(40_000)))
    held = kv.spans(0)
    before = resident_bytes()
    del held
    pool.close()
    pool.close()
    assert before - resident_bytes() > 2**23
    assert (kv.length, kv.pages, kv.spans(0)) == (0, (), [])
    for use in (pool.new_cache, lambda: kv.reserve(1)):
        with pytest.raises(CapacityError, match="closed"):
            use()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


class PoolMachine(RuleBasedStateMachine):
    """Several caches of a small pool against plain lists of stamps."""

    @initialize(num_pages=st.integers(2, 9))
    def open(self, num_pages: int) -> None:
        self.pool = open_pool(num_pages)
        self.caches: list[tuple[KVCache, list[int]]] = []
        self.next_stamp = 1

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for kv, _ in self.caches:
            kv.release()
        assert self.pool.used_bytes == 0, "a page leaked"
        self.pool.close()

    def pick(self, data: Any) -> tuple[KVCache, list[int]]:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    @rule()
    def new(self) -> None:
        if len(self.caches) < 5:
            self.caches.append((self.pool.new_cache(), []))

    @precondition(lambda self: self.caches)
    @rule(
        data=st.data(),
        count=st.one_of(st.integers(1, 9), st.integers(200, 700)),
        share=st.floats(0, 1),
    )
    def append_and_commit(self, data: Any, count: int, share: float) -> None:
        kv, stamps = self.pick(data)
        new = list(range(self.next_stamp, self.next_stamp + count))
        keep = round(count * share)
        try:
            append(kv, new, keep=keep)
        except CapacityError:
            return
        self.next_stamp += count
        stamps += new[:keep]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.integers(1, 300))
    def leave_tentative_rows(self, data: Any, count: int) -> None:
        kv, stamps = self.pick(data)
        before = (kv.length, kv.num_tentative, kv.pages)
        try:
            kv.reserve(count)
        except CapacityError:
            assert (kv.length, kv.num_tentative, kv.pages) == before
            return
        assert sum(kv.span_rows()) == len(stamps) + count

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: Any, share: float) -> None:
        kv, stamps = self.pick(data)
        length = round(len(stamps) * share)
        kv.truncate_to(length)
        del stamps[length:]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: Any, share: float) -> None:
        kv, stamps = self.pick(data)
        at = round(len(stamps) * share)
        if len(self.caches) >= 5:
            return
        try:
            self.caches.append((kv.fork(at), stamps[:at]))
        except CapacityError:
            assert self.pool.free_bytes == 0

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        kv, stamps = self.pick(data)
        kv.release()
        stamps.clear()

    @invariant()
    def caches_hold_their_rows(self) -> None:
        for kv, stamps in getattr(self, "caches", []):
            assert kv.length == len(stamps)
            if kv.num_tentative == 0:
                assert stamps_of(kv) == stamps

    @invariant()
    def pages_are_counted(self) -> None:
        caches = getattr(self, "caches", [])
        for kv, _ in caches:
            assert len(kv.pages) == -(-(kv.length + kv.num_tentative) // PAGE_ROWS)
        if caches:
            held = [page for kv, _ in caches for page in kv.pages]
            assert self.pool.used_bytes == len(set(held)) * PAGE_BYTES
            assert all(self.pool.num_references(page) == held.count(page) for page in set(held))
            assert abs(sum(kv.nbytes for kv, _ in caches) - self.pool.used_bytes) <= len(caches)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30)
