from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dlite_agent.engine.secret import machine_secret


def test_the_secret_is_made_once_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    secret = machine_secret(tmp_path / "new")
    assert machine_secret(tmp_path / "new") == secret
    assert len(secret) == 32
    assert (tmp_path / "new" / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["secret"]


def test_without_a_folder_each_process_has_its_own() -> None:
    assert machine_secret(None) != machine_secret(None)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_secret_that_others_could_see_is_not_used(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    known = machine_secret(tmp_path)
    (tmp_path / "secret").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert machine_secret(tmp_path) != known
    assert "others may have read" in caplog.text


def test_a_secret_that_was_planted_as_a_link_or_cut_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"k" * 32)
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    assert machine_secret(tmp_path) != b"k" * 32
    (tmp_path / "secret").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "secret")
    assert machine_secret(tmp_path) == b"k" * 32
    (tmp_path / "secret").write_bytes(b"short")
    assert machine_secret(tmp_path) != b"short"
