"""The command's frame: verbs, exit statuses, and errors as one line."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dlite_agent
from dlite_agent.cli.examples import EXAMPLES
from dlite_agent.cli.main import VERBS, _parser, main
from dlite_agent.errors import CapacityError, ConfigurationError

RUN = "dlite_agent.cli.doctor.run"


def raising(error: BaseException) -> object:
    def run(arguments: object) -> int:
        raise error

    return run


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dlite-agent {dlite_agent.__version__}\n"


def test_without_a_verb_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().out
    assert all(verb in listed for verb in VERBS)


def test_every_verb_has_help_that_loads_no_heavy_library() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from dlite_agent.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([verb, '--help'])\n"
        "heavy = ('torch', 'transformers', 'langchain_core', 'rich')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_verb_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serf"])
    assert caught.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("serf", "did you mean 'serve'?; 'dlite-agent --help' says more"),
        ("chat --tempreture 3", "did you mean '--temperature'?; 'dlite-agent chat --help' says"),
        ("chat --temp 3", "did you mean '--temperature'?"),
        ("chat --dtype float23", "did you mean 'float32'?"),
        ("sessions purge --older=3d", "did you mean '--older-than'?"),
        ("--vrsion", "did you mean '--version'?"),
        ("chat --zzzzzz", "unrecognized arguments: --zzzzzz; 'dlite-agent chat --help' says more"),
    ],
)
def test_a_wrong_word_is_one_line_with_the_near_one(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 1


def test_help_says_defaults_statuses_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "exit status:\n  0    done" in capsys.readouterr().out
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        assert "examples:\n  " in shown
        assert f"dlite-agent {verb}" in shown.partition("examples:")[2]
        assert "default: None" not in shown
        assert "default: False" not in shown
        assert "default: []" not in shown
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "(default: 8000)" in capsys.readouterr().out


def test_every_option_says_what_it_is() -> None:
    def silent(parser: argparse.ArgumentParser) -> list[str]:
        found = [] if parser.description else [parser.prog]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [word for below in action.choices.values() for word in silent(below)]
            elif not action.help:
                found.append(f"{parser.prog} {action.dest}")
        return found

    assert silent(_parser()) == []


def test_every_example_is_one_that_the_command_takes() -> None:
    parser = _parser()
    lines = [line for text in EXAMPLES.values() for line in text.splitlines()[1:]]
    for line in lines:
        command = re.split(r" > |\)\"", line.partition("dlite-agent ")[2])[0]
        assert parser.parse_known_args(shlex.split(command))[1] == [], line


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigurationError("--vram is -1; use 24"), 2), (CapacityError("full; try again"), 3)],
)
def test_an_error_of_ours_is_one_line_and_a_status(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(RUN, raising(error))
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"dlite-agent doctor: {error}\n"


def test_an_error_that_is_not_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_ctrl_c_is_a_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RUN, raising(KeyboardInterrupt()))
    assert main(["doctor"]) == 130
    assert "cancelled" in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_a_reader_that_went_away_ends_the_command_quietly() -> None:
    code = (
        "import sys\n"
        "from dlite_agent.cli import doctor, main\n"
        "def run(arguments):\n"
        "    for _ in range(10**6): print('line', flush=True)\n"
        "doctor.run = run\n"
        "sys.exit(main.main(['doctor']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=30) == 141


# A verb that reads a line, writes two and returns its own "no", as the rest of the command sees it.
VERB = (
    "import sys\n"
    "from dlite_agent.cli import doctor, main\n"
    "from dlite_agent.cli.console import note, write\n"
    "def run(arguments):\n"
    "    write(repr(sys.stdin.readline())); note('a note'); write('é → 你')\n"
    "    return 1\n"
    "doctor.run = run\n"
    "sys.exit(main.main(sys.argv[1:]))"
)


def in_shell(words: str, argv: str = "doctor", **environment: str) -> tuple[int, str, str]:
    """Run the verb with the shell's redirections; its status, output and errors."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {argv} {words}', sys.executable, VERB],
        capture_output=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,
        timeout=60,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_closed_input_is_an_empty_one() -> None:
    assert in_shell("<&-") == (1, "''\né → 你\n", "a note\n")


@pytest.mark.parametrize("words", [">&- <&-", ">&- 2>&- <&-", "2>&- <&- >&-"])
def test_output_that_is_closed_is_thrown_away_and_the_status_stays(words: str) -> None:
    status, out, err = in_shell(words)
    assert (status, out) == (1, "")
    assert err in ("", "a note\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--help", ">&-"),
        ("--help", "| true"),
        ("doctor --help", "| head -1"),
        ("doctor --help", ">/dev/full"),
        ("--version", ">/dev/full"),
    ],
)
def test_help_is_never_a_traceback(argv: str, words: str) -> None:
    status, _, err = in_shell(words, argv)
    assert status in ({3} if "full" in words else {0, 141})
    assert "Traceback" not in err
    assert "Exception" not in err


def test_a_full_disk_under_the_output_is_one_line_and_a_status() -> None:
    status, _, err = in_shell(">/dev/full </dev/null")
    assert status == 3
    assert err.startswith("dlite-agent doctor: no space left")
    assert len(err.splitlines()) == 1


def test_errors_that_nobody_reads_leave_the_status() -> None:
    assert in_shell("</dev/null 2> >(true)")[0] in (1, 141)
    assert in_shell("--no-such 2>&- </dev/null")[0] == 2


def test_bytes_that_the_terminal_does_not_know_end_nothing() -> None:
    words = "< <(printf '\\xff\\n')"
    assert in_shell(words, PYTHONIOENCODING="utf-8")[:2] == (1, "'\ufffd\\n'\né → 你\n")
    status, out, _ = in_shell(words, PYTHONIOENCODING="ascii")
    assert (status, out.splitlines()[1]) == (1, "\\xe9 \\u2192 \\u4f60")
