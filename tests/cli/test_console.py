from __future__ import annotations

import io
import sys

import pytest

from dlite_agent.cli import console
from dlite_agent.cli.console import LoadingNote, dim, harmless, size, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_are_for_a_person(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_a_table_aligns_its_columns() -> None:
    assert table(["", "n"], [["ours", "10"], ["other", "7"]]).splitlines() == [
        "        n",
        "-----  --",
        "ours   10",
        "other   7",
    ]


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert dim("text") == "text"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert dim("text") == "\x1b[2mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim("text") == "text"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert dim("text") == "text"


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    assert harmless("a\tb\nç 你 👨\u200d👩") == "a\tb\nç 你 👨\u200d👩"
    assert harmless("\x1b[2J\r\x07\x9b") == "\\x1b[2J\\r\\x07\\x9b"
    assert harmless("rm \u202egpj.x") == "rm \\u202egpj.x"


def test_a_long_load_is_shown_on_a_terminal_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(console, "_QUIET_S", -1.0)
    note = LoadingNote()
    for fraction in (0.1, 0.1, 1.0):
        note("download", fraction)
    note.close()
    note("load", 0.5)
    assert terminal.getvalue() == ("\rdownload 10%\rdownload 100%\r             \r")


def test_a_load_is_silent_when_it_is_quick_or_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        note = LoadingNote()
        note("load", 0.5)
        note.close()
        assert stream.getvalue() == ""
