"""A program that a tool runs: its output as it comes, limits, and an end that leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from dlite_agent.cli.chat_tools import OnOutput, ToolStopped

__all__ = ["run_program"]

MAX_HEAD_BYTES, MAX_TAIL_BYTES = 8_000, 12_000
"""What is kept of the output, at its beginning and at its end."""
_GRACE_S = 1.0
"""From the request to end until the kill; and for a reader to empty the pipe."""
_REPORT_S = 0.25


def run_program(
    command: Sequence[str], folder: Path, timeout_s: float, on_output: OnOutput
) -> tuple[str, str]:
    """Run a program to its end, without input or terminal; what it started ends with it.

    Args:
        command: The program and its arguments.
        folder: Where it runs.
        timeout_s: Then it is ended.
        on_output: Called in this thread with the whole lines so far, now and then, while the
            result is sure to begin with them.

    Returns:
        What it printed, standard error included, cut in the middle; and how it ended, where that
        is not with status 0, else nothing.

    Raises:
        OSError: It cannot be started.
        ToolStopped: Ctrl-C, which ends it.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a group that can be ended, and no terminal to read from
    )
    assert process.stdout is not None
    output, late = _Output(process.stdout), threading.Event()
    # Not in this thread, which `on_output` may hold.
    timer = threading.Timer(timeout_s, _end_late, (process, late))
    timer.daemon = output.daemon = True
    try:
        timer.start()
        output.start()
        while _runs(process):
            output.report(on_output)
    except KeyboardInterrupt as interrupt:
        _end(process)
        output.join(_GRACE_S)
        raise ToolStopped(output.text()) from interrupt
    finally:
        timer.cancel()
        _end(process)
    output.join(_GRACE_S)  # a program that left the group may hold the pipe for ever
    return output.text(), _ending(process.returncode, timeout_s if late.is_set() else None)


def _runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_REPORT_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a program and all that it started to end, and kill what does not."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _ending(status: int, late_s: float | None) -> str:
    if late_s is not None:
        return f"ended after {late_s:g} s, its limit"
    if status < 0:
        return f"ended by signal {-status}"
    return f"exit status {status}" if status else ""


class _Output(threading.Thread):
    """Reads a pipe to its end and keeps head and tail."""

    def __init__(self, pipe: IO[bytes]) -> None:
        super().__init__()
        self._pipe = pipe
        self._lock = threading.Lock()
        self._head = b""
        self._tail = b""
        self._num_cut = 0
        self._num_reported = 0

    def run(self) -> None:
        """Read; whoever writes is never held up."""
        with self._pipe:
            while data := os.read(self._pipe.fileno(), 65_536):
                with self._lock:
                    room = MAX_HEAD_BYTES - len(self._head)
                    self._head += data[:room]
                    kept = self._tail + data[room:]
                    cut = max(0, len(kept) - MAX_TAIL_BYTES)
                    self._tail, self._num_cut = kept[cut:], self._num_cut + cut

    def report(self, on_output: OnOutput) -> None:
        """Tell of the whole lines of the head, where there are more than before."""
        with self._lock:
            sure = self._head[: self._head.rfind(b"\n") + 1]
        if len(sure) > self._num_reported:
            self._num_reported = len(sure)
            on_output(_decoded(sure))

    def text(self) -> str:
        """What was kept, with a line for what was not."""
        with self._lock:
            if not self._num_cut:
                return _decoded(self._head + self._tail)
            cut = f"\n(… {self._num_cut} bytes are left out …)\n"
            return _decoded(self._head) + cut + _decoded(self._tail)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")
