"""`dlite-agent VERB`: find the verb, run it, and turn our errors into one line and a status.

Exit statuses are those of `examples.STATUSES`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from dlite_agent import __version__
from dlite_agent.cli.console import error_status, note, open_streams, silence
from dlite_agent.cli.examples import EXAMPLES, STATUSES
from dlite_agent.cli.parser import CommandParser
from dlite_agent.config import is_completing
from dlite_agent.errors import DLiteError

__all__ = ["VERBS", "main"]

VERBS = {
    "demo": "an agent repairs a small repository, with and without reuse, side by side",
    "serve": "an OpenAI-compatible server",
    "run": "a command with a server of its own, which OpenAI clients in it find",
    "chat": "talk to a model in the terminal",
    "doctor": "what this machine and MODEL can run, and what recorded requests cost",
    "bench": "measure, and say under which conditions",
    "train": "make a DLite drafter for a model, from transcripts of agents",
    "sessions": "the sessions that engines keep on disk: list, purge, export, import",
    "drafters": "which drafters are known for MODEL, and whether one fits",
    "completion": "what bash, zsh or fish reads to complete this command",
}
"""Verb → its line of help. Each verb is the module `dlite_agent.cli.<verb>`."""

CANCELLED = 130
UNREAD = 141  # as if SIGPIPE had ended us, which it does to most commands
_NO_SPACE = (
    "no space left on the disk; free some, or name a folder on a larger one: TMPDIR for the demo's "
    "repository, HF_HOME for downloads"
)


class _Verb(Protocol):
    """What a verb's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments; cheap, imports no torch."""
        ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit status."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: Arguments without the program's name; None: the process's own.
    """
    open_streams()
    status = _guarded(argv)
    silence()
    return status


def _guarded(argv: Sequence[str] | None) -> int:
    verb = ""
    try:
        try:
            parser = _parser()
            if is_completing():
                importlib.import_module("dlite_agent.cli.completion").complete(parser)
            arguments = parser.parse_all(argv)
            if arguments.verb is None:
                parser.print_help()
                return 2
            verb = f" {arguments.verb}"
            return _run(arguments)
        finally:
            sys.stdout.flush()  # what fails here would otherwise fail at exit, with a traceback
    except DLiteError as error:
        _complain(f"dlite-agent{verb}: {error}")
        return error_status(error)
    except KeyboardInterrupt:
        _complain("\ncancelled")
        return CANCELLED
    except BrokenPipeError:
        return UNREAD
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _complain(f"dlite-agent{verb}: {_NO_SPACE}")
        return 3


def _run(arguments: argparse.Namespace) -> int:
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return _verb(arguments.verb).run(arguments)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        note(text)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="dlite-agent",
        description="Qwen3 inside the agent's own process.",
        epilog=f"'dlite-agent VERB --help' has options and examples.\n\n{STATUSES}",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"dlite-agent {__version__}",
        help="print the version and exit",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=EXAMPLES[name])
        verb.add_argument(
            "-v", "--verbose", action="store_true", help="log one line a turn to standard error"
        )
        _verb(name).add_arguments(verb)
    return parser


def _verb(name: str) -> _Verb:
    return cast(_Verb, importlib.import_module(f"dlite_agent.cli.{name}"))


if __name__ == "__main__":
    sys.exit(main())
