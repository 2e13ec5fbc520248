"""The command's argument parser: help with defaults, and errors in one line with the near word."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

__all__ = ["CommandParser"]

_WRONG = re.compile(r"invalid choice: '([^']*)'")


class CommandParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` for the command and its verbs; options are never abbreviated."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse a command line; an option that its verb does not have is that verb's error."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            parsers = dict(self._below())
            parser = parsers.get(getattr(arguments, "verb", None) or "", self)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}" + parser._near(unknown[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong, and end with status 2."""
        wrong = _WRONG.search(message)
        near = self._near(wrong[1]) if wrong else ""
        self.exit(2, f"{self.prog}: {message}{near}; '{self.prog} --help' says more\n")

    def _near(self, word: str) -> str:
        known = [choice for action in self._actions for choice in action.choices or ()]
        known += self._options()
        word = word.partition("=")[0]
        longer = [str(name) for name in known if len(word) > 2 and str(name).startswith(word)]
        found = longer or difflib.get_close_matches(word, map(str, known), n=1)
        return f"; did you mean {found[0]!r}?" if found else ""

    def _options(self) -> list[str]:
        own = [option for action in self._actions for option in action.option_strings]
        return own + [option for _, parser in self._below() for option in parser._options()]

    def _below(self) -> Iterator[tuple[str, CommandParser]]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from action.choices.items()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says the default of an option, where it has one and its help does not say it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_said = action.help is None or "default" in action.help
        has_none = action.default in (None, False, argparse.SUPPRESS) or action.default == []
        if is_said or has_none or not (action.option_strings or action.nargs == "?"):
            return action.help
        return f"{action.help} (default: %(default)s)"
