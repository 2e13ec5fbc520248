"""Which tools `--root` and `--tools` mean: groups, single ones, and the user's own functions."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dlite_agent.chat.messages import ToolSpec
from dlite_agent.cli.chat_tools import Arguments, ChatTool, OnOutput
from dlite_agent.cli.folder_tools import FolderTools
from dlite_agent.cli.tool_process import run_program
from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

__all__ = ["GROUPS", "ToolOptions", "choose_tools"]

GROUPS = {
    "files": ("list_files", "read_file", "search_files", "edit_file", "write_file"),
    "tests": ("run_tests",),
    "shell": ("run_command",),
    "repair": ("list_files", "run_tests", "read_file", "edit_file"),
}
"""Name → tools. `repair` is what `nano` learned, in its order."""
_DEFAULT = "files"
_SCRIPT = "run_tests.py"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The chat's options for tools.

    Attributes:
        root: The folder that the model may work in; None: none.
        names: Groups, tools and `FILE.py:NAME` or `MODULE:NAME`; empty: `files` with a root.
        test_command: What `run_tests` runs; None: `run_tests.py` of the root, else pytest.
        timeout_s: Most seconds of a program that a tool runs.
    """

    root: str | None = None
    names: Sequence[str] = ()
    test_command: str | None = None
    timeout_s: float = 120.0


def choose_tools(options: ToolOptions) -> list[ChatTool]:
    """The tools, each once, in the order in which they are named.

    Raises:
        ConfigurationError: One is unknown, needs a folder, or cannot be loaded.
    """
    if not 0 < options.timeout_s < float("inf"):
        raise ConfigurationError(f"--tool-timeout is {options.timeout_s!r}; use seconds, e.g. 120")
    names = [name for given in options.names for name in given.split(",") if name]
    if not names and options.root is not None:
        names = [_DEFAULT]
    built_in = {} if options.root is None else _tools_of_folder(options.root, options)
    chosen: dict[str, ChatTool] = {}
    for given in names:
        for name in GROUPS.get(given, (given,)):
            tool = _own_tool(name) if ":" in name else _built_in(name, built_in)
            if chosen.setdefault(tool.spec.name, tool) is not tool and ":" in name:
                raise ConfigurationError(f"--tools names two tools {tool.spec.name!r}; rename one")
    return list(chosen.values())


def _built_in(name: str, built_in: dict[str, ChatTool]) -> ChatTool:
    known = {tool for tools in GROUPS.values() for tool in tools}
    if name not in known:
        raise ConfigurationError(
            f"--tools names {name!r}; known are the groups {', '.join(GROUPS)}, the tools "
            f"{', '.join(sorted(known))}, and FILE.py:NAME or MODULE:NAME for your own"
        )
    if name not in built_in:
        raise ConfigurationError(f"the tool {name!r} needs a folder to work in; add --root .")
    return built_in[name]


def _tools_of_folder(root: str, options: ToolOptions) -> dict[str, ChatTool]:
    folder = FolderTools(root)
    tools = [*folder.tools(), _run_tests(folder.root, options), _run_command(folder.root, options)]
    return {tool.spec.name: tool for tool in tools}


def _run_tests(root: Path, options: ToolOptions) -> ChatTool:
    spec = ToolSpec("run_tests", "Run the tests.", {"properties": {}, "type": "object"})
    if options.test_command is not None:
        command = ["sh", "-c", options.test_command]
    elif (root / _SCRIPT).is_file():
        command = [sys.executable, _SCRIPT]
    else:
        command = ["python3", "-m", "pytest", "-q"]

    def run(_: Arguments, on_output: OnOutput) -> str:
        # Tests say themselves what failed, and `nano` learned their output without a status.
        text, ending = _run(command, root, options.timeout_s, on_output)
        return text if text and not ending.startswith("ended") else f"{text}\n({ending or 'ok'})"

    shown = options.test_command or shlex.join([Path(command[0]).name, *command[1:]])
    return ChatTool(spec, run, preview=lambda _: [f"$ {shown}"], preview_lexer="console")


def _run_command(root: Path, options: ToolOptions) -> ChatTool:
    schema: dict[str, Any] = {
        "properties": {"command": {"type": "string"}},
        "type": "object",
        "required": ["command"],
    }
    spec = ToolSpec("run_command", "Run a shell command in the folder.", schema)

    def run(arguments: Arguments, on_output: OnOutput) -> str:
        command = ["sh", "-c", str(arguments["command"])]
        text, ending = _run(command, root, options.timeout_s, on_output)
        return "\n".join(part for part in (text, ending and f"({ending})") if part) or "(ok)"

    return ChatTool(
        spec,
        run,
        is_asked_each=True,
        preview=lambda arguments: [
            f"$ {line}" for line in str(arguments.get("command", "")).split("\n")
        ],
        preview_lexer="console",
    )


def _run(
    command: Sequence[str], root: Path, timeout_s: float, on_output: OnOutput
) -> tuple[str, str]:
    try:
        text, ending = run_program(command, root, timeout_s, on_output)
    except (OSError, ValueError) as error:  # ValueError: a null character
        return f"Error: {error}", ""
    return text.rstrip("\n"), ending


def _own_tool(name: str) -> ChatTool:
    """A function or LangChain tool out of a file or module that the user names."""
    where, _, attribute = name.rpartition(":")
    try:
        value = getattr(_module(where), attribute)
    except Exception as error:  # whatever the user's own code does
        raise ConfigurationError(f"--tools {name!r} cannot be loaded: {error!r}") from error
    if not callable(value) and not hasattr(value, "invoke"):
        raise ConfigurationError(f"--tools {name!r} is {value!r}, which is no function")
    return _from_langchain(value, name)


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).expanduser().resolve(strict=True)
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None, "a name that ends in .py has a loader"
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules.setdefault(path.stem, module)  # where annotations are looked up
    found.loader.exec_module(module)
    return module


def _from_langchain(value: Any, name: str) -> ChatTool:
    from langchain_core.tools import BaseTool, StructuredTool
    from langchain_core.utils.function_calling import convert_to_openai_tool

    try:
        tool: BaseTool
        tool = value if isinstance(value, BaseTool) else StructuredTool.from_function(value)
    except ValueError as error:  # e.g. no docstring
        raise ConfigurationError(f"--tools {name!r} makes no tool: {error}") from error
    function = convert_to_openai_tool(tool)["function"]
    spec = ToolSpec(function["name"], function["description"], function["parameters"])

    def run(arguments: Arguments, _: OnOutput) -> str:
        try:
            return str(tool.invoke(dict(arguments)))
        except Exception as error:  # noqa: BLE001 - the model is told, and may do better
            return f"Error: {error}"

    return ChatTool(spec, run)
