"""How the command writes: answers to standard output, notes to standard error; and its status."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from typing import TextIO

from dlite_agent.config import wants_colour
from dlite_agent.errors import ConfigurationError, DLiteError, RequestError

__all__ = [
    "LoadingNote",
    "dim",
    "error_status",
    "harmless",
    "note",
    "open_streams",
    "silence",
    "size",
    "table",
    "write",
]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters but for line ends and tabs, and the signs that turn the direction of a line.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_QUIET_S = 1.0
"""Loads that take less say nothing."""


def open_streams() -> None:
    """Give the process standard streams that work, whatever its parent left open.

    A closed one (`<&-`, `>&-`) is empty or goes nowhere, on its own descriptor, so that no file
    that is opened later takes its place. A character that the terminal's encoding does not have is
    written as an escape, and a byte that is no character is read as U+FFFD.
    """
    for name in ("stdin", "stdout", "stderr"):
        is_read = name == "stdin"
        if getattr(sys, name) is None:
            setattr(sys, name, _open_nothing(is_read=is_read))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if is_read else "backslashreplace")


def silence() -> None:
    """Throw away what an output that fails still has to write, and all that follows."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())  # Python flushes once more at exit
            os.close(nothing)


def _open_nothing(*, is_read: bool) -> TextIO:
    """The null device, on the lowest free descriptor, for programs that we start as well."""
    descriptor = os.open(os.devnull, os.O_RDONLY if is_read else os.O_WRONLY)
    os.set_inheritable(descriptor, True)
    return os.fdopen(descriptor, "r" if is_read else "w", encoding="utf-8")


def write(text: str = "", *, end: str = "\n") -> None:
    """Write to standard output at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str, *, end: str = "\n") -> None:
    """Write to standard error at once: what is not part of the answer."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def error_status(error: DLiteError) -> int:
    """Exit status of an error that we raise on purpose."""
    return 2 if isinstance(error, ConfigurationError | RequestError) else 3


def dim(text: str) -> str:
    """The text in a weaker colour where standard output is a terminal that wants it."""
    return f"{_DIM}{text}{_PLAIN}" if sys.stdout.isatty() and wants_colour() else text


def harmless(text: str) -> str:
    """The text with what a terminal would obey, or show in another order, as escapes."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def size(num_bytes: float) -> str:
    """Bytes for a person: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join(
            [first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        )

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


class LoadingNote:
    """A line on standard error that says how far a load is; silent where that is no terminal.

    Pass it to `Engine.load`, which calls it from another thread, and close it afterwards.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._shown = ""
        self._is_closed = not sys.stderr.isatty()

    def __call__(self, stage: str, fraction: float) -> None:
        """Show a stage and its share done in [0, 1]."""
        text = f"{stage} {fraction:.0%}"
        with self._lock:
            is_quick = time.perf_counter() - self._began_s < _QUIET_S
            if self._is_closed or is_quick or text == self._shown:
                return
            note("\r" + text.ljust(len(self._shown)), end="")
            self._shown = text

    def close(self) -> None:
        """Wipe the line."""
        with self._lock:
            self._is_closed = True
            if self._shown:
                note("\r" + " " * len(self._shown) + "\r", end="")
                self._shown = ""
