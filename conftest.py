"""Runs the code blocks of README.md and docs/ as tests.

The Python blocks of a page share one namespace. A page scripts what the model says in an invisible
block, `<!--- invisible-code-block: python ... -->`, with the function `script`. A `console` block
whose command is `dlite-agent` and that shows output is run, and its output is compared.
"""

from __future__ import annotations

import contextlib
import shlex

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

PROMPT = "$ "


def check_console(example: Example) -> str | None:
    """Run the block's command in this process; the difference of its output, or None."""
    command, _, expected = str(example.parsed).partition("\n")
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
    patterns=["README.md", "docs/**/*.md"],
    fixtures=["capsys"],
).pytest()
