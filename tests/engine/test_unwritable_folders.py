"""Folders that the system does not let us write: a warning, and never an error of a turn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import unwritable_folders
from tests.tiny_checkpoint import write_checkpoint

REPOSITORY = Path(__file__).parent.parent.parent
MOUNT = 'mount -t tmpfs -o size=96k tmpfs "$0" && exec "$@"'


def can_mount(folder: Path) -> bool:
    """Whether a process here may have a small disk of its own."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", MOUNT, str(folder), "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    # Not under pytest's folder, which is its user's alone.
    folder = Path(tempfile.mkdtemp())
    try:
        for path in (folder, folder / "kept", folder / "small"):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        model = write_checkpoint(folder / "model", max_positions=4096)
        has_disk = can_mount(folder / "small")
        small = str(folder / "small") if has_disk else "-"
        program = str(Path(unwritable_folders.__file__))
        command = [sys.executable, program, str(model), str(folder / "kept"), small]
        if has_disk:
            command = ["unshare", "-m", "sh", "-c", MOUNT, small, *command]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=REPOSITORY,
            timeout=100,
            env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr
        yield json.loads(done.stdout)
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        (
            "read-only",
            "no session is kept on disk: .*Permission denied; name a folder that you may",
        ),
        ("missing", "no session is kept on disk: .*Permission denied; name a folder that you may"),
        ("later read-only", "is not saved: Permission denied; .* it goes on in memory"),
        ("file limit", "is not saved: File too large; .* it goes on in memory"),
        ("full disk", "is not saved: No space left on device; .* it goes on in memory"),
    ],
)
def test_turns_go_on_in_memory(told: dict[str, Any], kind: str, warning: str) -> None:
    if kind not in told:
        pytest.skip("no right to mount a small disk")
    found = told[kind]
    assert found["answers"] == told["memory"]["answers"]
    assert found["origins"] == told["memory"]["origins"]
    assert found["origins"][0] == "cold"
    assert sum(re.search(warning, text) is not None for text in found["warnings"]) == 1, found
    assert len(found["warnings"]) <= 2, "once, and not at every turn"


def test_memory_alone_warns_of_nothing(told: dict[str, Any]) -> None:
    assert told["memory"]["warnings"] == []
