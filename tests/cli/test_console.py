from __future__ import annotations

import io
import re
import sys
import threading

import pytest

from dlite_agent.cli import console
from dlite_agent.cli.console import LoadingNote, harmless, note, size, styled, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(
    monkeypatch: pytest.MonkeyPatch, name: str = "stderr", term: str = "xterm"
) -> Terminal:
    """An output that is a terminal; no fixture, since pytest puts its own between the two."""
    monkeypatch.setattr(sys, name, Terminal())
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = getattr(sys, name)
    assert isinstance(shown, Terminal)
    return shown


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_are_for_a_person(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_a_table_aligns_its_columns() -> None:
    assert table(["", "n"], [["ours", "10"], ["other", "7"]]).splitlines() == [
        "        n",
        "----- ---",
        "ours   10",
        "other   7",
    ]


def test_a_table_takes_text_as_it_is_and_keeps_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "x y " * 100 + "z"
    lines = table(["id", "hint"], [["[b]你[/b] :smile:", long], ["\x1b[2J", "1"]]).splitlines()
    assert len(lines) == 4
    assert lines[2] == f"[b]你[/b] :smile:  {long}"
    assert lines[3].startswith("\\x1b[2J ")
    assert lines[3].endswith(" 1")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_table_is_as_wide_on_a_terminal(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["a" * 200, "b" * 200]]
    open_terminal(monkeypatch, "stdout", term)
    shown = table(["", "n"], rows)
    assert ("\x1b" in shown) is (term == "xterm")
    on_terminal = re.sub("\x1b\\[[0-9;]*m", "", shown)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert on_terminal == table(["", "n"], rows)


def test_colour_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert styled("text\x07", "dim") == "text\x07", "a pipe gets what there is"
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert styled("[b]text\x07", "dim") == "\x1b[2m[b]text\\x07\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("text\x07", "dim") == "text\\x07"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("text\x07", "dim") == "text\\x07"


def test_what_a_terminal_would_obey_is_written_as_an_escape() -> None:
    assert harmless("a\tb\nç 你 👨\u200d👩") == "a\tb\nç 你 👨\u200d👩"
    assert harmless("\x1b[2J\r\x07\x9b") == "\\x1b[2J\\r\\x07\\x9b"
    assert harmless("rm \u202egpj.x") == "rm \\u202egpj.x"


def test_a_note_on_a_terminal_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    note("no model '\x1b[2J'")
    assert terminal.getvalue() == "no model '\\x1b[2J'\n"


def test_a_long_load_is_shown_on_a_terminal_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(console, "_QUIET_S", -1.0)
    loading = LoadingNote()
    threads = [threading.Thread(target=loading, args=("download", share)) for share in (0.1, 1.0)]
    for thread in threads:
        thread.start()
        thread.join()
    hidden, shown = terminal.getvalue().split("\x1b[?25h")
    assert hidden.startswith("\x1b[?25l")
    assert "\x1b[?25l" not in shown, "whatever ends us, the cursor is there"
    loading.close()
    _, _, after = terminal.getvalue().rpartition("download")
    assert "100%" in after
    assert after.endswith("\x1b[2K"), "the line is empty"
    loading("load", 0.5)
    assert terminal.getvalue().endswith(after)


def test_a_dumb_terminal_gets_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, term="dumb")
    monkeypatch.setattr(console, "_QUIET_S", -1.0)
    loading = LoadingNote()
    loading("load", 0.5)
    loading.close()
    assert "\x1b" not in terminal.getvalue()


def test_a_load_is_silent_when_it_is_quick_or_nobody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        loading = LoadingNote()
        loading("load", 0.5)
        loading.close()
        assert stream.getvalue() == ""
