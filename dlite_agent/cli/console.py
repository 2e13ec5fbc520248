"""How the command writes: answers to standard output, notes to standard error."""

from __future__ import annotations

import sys
import threading
import time

__all__ = ["LoadingNote", "dim", "note", "size", "table", "write"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_QUIET_S = 1.0
"""Loads that take less say nothing."""


def write(text: str = "", *, end: str = "\n") -> None:
    """Write to standard output at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def note(text: str, *, end: str = "\n") -> None:
    """Write to standard error at once: what is not part of the answer."""
    sys.stderr.write(text + end)
    sys.stderr.flush()


def dim(text: str) -> str:
    """The text in a weaker colour where standard output is a terminal, else as it is."""
    return f"{_DIM}{text}{_PLAIN}" if sys.stdout.isatty() else text


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
