"""Completion: scripts that shells read, and what comes when Tab is pressed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlite_agent.cli import completion
from dlite_agent.cli.main import VERBS, main

TAB = """
eval "$("$DLITE" completion bash)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_KEY=9
read -ra COMP_WORDS <<< "$1"
[[ "$1" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
complete -p dlite-agent > /dev/null || exit 9
_python_argcomplete dlite-agent "${COMP_WORDS[COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `dlite-agent` of this interpreter, a checkpoint and a GGUF file."""
    folder = tmp_path_factory.mktemp("work")
    command = folder / "bin" / "dlite-agent"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dlite_agent.cli.main "$@"\n')
    command.chmod(0o755)
    (folder / "checkpoint").mkdir()
    (folder / "model.gguf").touch()
    (folder / "turns.jsonl").touch()
    return folder


def press_tab(folder: Path, line: str) -> set[str]:
    """What a real bash has to offer behind a line."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    path = f"{folder / 'bin'}:/usr/bin:/bin"
    done = subprocess.run(
        [bash, "--norc", "-c", TAB, "tab", line],
        cwd=folder,
        env={"PATH": path, "DLITE": str(folder / "bin" / "dlite-agent"), "PYTHONPATH": _root()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {word.strip() for word in done.stdout.splitlines()}


def _root() -> str:
    return str(Path(__file__).parents[2])


def test_bash_offers_verbs_and_models(folder: Path) -> None:
    assert press_tab(folder, "dlite-agent ") == set(VERBS)
    offered = press_tab(folder, "dlite-agent chat ")
    assert offered == {"nano", "smollm2", "bin/", "checkpoint/", "model.gguf"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_what_the_shell_can_read(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "dlite-agent" in script
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=60)


class OfferedError(Exception):
    """The end of a process that answers a shell."""


def offer(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The same in this process: what argcomplete finds behind a line.

    Not through its `autocomplete`, which takes over the descriptors 8 and 9.
    """
    import argcomplete

    words = line.split(" ")
    found: list[str] = []

    def ask(parser: object, **options: object) -> None:
        finder = argcomplete.CompletionFinder(parser, **options)  # type: ignore[arg-type]
        found.extend(finder._get_completions(words[:-1], words[-1], "", None))
        raise OfferedError

    monkeypatch.setattr(argcomplete, "autocomplete", ask)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(OfferedError):
        main([])
    return [word.strip() for word in found]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("dlite-agent ch", ["chat"]),
        ("dlite-agent chat --to", ["--tools", "--tool-timeout"]),
        ("dlite-agent chat --dtype fl", ["float32", "float64"]),
        ("dlite-agent chat --tools files,t", ["files,tests"]),
        ("dlite-agent chat --root ch", ["checkpoint/"]),
        ("dlite-agent chat --drafter s", ["suffix"]),
        ("dlite-agent chat --seed ", []),
        ("dlite-agent doctor t", ["turns.jsonl"]),
        ("dlite-agent run --model n", ["nano"]),
        ("dlite-agent sessions p", ["purge"]),
        ("dlite-agent sessions purge --o", ["--older-than"]),
        ("dlite-agent completion z", ["zsh"]),
    ],
)
def test_options_choices_and_folders_complete(
    line: str, wanted: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert offer(line, monkeypatch) == wanted


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete.shell_integration", None)
    assert main(["completion", "bash"]) == 2
    assert "argcomplete" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_offers_nothing() -> None:
    assert completion._files("/nowhere/at/all") == []
