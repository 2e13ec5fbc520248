"""Programs that tools run: output in parts, limits, and nothing that stays behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlite_agent.cli import tool_process
from dlite_agent.cli.chat_tools import ToolStopped
from dlite_agent.cli.tool_process import run_program

LONG_S = 600.0


def sh(script: str, folder: Path) -> tuple[str, str]:
    return run_program(["sh", "-c", script], folder, LONG_S, lambda text: None)


def ends(process_id: int) -> bool:
    """Whether a process is at its end; one that was killed is so a moment later."""
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 30.0)[0])
    finally:
        os.close(process)


def test_output_and_errors_come_in_order_with_the_ending(tmp_path: Path) -> None:
    assert sh("echo one; echo two >&2; pwd", tmp_path) == (f"one\ntwo\n{tmp_path}\n", "")
    assert sh("exit 3", tmp_path) == ("", "exit status 3")
    assert sh("kill -9 $$", tmp_path) == ("", "ended by signal 9")
    assert sh("cat; tty || true", tmp_path)[0].strip() == "not a tty"
    with pytest.raises(OSError, match="no-such-program"):
        run_program(["no-such-program"], tmp_path, 1.0, lambda text: None)


def test_whole_lines_are_told_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "go").write_text("")
    told: list[str] = []

    def on_output(text: str) -> None:
        told.append(text)
        (tmp_path / "go").unlink(missing_ok=True)

    script = "printf 'one\\nhalf'; while [ -e go ]; do sleep 0.01; done; echo"
    assert run_program(["sh", "-c", script], tmp_path, LONG_S, on_output) == ("one\nhalf\n", "")
    assert told[0] == "one\n"


def test_a_long_output_keeps_head_and_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_process, "MAX_HEAD_BYTES", 4)
    monkeypatch.setattr(tool_process, "MAX_TAIL_BYTES", 3)
    assert sh("printf 0123456", tmp_path)[0] == "0123456"
    assert sh("printf 0123456789", tmp_path)[0] == "0123\n(… 3 bytes are left out …)\n789"


def test_time_is_limited_and_children_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"

    class TimeIsUp(threading.Timer):
        """Comes when the program is where the test wants it."""

        def run(self) -> None:
            while not (child.exists() and child.read_text().endswith("\n")):
                self.finished.wait(0.01)
            self.function(*self.args)

    monkeypatch.setattr(tool_process.threading, "Timer", TimeIsUp)
    monkeypatch.setattr(tool_process, "_GRACE_S", 0.1)
    script = "trap '' TERM; echo begun; sleep 1000 & echo $! > child; wait"
    assert sh(script, tmp_path) == ("begun\n", "ended after 600 s, its limit")
    assert ends(int(child.read_text()))


def test_what_it_leaves_in_the_background_ends_too(tmp_path: Path) -> None:
    assert sh("sleep 1000 & echo $! > child; echo done", tmp_path) == ("done\n", "")
    assert ends(int((tmp_path / "child").read_text()))


def test_ctrl_c_ends_it_and_keeps_its_output(tmp_path: Path) -> None:
    def press(text: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    script = "echo begun; sleep 1000 & echo $! > child; wait"
    with pytest.raises(ToolStopped) as caught:
        run_program(["sh", "-c", script], tmp_path, LONG_S, press)
    assert caught.value.output == "begun\n"
    child = tmp_path / "child"
    assert not child.exists() or not child.read_text() or ends(int(child.read_text()))


def test_a_program_that_leaves_its_group_holds_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_process, "_GRACE_S", 0.3)
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid))\n"
        "print('done', flush=True)\n"
        "os._exit(0)"
    )
    done = run_program([sys.executable, "-c", code], tmp_path, LONG_S, lambda text: None)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert done == ("done\n", "")


def test_the_reader_of_an_ended_program_is_gone(tmp_path: Path) -> None:
    def open_files() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    before = open_files()
    for _ in range(3):
        sh("echo x", tmp_path)
    assert open_files() <= before
    assert subprocess._active == []  # type: ignore[attr-defined]  # nobody left to wait for
