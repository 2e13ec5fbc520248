"""`kill -9` during background saves: what was sealed is there, and nothing is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sessions import segments
from dlite_agent.sessions.disk_tier import DiskTier
from dlite_agent.sessions.session import Session
from dlite_agent.testing import assert_kv_is_of, tiny_qwen3
from tests.sessions import dying_writer


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, dying_writer.__file__]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        bufsize=1,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def kill_at(writers: subprocess.Popen[str], folder: Path, begin: int, spins: int) -> int:
    """Let a writer work in a folder, kill it in the middle, and return the last durable state."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    print(folder, file=writers.stdin)
    pid, durable = 0, -1
    for line in writers.stdout:
        word, _, number = line.strip().partition(" ")
        if word == "pid":
            pid = int(number)
        elif word == "durable":
            durable = int(number)
        elif word == "begin" and int(number) == begin:
            for _ in range(spins):  # a moment that is another one each time
                pass
            os.kill(pid, signal.SIGKILL)
        elif word == "gone":
            return durable
    raise AssertionError("the writers' process ended")


def check(target: DenseTransformer, root: Path, durable: int) -> None:
    tier = DiskTier(root, target, 2**30)  # the owner's death freed the lock
    tier.close()
    states = [dying_writer.state_ids(number % 40) for number in range(durable + 2)]
    folder = tier.folder / dying_writer.NAME
    if durable < 0 and not (folder / "manifest.json").exists():
        return
    loaded = Session.load(folder, target, NullDrafter())
    assert loaded.token_ids in states[max(0, durable) :], "the last durable state, or the next"
    assert_kv_is_of(target, loaded.kv, loaded.token_ids, tolerance=1e-10)
    loaded.save(folder)
    garbage = [path.name for path in folder.iterdir() if path.name.endswith(".partial")]
    assert garbage == []
    loaded.close()


def check_moments(
    writers: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    count: int,
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_ROWS", dying_writer.ROWS)
    moments = random.Random(seed)
    with tiny_qwen3(dtype="float64") as target:
        for number in range(count):
            folder = tmp_path / str(number)
            begin, spins = moments.randrange(0, 6), moments.randrange(0, 200_000)
            check(target, folder, kill_at(writers, folder, begin, spins))


def test_kill_during_a_background_save_loses_nothing_sealed(
    writers: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_moments(writers, tmp_path, monkeypatch, seed=5, count=5)


@pytest.mark.soak
def test_kill_at_fifty_moments(
    writers: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_moments(writers, tmp_path, monkeypatch, seed=50, count=50)
