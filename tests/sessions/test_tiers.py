"""Tiers below the pool: what is kept there comes back as it was, whatever happened to the disk."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.decoding.steps import run_alone
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import CheckpointError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sessions import disk_tier, segments
from dlite_agent.sessions.disk_journal import journal_path, journal_text
from dlite_agent.sessions.disk_tier import DiskTier
from dlite_agent.sessions.host_tier import HostTier
from dlite_agent.sessions.journal import Journal, JournalRecord
from dlite_agent.sessions.kept import ANSWER_START, HINT, TENANT
from dlite_agent.sessions.manifest import MANIFEST, read_manifest
from dlite_agent.sessions.request import make_request
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.tiers import Rate, Tiers
from dlite_agent.testing import assert_kv_is_of, tiny_qwen3

IDS = [i * 7 % 512 for i in range(200)]
OTHER = [i * 11 % 512 for i in range(1, 150)]
ROW_BYTES = 2 * 2 * 2 * 16 * 8
BUDGET = 4 * PAGE_ROWS * ROW_BYTES  # what checks compute has a page beside it


@pytest.fixture
def target() -> Iterator[DenseTransformer]:
    with tiny_qwen3(dtype="float64", max_kv_bytes=BUDGET + PAGE_ROWS * ROW_BYTES) as target:
        yield target


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ROWS", 64)


@contextmanager
def disk_tiers(
    root: Path, target: DenseTransformer, *, max_bytes: int = 2**30
) -> Iterator[tuple[SessionStore, Tiers]]:
    store = SessionStore(target, NullDrafter(), max_bytes=BUDGET)
    tiers = Tiers(store, disk=DiskTier(root, target, max_bytes))
    try:
        yield store, tiers
    finally:
        tiers.close()
        store.close()


def turn(store: SessionStore, tiers: Tiers, ids: list[int], tenant: str = "") -> tuple[str, int]:
    """A turn as the engine runs it; the session's id and how many tokens it did not compute."""
    request = replace(make_request(ids), tenant=tenant)
    target = store._target
    session = run_alone(target, tiers.restore_steps(request, None, lambda: False))
    if session is None:
        session, _ = store.acquire(ids, tenant=tenant)
    report = session.sync(ids)
    assert_kv_is_of(target, session.kv, ids, tolerance=1e-10)
    store.release(session)
    tiers.save(session, {TENANT: tenant, HINT: "thread", ANSWER_START: str(len(ids))})
    return session.session_id, report.cached


def test_another_process_goes_on_with_a_session(target: DenseTransformer, tmp_path: Path) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        first, _ = turn(store, tiers, IDS[:150])
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert tiers.hints("") == [("thread", first)]
        assert [(tier, kept.session_id) for tier, kept in tiers.kept()] == [("disk", first)]
        num_rows = target.rows_computed
        assert turn(store, tiers, IDS) == (first, 150)
        num_checked = len(IDS)
        assert target.rows_computed - num_rows - num_checked == 51, "new ones, one to compare"
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS, 1]) == (first, 200), "the next turn was added"
        assert len(tiers.kept()) == 1


def test_a_prefix_of_a_kept_session_leaves_it_alone(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        first, _ = turn(store, tiers, IDS)
    with disk_tiers(tmp_path, target) as (store, tiers):
        second, cached = turn(store, tiers, [*IDS[:100], *OTHER[:20]])
        assert cached == 100
        assert second != first
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS, 1]) == (first, 200)


def test_a_session_that_the_pool_holds_is_not_fetched(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        first, _ = turn(store, tiers, IDS[:150])
        assert turn(store, tiers, IDS) == (first, 150)
        request = make_request([*IDS, 1])
        assert run_alone(target, tiers.restore_steps(request, None, lambda: False)) is None


def test_tenants_do_not_find_each_others_sessions(target: DenseTransformer, tmp_path: Path) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        turn(store, tiers, IDS, "a")
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS, 1], "b")[1] == 0
        assert tiers.hints("b")[0][1] != tiers.hints("a")[0][1]


def test_evicted_sessions_come_back(target: DenseTransformer, tmp_path: Path) -> None:
    texts = [[(seed + i * 7) % 512 for i in range(250)] for seed in range(6)]  # room for four
    with disk_tiers(tmp_path, target) as (store, tiers):
        first = [turn(store, tiers, text)[0] for text in texts]
        assert len(store) < 6
        for text, session_id in zip(texts, first, strict=True):
            assert turn(store, tiers, [*text, 1]) == (session_id, 250)


def test_host_memory_keeps_what_the_pool_evicts(target: DenseTransformer) -> None:
    texts = [[(seed + i * 7) % 512 for i in range(250)] for seed in range(6)]
    store = SessionStore(target, NullDrafter(), max_bytes=BUDGET)
    host = HostTier(3 * 251 * ROW_BYTES)
    tiers = Tiers(store, host=host)
    for text in texts:
        turn(store, tiers, text)
    assert {tier for tier, _ in tiers.kept()} == {"host"}
    assert host.used_bytes == sum(kept.nbytes for kept in host.sessions())
    for text in reversed(texts):
        assert turn(store, tiers, [*text, 1])[1] == 250
        assert host.used_bytes <= host.max_bytes
    assert host.remove([host.sessions()[0].session_id, "nobody"]) == 1
    tiers.close()
    store.close()


def test_a_session_larger_than_host_memory_is_dropped(target: DenseTransformer) -> None:
    store = SessionStore(target, NullDrafter(), max_bytes=BUDGET)
    tiers = Tiers(store, host=HostTier(100))
    turn(store, tiers, IDS)
    store._evict(next(iter(store._entries.values())))
    assert tiers.kept() == []
    store.close()


def test_the_disk_budget_is_kept_and_the_latest_used_stay(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target, max_bytes=2 * 200 * ROW_BYTES) as (store, tiers):
        for seed in range(4):
            last, _ = turn(store, tiers, [(seed + i * 7) % 512 for i in range(150)])
            tiers.flush()
        assert tiers.disk is not None
        assert tiers.disk.used_bytes <= tiers.disk.max_bytes
        assert last in {kept.session_id for _, kept in tiers.kept()}
        folders = {path.name for path in tiers.disk.folder.iterdir() if path.is_dir()}
        assert folders == {kept.session_id for _, kept in tiers.kept()}


def test_a_session_larger_than_the_disk_budget_is_not_written(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        disk_tiers(tmp_path, target, max_bytes=1000) as (store, tiers),
        caplog.at_level(logging.WARNING),
    ):
        turn(store, tiers, IDS)
        turn(store, tiers, [*IDS, 1])
    assert caplog.text.count("larger than max_disk_bytes=1000") == 1


def test_a_second_owner_of_a_folder_is_told(target: DenseTransformer, tmp_path: Path) -> None:
    with disk_tiers(tmp_path, target):
        with pytest.raises(CheckpointError, match="being written by another engine"):
            DiskTier(tmp_path, target, 2**30)
        with tiny_qwen3(seed=1) as other:
            DiskTier(tmp_path, other, 2**30).close()  # another model has another folder
    DiskTier(tmp_path, target, 2**30).close()


def failing_fsync(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool]) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if fails():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_costs_the_session_on_disk_and_nothing_else(
    target: DenseTransformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_full = threading.Event()
    failing_fsync(monkeypatch, is_full.is_set)
    with (
        caplog.at_level(logging.WARNING),
        disk_tiers(tmp_path, target) as (store, tiers),
    ):
        first, _ = turn(store, tiers, IDS[:100])
        tiers.flush()
        is_full.set()
        # Other ids behind the 80th, twice: no segment of one text may pass for the other's.
        for text in ([*IDS[:80], *OTHER[:40]], [*IDS[:80], *OTHER[:90]]):
            assert turn(store, tiers, text)[1] >= 80
        assert tiers.disk is not None
        tiers.disk.flush()
        assert caplog.text.count("No space left on device") == 1
        assert read_manifest(tiers.disk.folder / first).token_ids.tolist() == IDS[:100]
        is_full.clear()
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS[:80], *OTHER[:90], 1])[1] == 170


def test_jobs_behind_a_failed_one_name_no_segment_of_another_text(
    target: DenseTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session is rewound and grows, and only the write of the new rows in the middle fails."""
    may_go = threading.Event()
    real = disk_tier.write_checkpoint
    num_writes = 0

    def write(*arguments: object) -> object:
        nonlocal num_writes
        may_go.wait(60.0)
        num_writes += 1
        if num_writes == 2:
            raise OSError(errno.EIO, "injected")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_tier, "write_checkpoint", write)
    tier = DiskTier(tmp_path, target, 2**30)
    session = Session(target, NullDrafter(), session_id="a")
    for text in (IDS[:100], [*IDS[:10], *OTHER[:90]], [*IDS[:10], *OTHER[:120]]):
        session.sync(text)
        assert tier.save(session)
    may_go.set()
    tier.close()
    loaded = Session.load(tier.folder / "a", target, NullDrafter())
    assert loaded.token_ids == [*IDS[:10], *OTHER[:120]]
    assert_kv_is_of(target, loaded.kv, loaded.token_ids, tolerance=1e-10)


def test_saves_wait_for_a_slow_disk_in_bounded_memory(
    target: DenseTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    real = disk_tier.write_checkpoint

    def write(*arguments: object) -> object:
        may_go.wait(60.0)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_tier, "write_checkpoint", write)
    monkeypatch.setattr(disk_tier, "_MAX_BACKLOG_BYTES", 60 * ROW_BYTES)
    tier = DiskTier(tmp_path, target, 2**30)
    session = Session(target, NullDrafter(), session_id="a")
    session.sync(IDS[:50])
    assert tier.save(session)
    session.sync(IDS[:90])
    assert not tier.save(session), "it is saved with a later turn"
    may_go.set()
    tier.flush()
    assert tier.save(session)
    tier.close()
    assert read_manifest(tier.folder / "a").num_stored == 90


def test_a_damaged_session_starts_cold_with_a_warning(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        first, _ = turn(store, tiers, IDS[:150])
        assert tiers.disk is not None
        folder = tiers.disk.folder / first
    segment = folder / read_manifest(folder).segments[1].file
    segment.write_bytes(segment.read_bytes()[:-1] + b"!")
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, IDS) == (first, 64), "the segment before it"
        assert "has changed since it was written" in caplog.text
    (folder / MANIFEST).write_bytes(b"{}")
    caplog.clear()
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert "removed and will start cold" in caplog.text
        assert turn(store, tiers, IDS)[1] == 0
        assert not folder.exists()


def test_a_manifest_that_is_damaged_meanwhile_starts_cold(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        first, _ = turn(store, tiers, IDS[:150])
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert tiers.disk is not None
        (tiers.disk.folder / first / MANIFEST).write_bytes(b"{}")
        assert turn(store, tiers, IDS)[1] == 0
        assert "starts cold" in caplog.text
        assert len(tiers.kept()) == 1


def test_kv_that_the_model_does_not_compute_starts_cold(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, target, 2**30)
    session = Session(target, NullDrafter(), session_id="a")
    session.sync(IDS[:64])
    for rows in session.kv.spans(0):
        rows.keys.add_(1.0)
    tier.save(session)
    session.close()
    tier.close()
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, IDS)[1] == 0
        assert "this model computes other KV" in caplog.text
        assert "a" not in {kept.session_id for _, kept in tiers.kept()}


def test_a_session_that_has_no_room_now_is_not_fetched(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        turn(store, tiers, IDS)
    with disk_tiers(tmp_path, target) as (store, tiers):
        running = [store.acquire_new([seed] * 250) for seed in range(4)]  # all of the budget
        for session in running:
            session.sync([1] * 250)
        request = make_request([*IDS, 1])
        assert run_alone(target, tiers.restore_steps(request, None, lambda: False)) is None
        assert len(store) == 4
        running.pop().close()
        # Another turn takes the page between the claim and the fetch.
        with target.new_cache() as kv, target.new_cache() as other:
            kv.reserve(PAGE_ROWS)
            other.reserve(1)
            store._budget.max_bytes = target.pool.max_bytes + PAGE_ROWS * ROW_BYTES
            assert run_alone(target, tiers.restore_steps(request, None, lambda: False)) is None
        assert len(store) == 4


def test_what_cannot_be_read_is_left_out_with_a_warning(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with disk_tiers(tmp_path, target) as (_, tiers):
        assert tiers.disk is not None
        folder = tiers.disk.folder
    (folder / "session").mkdir()
    (folder / "session" / MANIFEST).mkdir()
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        journal_path(folder, "").mkdir()
        tiers.attach("", Journal(), "qwen")
        assert turn(store, tiers, IDS)[1] == 0
    assert "a saved session cannot be read" in caplog.text
    assert "is not used" in caplog.text


def test_speeds_decide_between_fetching_and_computing(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        turn(store, tiers, IDS[:150])
    for rows_per_s, is_fetched in ((1.0, True), (1e12, False)):
        with disk_tiers(tmp_path, target) as (store, tiers):
            tiers.note_prefill(1000, 1000.0 / rows_per_s)
            tiers._reads["disk"].add(1e6, 1.0)
            assert (turn(store, tiers, IDS[:150])[1] > 0) is is_fetched


def test_nothing_measured_decides_where_output_must_be_reproducible(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        turn(store, tiers, IDS[:150])
    store = SessionStore(target, NullDrafter(), max_bytes=BUDGET)
    tiers = Tiers(store, disk=DiskTier(tmp_path, target, 2**30), is_measured=False)
    tiers.note_prefill(1000, 1e-9)
    tiers._reads["disk"].add(1.0, 1e9)
    assert turn(store, tiers, IDS)[1] == 150
    tiers.close()
    store.close()


def test_a_session_in_a_folder_of_its_own_is_found_and_left_there(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = Session(target, NullDrafter(), session_id="../escape")
    session.sync(IDS[:150])
    session.save(tmp_path / "saved")
    session.close()
    for is_gone in (False, True):
        with disk_tiers(tmp_path / f"tier {is_gone}", target) as (store, tiers):
            assert tiers.add_folder(tmp_path, target, "a") == 0, "no KV was saved there"
            assert tiers.add_folder(tmp_path / "saved", target, "a") == 150
            if is_gone:
                (tmp_path / "saved" / MANIFEST).unlink()
            assert turn(store, tiers, IDS, "b")[1] == 0
            session_id, cached = turn(store, tiers, IDS, "a")
            assert cached == (0 if is_gone else 150)
            assert session_id != "../escape"
            store._evict(next(iter(store._entries.values())))
            (kept,) = [k for t, k in tiers.kept() if t == "folder"] or [None]
            assert (kept is None) is is_gone
            if kept is not None:
                tiers.forget_copies([kept.session_id])
                assert {tier for tier, _ in tiers.kept()} == {"disk"}
                assert tiers._tiers["folder"].open(kept) is None
    assert "starts cold" in caplog.text
    assert not (tmp_path / "escape").exists()
    assert list((tmp_path / "saved").glob("kv-*"))


def test_a_rate_forgets_old_work() -> None:
    rate = Rate()
    assert rate.seconds(10.0) is None
    rate.add(100.0, 1.0)
    assert rate.seconds(100.0) == 1.0
    for _ in range(20):
        rate.add(100.0, 10.0)
    assert rate.seconds(100.0) == pytest.approx(10.0, rel=1e-3)


def test_journals_outlast_the_process(target: DenseTransformer, tmp_path: Path) -> None:
    journal = Journal()
    tier = DiskTier(tmp_path, target, 2**30)
    tier.attach("a", journal, "qwen")
    journal.record(b"k1", JournalRecord([1, 2, 3], b"thought", "s1"))
    journal.record(b"k2", JournalRecord([4], b"", "s2"))
    tier.close()
    again, other, foreign = Journal(), Journal(), Journal()
    tier = DiskTier(tmp_path, target, 2**30)
    tier.attach("a", again, "qwen")
    tier.attach("b", other, "qwen")
    assert list(again.records()) == list(journal.records())
    assert len(other) == 0
    again.forget(["s1"])
    tier.rewrite_journal("a")
    tier.close()
    tier = DiskTier(tmp_path, target, 2**30)
    tier.attach("a", foreign, "another tokenizer")
    assert len(foreign) == 0
    tier.close()


def test_a_prefix_that_sessions_of_a_tenant_share_is_on_disk_once(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert tiers.disk is not None
        first, _ = turn(store, tiers, IDS[:150])  # two segments and a rest
        tiers.flush()
        second, cached = turn(store, tiers, [*IDS[:140], *OTHER[:20]])
        stranger, _ = turn(store, tiers, IDS[:150], "b")
        tiers.flush()
        assert (cached, second != first) == (140, True)
        folder = tiers.disk.folder
        files = {path for name in (first, second) for path in (folder / name).glob("kv-*")}
        assert len(files) == 6
        assert len({path.stat().st_ino for path in files}) == 4
        assert all(path.stat().st_nlink == 1 for path in (folder / stranger).glob("kv-*"))
        assert tiers.disk.used_bytes == (150 + 32 + 150) * ROW_BYTES
        tiers.remove([first])
        assert tiers.disk.used_bytes == (160 + 150) * ROW_BYTES
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS[:140], *OTHER[:20], 1]) == (second, 160)


def test_a_disk_without_links_has_copies(
    target: DenseTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with disk_tiers(tmp_path, target) as (store, tiers):
        turn(store, tiers, IDS[:150])
        second, _ = turn(store, tiers, [*IDS[:140], *OTHER[:20]])
    with disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS[:140], *OTHER[:20], 1]) == (second, 160)


def test_files_that_are_deleted_under_an_engine_are_written_again(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal, again = Journal(), Journal()
    with disk_tiers(tmp_path, target) as (store, tiers):
        tiers.attach("", journal, "qwen")
        journal.record(b"k1", JournalRecord([1, 2, 3], b"", "s1"))
        first, _ = turn(store, tiers, IDS[:100])
        tiers.flush()
        assert tiers.disk is not None
        shutil.rmtree(tiers.disk.folder)
        for length in (150, 200):  # the first save finds that they are gone, the next one writes
            assert turn(store, tiers, IDS[:length]) == (first, length - 50)
            tiers.flush()
        journal.record(b"k2", JournalRecord([4], b"", "s1"))
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS, 1]) == (first, 200)
        tiers.attach("", again, "qwen")
        assert list(again.records()) == list(journal.records())
        assert tiers.disk is not None
        tiers.flush()
        shutil.rmtree(tiers.disk.folder / first)
        store._evict(next(iter(store._entries.values())))
        assert turn(store, tiers, [*IDS, 1, 2])[1] == 0, "cold, since nothing is left"
    assert "starts cold" in caplog.text


def test_another_models_session_in_our_folder_starts_cold(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_qwen3(dtype="float64", seed=1) as other, disk_tiers(tmp_path, other) as (_, tiers):
        assert tiers.disk is not None
        session = Session(other, NullDrafter(), session_id="a")
        session.sync(IDS)
        tiers.disk.save(session)
        foreign = tiers.disk.folder / "a"
    with disk_tiers(tmp_path, target) as (_, tiers):
        assert tiers.disk is not None
        shutil.copytree(foreign, tiers.disk.folder / "a")
    with caplog.at_level(logging.WARNING), disk_tiers(tmp_path, target) as (store, tiers):
        assert turn(store, tiers, [*IDS, 1])[1] == 0
    assert "was computed by another model: fingerprint 'tiny-1'" in caplog.text


def test_a_damaged_line_of_a_journal_is_left_out(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal()
    for number in range(3):
        journal.record(b"%d" % number, JournalRecord([number] * 5, b"", "s"))
    tier = DiskTier(tmp_path, target, 2**30)
    tier.attach("", journal, "qwen")
    tier.flush()
    path = next(tier.folder.glob("journal-*"))
    tier.close()
    whole = path.read_bytes()
    assert whole == journal_text(journal, "qwen")
    for place in range(0, len(whole), 71):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        found = Journal()
        tier = DiskTier(tmp_path, target, 2**30)
        tier.attach("", found, "qwen")
        tier.close()
        assert len(found) <= 2, f"the flipped bit at {place} was not found"
        for key, record in found.records():
            assert list(record.token_ids) == [int(key)] * 5
        assert path.read_bytes() == journal_text(found, "qwen"), "it was repaired"
    assert "damaged" in caplog.text
