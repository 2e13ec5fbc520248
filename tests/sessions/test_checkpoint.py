"""Saved sessions: what comes back, what a crash leaves, and what is never believed."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import resource
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import CapacityError, CheckpointError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.kv_rows import append_rows, rows_to_host
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions import segments
from dlite_agent.sessions.atomic_file import FolderLock
from dlite_agent.sessions.checkpoint import open_checkpoint
from dlite_agent.sessions.manifest import MANIFEST, Manifest, read_manifest
from dlite_agent.sessions.segments import write_segment
from dlite_agent.sessions.session import Session
from dlite_agent.testing import assert_kv_is_of, cold_decode, cold_forward, tiny_qwen3
from tests.sessions.tapped_lookup import TappedLookup

IDS = [i * 7 % 512 for i in range(40)]
SAMPLER = Sampler(SamplingParams(temperature=1.0, top_k=8, top_p=1.0), KeyedNoise(5))


@pytest.fixture
def target() -> Iterator[DenseTransformer]:
    with tiny_qwen3(dtype="float64") as target:
        yield target


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ROWS", 16)


def session_of(target: DenseTransformer, ids: list[int], name: str = "a") -> Session:
    session = Session(target, TappedLookup(), session_id=name)
    session.sync(ids)
    return session


def decoded(session: Session, count: int) -> list[int]:
    rounds = session.decode(SAMPLER, StopRules(frozenset(), count))
    return [token for round_ in rounds for token in round_.token_ids]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("kv-*"))


def test_a_loaded_session_goes_on_as_if_it_had_never_been_away(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with tiny_qwen3(dtype="float64") as later:
        session = session_of(target, IDS)
        decoded(session, 5)
        session.save(tmp_path)
        num_rows = later.rows_computed
        loaded = Session.load(tmp_path, later, TappedLookup())
        assert later.rows_computed == num_rows + 1, "one row, for its taps"
        assert loaded.session_id == "a"
        assert loaded.token_ids == session.token_ids
        assert loaded.last_turn_start == session.last_turn_start
        loaded.check_invariants()
        assert decoded(loaded, 12) == decoded(session, 12)
        assert_kv_is_of(later, loaded.kv, loaded.token_ids, tolerance=1e-10)


@pytest.mark.parametrize("has_answer", [False, True])
def test_taps_and_logits_after_a_load_are_those_of_a_fresh_forward(
    target: DenseTransformer, tmp_path: Path, has_answer: bool
) -> None:
    session = session_of(target, IDS)
    if has_answer:
        decoded(session, 5)
    session.save(tmp_path)
    loaded = Session.load(tmp_path, target, TappedLookup())
    num_rows = loaded.kv.length
    assert loaded.hidden is not None
    with cold_forward(target, loaded.token_ids[:num_rows], taps=(0, 1)) as (output, _):
        assert output.hidden is not None
        expected = output.hidden.row(num_rows - 1).states
    torch.testing.assert_close(loaded.hidden.states, expected, rtol=0.0, atol=1e-10)
    assert decoded(loaded, 6) == cold_decode(
        target, session.token_ids, SAMPLER, StopRules(frozenset(), 6)
    )


def test_a_segment_is_a_safetensors_file_of_the_kv(
    target: DenseTransformer, tmp_path: Path
) -> None:
    session = session_of(target, IDS)
    session.save(tmp_path)
    assert [(part.start, part.num_rows) for part in read_manifest(tmp_path).segments] == [
        (0, 16),
        (16, 16),
        (32, 8),
    ]
    with safe_open(tmp_path / read_manifest(tmp_path).segments[1].file, "pt") as file:
        assert torch.equal(file.get_tensor("kv"), rows_to_host(session.kv, 16, 32))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_a_save_writes_what_is_new(target: DenseTransformer, tmp_path: Path) -> None:
    session = session_of(target, IDS[:18])
    session.save(tmp_path)
    before = files(tmp_path)
    session.sync(IDS[:22])
    session.save(tmp_path)
    assert [part.num_rows for part in read_manifest(tmp_path).segments] == [16, 2, 4]
    assert set(before) < set(files(tmp_path))
    session.sync(IDS[:35])
    session.save(tmp_path)
    assert [part.num_rows for part in read_manifest(tmp_path).segments] == [16, 16, 3]
    assert len(files(tmp_path)) == 3, "the pieces are sealed as one segment"
    assert before[0] in files(tmp_path), "a sealed segment is written once"
    session.rewind(20)
    session.sync([*IDS[:20], 7, 7])
    session.save(tmp_path)
    loaded = Session.load(tmp_path, target, NullDrafter())
    assert_kv_is_of(target, loaded.kv, [*IDS[:20], 7, 7], tolerance=1e-10)
    assert before[0] in files(tmp_path)


def test_many_small_saves_leave_few_segments(target: DenseTransformer, tmp_path: Path) -> None:
    session = session_of(target, IDS[:1])
    for length in range(2, 16):
        session.sync(IDS[:length])
        session.save(tmp_path)
        assert len(files(tmp_path)) <= 9
    loaded = Session.load(tmp_path, target, NullDrafter())
    assert_kv_is_of(target, loaded.kv, IDS[:15], tolerance=1e-10)


def test_a_flipped_bit_anywhere_is_found(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(target, IDS[:20])
    session.save(tmp_path)
    num_used = pages_used(target)
    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        places = {0, 7, 8, 20, len(whole) // 2, len(whole) - 1} | set(range(31, len(whole), 9999))
        for place in sorted(place for place in places if 0 <= place < len(whole)):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            caplog.clear()
            if path.name == MANIFEST:
                with pytest.raises(CheckpointError, match="damaged"):
                    Session.load(tmp_path, target, TappedLookup())
                continue
            with caplog.at_level(logging.WARNING):
                loaded = Session.load(tmp_path, target, TappedLookup())
            assert "has changed since it was written" in caplog.text
            assert loaded.token_ids == IDS[:20]
            assert_kv_is_of(target, loaded.kv, IDS, tolerance=1e-10)
            loaded.close()
        path.write_bytes(whole)
    assert pages_used(target) == num_used, "what failed gave its pages back"


def pages_used(target: DenseTransformer) -> int:
    return target.pool.used_bytes // target.pool.page_bytes


@pytest.mark.parametrize("is_cut", [False, True])
def test_kv_behind_a_missing_segment_is_computed_again(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_cut: bool
) -> None:
    session = session_of(target, IDS)
    session.save(tmp_path)
    path = tmp_path / read_manifest(tmp_path).segments[1].file
    if is_cut:
        os.truncate(path, 100)
    else:
        path.unlink()
    num_rows = target.rows_computed
    with caplog.at_level(logging.WARNING):
        loaded = Session.load(tmp_path, target, TappedLookup())
    assert target.rows_computed - num_rows == len(IDS) - 16 + 1
    assert "of 40 saved KV rows 16 are used" in caplog.text
    assert_kv_is_of(target, loaded.kv, IDS, tolerance=1e-10)
    loaded.save(tmp_path)
    caplog.clear()
    Session.load(tmp_path, target, TappedLookup())
    assert caplog.text == "", "the save repaired it"


def test_kv_that_the_model_does_not_compute_is_not_used(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(target, IDS)
    with target.new_cache() as foreign:
        append_rows(foreign, rows_to_host(session_of(target, IDS[::-1]).kv, 0, len(IDS)))
        session.kv.truncate_to(0)
        append_rows(session.kv, rows_to_host(foreign, 0, len(IDS)))
    session.save(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = Session.load(tmp_path, target, TappedLookup())
    assert "this model computes other KV" in caplog.text
    assert_kv_is_of(target, loaded.kv, IDS, tolerance=1e-10)


def test_kv_of_other_tokens_is_not_used(
    target: DenseTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session_of(target, IDS).save(tmp_path)
    other = [*IDS[:20], *IDS[:20]]
    named = replace(read_manifest(tmp_path), token_ids=array("i", other))
    (tmp_path / MANIFEST).write_bytes(named.to_bytes())
    with caplog.at_level(logging.WARNING):
        loaded = Session.load(tmp_path, target, TappedLookup())
    assert "has KV of other tokens" in caplog.text
    assert_kv_is_of(target, loaded.kv, other, tolerance=1e-10)


def changed(manifest: Manifest, what: str) -> Manifest:
    first, *rest = manifest.segments
    match what:
        case "a file elsewhere":
            return replace(manifest, segments=(replace(first, file="../precious"), *rest))
        case "a gap":
            return replace(manifest, segments=tuple(rest))
        case "rows without tokens":
            return replace(manifest, num_rows=41)
        case "tokens without rows":
            return replace(manifest, num_rows=38)
        case "a turn behind the end":
            return replace(manifest, turn_start=99)
    return replace(manifest, token_ids=array("i", [*IDS[:-1], 512]))


@pytest.mark.parametrize(
    "what",
    [
        "a file elsewhere",
        "a gap",
        "rows without tokens",
        "tokens without rows",
        "a turn behind the end",
        "an id outside the vocabulary",
    ],
)
def test_a_manifest_that_we_never_write_is_refused(
    target: DenseTransformer, tmp_path: Path, what: str
) -> None:
    session_of(target, IDS).save(tmp_path / "session")
    (tmp_path / "precious").write_text("keep")
    written = changed(read_manifest(tmp_path / "session"), what).to_bytes()
    (tmp_path / "session" / MANIFEST).write_bytes(written)
    with pytest.raises(CheckpointError, match=r"damaged|vocabulary"):
        Session.load(tmp_path / "session", target, NullDrafter())
    assert (tmp_path / "precious").exists()


def test_another_model_is_refused(target: DenseTransformer, tmp_path: Path) -> None:
    session_of(target, IDS[:5]).save(tmp_path)
    with (
        tiny_qwen3(dtype="float64", seed=1) as other,
        pytest.raises(CheckpointError, match=r"another model: fingerprint 'tiny-0' instead of"),
    ):
        Session.load(tmp_path, other, NullDrafter())
    with (
        tiny_qwen3(dtype="float32") as other,
        pytest.raises(CheckpointError, match=r"dtype 'float64' instead of 'float32'"),
    ):
        Session.load(tmp_path, other, NullDrafter())


def test_a_save_over_another_models_session_replaces_it(
    target: DenseTransformer, tmp_path: Path
) -> None:
    with tiny_qwen3(dtype="float64", seed=1) as other:
        session_of(other, IDS).save(tmp_path)
    session_of(target, IDS[:20]).save(tmp_path)
    loaded = Session.load(tmp_path, target, NullDrafter())
    assert_kv_is_of(target, loaded.kv, IDS[:20], tolerance=1e-10)
    assert len(files(tmp_path)) == 2


def test_a_folder_without_a_session_is_refused(target: DenseTransformer, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing", Path("/dev/null")):
        with pytest.raises(CheckpointError, match="holds no saved session"):
            Session.load(folder, target, NullDrafter())


def test_a_manifest_of_another_version_is_refused(
    target: DenseTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dlite_agent.sessions.manifest._FORMAT", 99)
        session_of(target, IDS[:5]).save(tmp_path)
    with pytest.raises(CheckpointError, match="has format 99"):
        Session.load(tmp_path, target, NullDrafter())


def test_two_writers_of_a_folder_are_told(target: DenseTransformer, tmp_path: Path) -> None:
    session = session_of(target, IDS[:5])
    with FolderLock(tmp_path), pytest.raises(CheckpointError, match="being written by another"):
        session.save(tmp_path)
    session.save(tmp_path)
    Session.load(tmp_path, target, NullDrafter())


@pytest.mark.parametrize(
    ("number", "when"), [(errno.ENOSPC, 0), (errno.EROFS, 1), (errno.EIO, 2), (errno.ENOSPC, 4)]
)
def test_a_save_that_fails_leaves_what_was_saved(
    target: DenseTransformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    when: int,
) -> None:
    session = session_of(target, IDS[:20])
    session.save(tmp_path)
    session.sync(IDS)
    calls = iter(range(100))
    real = os.fsync

    def failing(descriptor: int) -> None:
        if next(calls) == when:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(CheckpointError, match=f"{os.strerror(number)}; "):
            session.save(tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    loaded = Session.load(tmp_path, target, NullDrafter())
    assert loaded.token_ids == IDS[:20]
    assert_kv_is_of(target, loaded.kv, IDS, tolerance=1e-10)
    session.save(tmp_path)
    assert Session.load(tmp_path, target, NullDrafter()).token_ids == IDS


def test_a_full_disk_is_an_error_that_says_so(target: DenseTransformer, tmp_path: Path) -> None:
    session = session_of(target, IDS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            session.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    session.save(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(target: DenseTransformer) -> None:
    session = session_of(target, IDS[:5])
    for folder in ("/dev/null/session", "/proc/session"):
        with pytest.raises(CheckpointError, match=f"cannot save the session to '{folder}'"):
            session.save(folder)


def test_what_a_crash_left_behind_is_cleared(target: DenseTransformer, tmp_path: Path) -> None:
    session = session_of(target, IDS)
    (tmp_path / "kv-00000000-16-00.safetensors.partial").write_bytes(b"half")
    write_segment(tmp_path, 16, rows_to_host(session.kv, 0, 16), session.manifest().token_ids)
    session.save(tmp_path)
    assert len(files(tmp_path)) == 3


def test_a_load_without_room_gives_its_pages_back(target: DenseTransformer, tmp_path: Path) -> None:
    session_of(target, [*IDS] * 10).save(tmp_path)
    with tiny_qwen3(dtype="float64", max_kv_bytes=2**18) as small:
        assert small.pool.num_pages * PAGE_ROWS < 400
        with pytest.raises(CapacityError):
            Session.load(tmp_path, small, NullDrafter())
        assert small.pool.used_bytes == 0


def test_a_loaded_session_with_other_ids_is_not_mixed_up(
    target: DenseTransformer, tmp_path: Path
) -> None:
    session = session_of(target, IDS)
    session.save(tmp_path)
    manifest = read_manifest(tmp_path)
    assert replace(manifest, segments=()).to_bytes() != manifest.to_bytes()
    loaded = Session.load(tmp_path, target, NullDrafter(), session_id="b")
    assert loaded.session_id == "b"
    report = loaded.sync([*IDS[:30], 1, 2, 3])
    assert (report.cached, report.prefilled) == (30, 3)


def test_a_session_that_is_closed_while_it_is_read_writes_to_nobodys_pages(
    target: DenseTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is in the middle of a segment: closing waits for it, and keeps none of it."""
    session_of(target, IDS).save(tmp_path)
    num_used, is_reading, may_go = pages_used(target), threading.Event(), threading.Event()
    real = segments._read_rows

    def slow(file: FileIO, rows: torch.Tensor, hashed: hashlib._Hash) -> None:
        is_reading.set()
        may_go.wait(60.0)
        real(file, rows, hashed)

    monkeypatch.setattr(segments, "_read_rows", slow)
    saved = open_checkpoint(tmp_path, target)
    loaded = Session(target, NullDrafter(), session_id="b")
    steps = loaded.restore_steps(saved, len(IDS), lambda: True)
    next(steps)
    assert is_reading.wait(60.0)
    closing = threading.Thread(target=loaded.close)
    closing.start()
    assert pages_used(target) > num_used, "the reader's pages are not given back under it"
    may_go.set()
    closing.join(60.0)
    assert pages_used(target) == num_used
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == 0
    assert loaded.kv.length == 0
