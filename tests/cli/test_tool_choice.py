"""Which tools the chat's options mean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlite_agent.cli.chat_tools import ChatTool
from dlite_agent.cli.tool_choice import GROUPS, ToolOptions, choose_tools
from dlite_agent.errors import ConfigurationError
from dlite_agent.nano.tools import REPAIR_TOOLS

MINE = '''
from langchain_core.tools import tool

def lookup(word: str, times: int = 1) -> str:
    """Look a word up.

    Args:
        word: Which.
        times: How often.
    """
    return f"{word} " * times

@tool
def ready(city: str) -> dict:
    """Say the weather."""
    return {"city": city}

def bare(): ...

def fails():
    """Fails."""
    raise RuntimeError("broken")
'''


def names(root: Path | None, *given: str) -> list[str]:
    options = ToolOptions(root=None if root is None else str(root), names=given)
    return [tool.spec.name for tool in choose_tools(options)]


def run(tool: ChatTool, **arguments: object) -> str:
    return tool.run(arguments, lambda text: None)  # type: ignore[arg-type]


def test_groups_and_names_each_once_in_order(tmp_path: Path) -> None:
    assert names(None) == []
    assert names(tmp_path) == list(GROUPS["files"])
    assert names(tmp_path, "run_command,read_file", "tests,read_file") == [
        "run_command",
        "read_file",
        "run_tests",
    ]
    learned = [spec["function"]["name"] for spec in REPAIR_TOOLS]  # type: ignore[index]
    assert names(tmp_path, "repair") == learned


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing", "known are the groups files"),
        ("files", "add --root ."),
        ("nowhere.py:f", "cannot be loaded"),
        ("no_such_module:f", "cannot be loaded"),
        ("sys:no_such_name", "cannot be loaded"),
        ("math:pi", "is no function"),
        ("mine.py:bare", "makes no tool"),
        ("mine.py:lookup,mine.py:lookup", "two tools 'lookup'"),
    ],
)
def test_what_cannot_be_had_is_refused(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    with pytest.raises(ConfigurationError, match=said):
        names(None, given)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="--tool-timeout"):
        choose_tools(ToolOptions(timeout_s=wrong))


def test_functions_and_langchain_tools_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    given = [f"{tmp_path / 'mine.py'}:{name}" for name in ("lookup", "ready", "fails")]
    lookup, ready, fails = choose_tools(ToolOptions(names=given))
    assert lookup.spec.description.startswith("Look a word up.")
    assert lookup.spec.parameters["required"] == ["word"]
    assert run(lookup, word="a", times=2) == "a a "
    assert run(lookup, word="a", times="many").startswith("Error: ")
    assert run(ready, city="Bern") == "{'city': 'Bern'}"
    assert run(fails) == "Error: broken"
    assert not any(tool.is_reading for tool in (lookup, ready, fails)), "nobody knows what they do"


def test_tests_run_what_the_folder_has_or_what_is_said(tmp_path: Path) -> None:
    def run_tests(command: str | None = None, timeout_s: float = 600.0) -> str:
        options = ToolOptions(str(tmp_path), ["tests"], command, timeout_s)
        return run(choose_tools(options)[0])

    assert run_tests("echo all good; exit 1") == "all good"
    assert run_tests("true") == "\n(ok)"
    assert run_tests("exit 4") == "\n(exit status 4)"
    assert run_tests("sleep 1000", 0.3) == "\n(ended after 0.3 s, its limit)"
    (tmp_path / "run_tests.py").write_text("import sys; print(sys.executable)")
    assert run_tests() == sys.executable
    (tool,) = choose_tools(ToolOptions(str(tmp_path), ["tests"]))
    assert tool.preview is not None
    assert tool.preview({})[0].endswith(" run_tests.py")


def test_a_command_says_how_it_ended(tmp_path: Path) -> None:
    (tool,) = choose_tools(ToolOptions(str(tmp_path), ["shell"]))
    assert run(tool, command="echo a; exit 2") == "a\n(exit status 2)"
    assert run(tool, command="true") == "(ok)"
    assert run(tool, command="a\0b").startswith("Error: ")
    assert tool.preview is not None
    assert tool.preview({"command": "a\nb"}) == ["$ a", "$ b"]
    assert tool.is_asked_each
    assert not tool.is_reading
