"""`dlite-agent VERB`: find the verb, run it, and turn our errors into one line and a status.

Exit status: 0 done, 1 the verb's own "no" (a task not solved, a model not supported), 2 a wrong
option or request, 3 anything else that we raise on purpose, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from dlite_agent import __version__
from dlite_agent.errors import ConfigurationError, DLiteError, RequestError

__all__ = ["VERBS", "main"]

VERBS = {
    "demo": "an agent repairs a small repository, with and without reuse, side by side",
    "chat": "talk to a model in the terminal",
    "doctor": "what this machine can run, and whether it can run MODEL",
    "bench": "measure, and say under which conditions",
}
"""Verb → its line of help. Each verb is the module `dlite_agent.cli.<verb>`."""

CANCELLED = 130
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
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.verb is None:
        parser.print_help()
        return 2
    if arguments.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _verb(arguments.verb).run(arguments)
    except DLiteError as error:
        sys.stderr.write(f"dlite-agent {arguments.verb}: {error}\n")
        return 2 if isinstance(error, ConfigurationError | RequestError) else 3
    except KeyboardInterrupt:
        sys.stderr.write("\ncancelled\n")
        return CANCELLED
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more as it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"dlite-agent {arguments.verb}: {_NO_SPACE}\n")
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlite-agent", description="Qwen3 inside the agent's own process."
    )
    parser.add_argument("--version", action="version", version=f"dlite-agent {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary)
        verb.add_argument(
            "-v", "--verbose", action="store_true", help="log one line a turn to standard error"
        )
        _verb(name).add_arguments(verb)
    return parser


def _verb(name: str) -> _Verb:
    return cast(_Verb, importlib.import_module(f"dlite_agent.cli.{name}"))


if __name__ == "__main__":
    sys.exit(main())
