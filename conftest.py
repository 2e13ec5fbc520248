"""Runs the code blocks of README.md and docs/ as tests.

The Python blocks of a page share one namespace. A page scripts what the model says in an invisible
block, `<!--- invisible-code-block: python ... -->`, with the function `script`. A `console` block
whose command is `dlite-agent` and that shows output is run, and its output is compared.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from dlite_agent.testing import ScriptedEngine

PROMPT = "$ "


def set_up(namespace: dict[str, object]) -> None:
    """Give a page `script`: from then on every shared engine says these turns."""
    patch = namespace["_patch"] = pytest.MonkeyPatch()

    def script(*turns: str | Callable[..., str]) -> None:
        engine = ScriptedEngine(turns, model_name="nano")
        patch.setattr("dlite_agent.engine.engine.Engine.shared", lambda *_: engine)

    namespace["script"] = script


def tear_down(namespace: dict[str, object]) -> None:
    """Undo what `script` did."""
    patch = namespace["_patch"]
    assert isinstance(patch, pytest.MonkeyPatch)
    patch.undo()


def check_console(example: Example) -> str | None:
    """Run the block's command in this process; the difference of its output, or None."""
    block = str(example.parsed).replace("\\\n", "")
    command, _, expected = block.partition("\n")
    if not command.startswith(PROMPT + "dlite-agent ") or not expected.strip():
        return None
    capsys: pytest.CaptureFixture[str] = example.namespace["capsys"]
    from dlite_agent.cli.main import main

    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        with contextlib.suppress(SystemExit):  # argparse ends --help and --version so
            main(shlex.split(command.removeprefix(PROMPT))[1:])
    found = capsys.readouterr().out
    return None if found.strip() == expected.strip() else f"it printed:\n{found}"


pytest_collect_file = Sybil(
    parsers=[
        SkipParser(),
        PythonCodeBlockParser(),
        CodeBlockParser("console", check_console),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=set_up,
    teardown=tear_down,
    fixtures=["capsys"],
).pytest()
