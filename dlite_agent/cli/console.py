"""How the command writes: answers to standard output, notes to standard error; and its status.

Text for a pipe is passed on as it stands. Styles, tables, panels and progress are rich's, which is
imported when something is shown with it: help and completion do without.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from dlite_agent.config import wants_colour
from dlite_agent.errors import ConfigurationError, DLiteError, RequestError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress

__all__ = [
    "LoadingNote",
    "error_status",
    "harmless",
    "has_colours",
    "note",
    "open_streams",
    "rendered",
    "silence",
    "size",
    "styled",
    "table",
    "write",
]

# Control characters but for line ends and tabs, and the signs that turn the direction of a line.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_QUIET_S = 1.0
"""Loads that take less say nothing."""
_WHOLE = 100_000
"""Columns; nothing that we show is wider."""
_RULED = "\n".join(["    "] * 2 + [" -  "] + ["    "] * 5)
"""A table's box: a rule below the header, and nothing else; it is ASCII, for every encoding."""


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
    sys.stderr.write((harmless(text) if sys.stderr.isatty() else text) + end)
    sys.stderr.flush()


def error_status(error: DLiteError) -> int:
    """Exit status of an error that we raise on purpose."""
    return 2 if isinstance(error, ConfigurationError | RequestError) else 3


def has_colours() -> bool:
    """Whether standard output is a terminal that wants colours."""
    return sys.stdout.isatty() and wants_colour()


def styled(text: str, style: str = "") -> str:
    """A text for standard output: a terminal gets it harmless, and in a style of rich's."""
    if not sys.stdout.isatty():
        return text
    if not style or not has_colours():
        return harmless(text)
    from rich.style import Style

    return Style.parse(style).render(harmless(text))


def rendered(what: RenderableType, *, is_whole: bool = False) -> str:
    """What rich makes of something for standard output, its last line end included.

    It is returned, not written: rich would end the process where nobody reads any more.

    Args:
        what: Strings in it are text, never markup; make those that are not ours `harmless`.
        is_whole: Cut and fold nothing; a terminal wraps what is wider.
    """
    console = _console(sys.stdout, _WHOLE if is_whole else None)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def _console(stream: TextIO, width: int | None = None) -> Console:
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=stream.isatty(),
        color_system="auto" if wants_colour() else None,
        width=width,
        height=width and 1,  # rich asks for both where the terminal is dumb
        markup=False,
        emoji=False,
        highlight=False,
    )


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    from rich.box import Box
    from rich.table import Table

    shown = Table(
        box=Box(_RULED, ascii=True),
        show_edge=False,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        border_style="dim",
    )
    for number, title in enumerate(header):
        shown.add_column(title, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*map(harmless, row))
    return rendered(shown, is_whole=True).removesuffix("\n")


class LoadingNote:
    """A bar on standard error that says how far a load is; silent where that is no terminal.

    Pass it to `Engine.load`, which calls it from another thread, and close it afterwards.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._is_closed = not sys.stderr.isatty()

    def __call__(self, stage: str, fraction: float) -> None:
        """Show a stage and its share done in [0, 1]."""
        with self._lock:
            if self._is_closed or time.perf_counter() - self._began_s < _QUIET_S:
                return
            if self._progress is None:
                self._progress = _open_progress(stage)
            self._progress.update(self._progress.task_ids[0], description=stage, completed=fraction)

    def close(self) -> None:
        """Wipe the bar."""
        with self._lock:
            self._is_closed = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


def _open_progress(stage: str) -> Progress:
    from rich.progress import Progress

    progress = Progress(
        console=_console(sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False
    )
    progress.add_task(stage, total=1.0)
    progress.start()
    progress.console.show_cursor()  # or a SIGTERM would leave the shell without one
    return progress
