"""`dlite-agent sessions`: what an engine left on disk is listed, moved and deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlite_agent.cli.main import main
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sessions.disk_tier import DiskTier
from dlite_agent.sessions.journal import Journal, JournalRecord
from dlite_agent.sessions.kept import HINT, TENANT
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_qwen3


@pytest.fixture
def target() -> Iterator[DenseTransformer]:
    with tiny_qwen3() as target:
        yield target


@pytest.fixture
def root(target: DenseTransformer, tmp_path: Path) -> Path:
    root = tmp_path / "kept"
    tier = DiskTier(root, target, 2**30)
    for name in ("a", "b"):
        journal = Journal()
        tier.attach(name, journal, "qwen")
        journal.record(b"key", JournalRecord([1, 2], b"", f"session-{name}"))
        session = Session(target, NullDrafter(), session_id=f"session-{name}")
        session.sync([1, 2, 3])
        session.labels.update({TENANT: name, HINT: f"thread-{name}"})
        tier.save(session)
    tier.close()
    return root


def run(root: Path, *arguments: str) -> int:
    return main(["sessions", "--folder", str(root), *arguments])


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert run(root, "list", "--json") == 0
    sessions = json.loads(capsys.readouterr().out)["sessions"]
    return sorted(session["session_id"] for session in sessions)


def test_sessions_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(root, capsys) == ["session-a", "session-b"]
    assert run(root, "list", "--tenant", "a") == 0
    out = capsys.readouterr().out
    assert "session-a" in out
    assert "thread-a" in out
    assert "session-b" not in out
    assert run(root / "nothing", "list") == 0
    assert "no session is kept in" in capsys.readouterr().err


def test_purge_deletes_what_it_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, "purge", "--older-than", "1d") == 0
    assert listed(root, capsys) == ["session-a", "session-b"]
    assert run(root, "purge", "--all", "--tenant", "a") == 0
    assert listed(root, capsys) == ["session-b"]
    journals = [path.read_text() for path in root.glob("*/journal-*")]
    assert sum("session-a" in text for text in journals) == 0
    assert sum("session-b" in text for text in journals) == 1
    assert run(root, "purge", "--older-than", "0s") == 0
    assert listed(root, capsys) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("purge",), "either --older-than AGE or --all"),
        (("purge", "--all", "--older-than", "1d"), "either --older-than AGE or --all"),
        (("purge", "--older-than", "1 week"), "use a number and s, m, h or d"),
        (("export", "nobody", "/tmp/x"), "has no session 'nobody'"),
        (("import", "/dev/null"), "holds no saved session"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], expected: str
) -> None:
    assert run(root, *arguments) != 0
    assert expected in capsys.readouterr().err


def test_an_exported_session_can_be_loaded_and_imported(
    root: Path, target: DenseTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "exported"
    assert run(root, "export", "session-a", str(folder)) == 0
    assert Session.load(folder, target, NullDrafter()).token_ids == [1, 2, 3]
    assert run(root, "export", "session-a", str(folder)) != 0
    assert "exists" in capsys.readouterr().err
    other = tmp_path / "other"
    assert run(other, "import", str(folder)) == 0
    assert capsys.readouterr().out == "session-a\n"
    tier = DiskTier(other, target, 2**30)
    assert [kept.session_id for kept in tier.sessions()] == ["session-a"]
    assert run(other, "import", str(folder)) != 0
    assert "being written by another engine" in capsys.readouterr().err
    tier.close()


def test_an_id_that_is_a_path_is_not_imported(
    root: Path, target: DenseTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(target, NullDrafter(), session_id="../../outside")
    session.sync([1, 2, 3])
    session.save(tmp_path / "evil")
    assert run(root, "import", str(tmp_path / "evil")) != 0
    assert "cannot name a folder" in capsys.readouterr().err
