"""`dlite-agent completion SHELL`: what a shell reads to complete our verbs, options and models.

The script asks the command itself at every Tab, through argcomplete, so that it never grows old.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import write
from dlite_agent.cli.tool_choice import GROUPS
from dlite_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from argcomplete.completers import BaseCompleter

    Completer = Callable[..., Iterable[str]] | BaseCompleter

__all__ = ["add_arguments", "complete", "run"]

_MODELS = ("nano", "smollm2")
_DRAFTERS = ("auto", "suffix", "lookup", "null")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), help="whose script is written; see below"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the script."""
    try:
        from argcomplete.shell_integration import shellcode
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "completion needs the package 'argcomplete', which is not installed; repair the "
            'installation with: pip install "dlite-agent"'
        ) from error
    write(shellcode(["dlite-agent"], shell=arguments.shell).strip())
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks what can follow, and end the process."""
    import argcomplete
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter, SuppressCompleter

    folders, files = DirectoriesCompleter(), FilesCompleter()
    completers: dict[str, Completer] = {
        **dict.fromkeys(("model", "tokenizer"), _models),
        "names": lambda prefix, **_: [*_models(prefix), *_files(prefix, ".json", ".jsonl")],
        **dict.fromkeys(("drafter", "check"), _drafters),
        **dict.fromkeys(("root", "kv_disk", "folder", "csv", "plots", "path"), folders),
        **dict.fromkeys(("transcripts", "suite", "text", "from_csv", "recipe", "command"), files),
        "tools": _tools,
    }
    for action in _actions(parser):
        if action.dest in completers and action.choices is None:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]  # argcomplete's own way
    argcomplete.autocomplete(
        parser, always_complete_options=False, default_completer=SuppressCompleter()
    )


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action


def _models(prefix: str, **_: object) -> list[str]:
    return [*_MODELS, *_files(prefix, ".gguf")]


def _drafters(prefix: str, **_: object) -> list[str]:
    return [*_DRAFTERS, *_files(prefix)]


def _tools(prefix: str, **_: object) -> list[str]:
    """The last of the names between commas."""
    before, comma, _last = prefix.rpartition(",")
    names = dict.fromkeys([*GROUPS, *(tool for tools in GROUPS.values() for tool in tools)])
    return [f"{before}{comma}{name}" for name in names]


def _files(prefix: str, *endings: str) -> list[str]:
    """Folders, and files with these endings, that begin as was typed."""
    before, slash, _ = prefix.rpartition("/")
    folder = Path(before + slash).expanduser() if slash else Path()
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    folders = [f"{before}{slash}{path.name}/" for path in found if path.is_dir()]
    return folders + [f"{before}{slash}{p.name}" for p in found if p.name.endswith(endings or "/")]
