"""The command's frame: verbs, exit statuses, and errors as one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dlite_agent
from dlite_agent.cli.main import VERBS, main
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


def test_every_verb_has_help_that_loads_no_tensor_library() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from dlite_agent.cli.main import VERBS, main\n"
        "for verb in VERBS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([verb, '--help'])\n"
        "print([m for m in ('torch', 'transformers', 'langchain_core') if m in sys.modules])"
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
    assert process.wait(timeout=30) == 1
