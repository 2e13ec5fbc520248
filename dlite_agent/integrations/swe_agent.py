"""SWE-agent with the model in its process: `python -m dlite_agent.integrations.swe_agent run …`.

SWE-agent has no setting that imports a LiteLLM provider. This module registers ours and hands the
command line over as it is; what stands behind the module's name is SWE-agent's own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from dlite_agent.errors import MissingDependencyError
from dlite_agent.integrations.litellm import register
from dlite_agent.integrations.litellm_errors import PROVIDER

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Register the provider and the models that the arguments name, and run SWE-agent.

    Args:
        argv: SWE-agent's command line; None: the process's own.

    Raises:
        MissingDependencyError: SWE-agent is not installed.
        OSError: A file that `--config` names cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    register(dict.fromkeys(_models(arguments)))
    try:  # no import statement: it is on no package index, so it is no dependency that can be named
        host = importlib.import_module("sweagent.run.run")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"SWE-agent needs the package {error.name!r}, which is not installed; it is on no "
            "package index: clone github.com/SWE-agent/SWE-agent and install it from there, with "
            "pip install -e ."
        ) from error
    host.main(arguments)


def _models(arguments: Sequence[str]) -> Iterator[str]:
    """Names behind `dlite/`, on the command line and in the files that it names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", type=Path, default=[])
    known, others = parser.parse_known_args(arguments)
    yield from _names([word.rpartition("=")[2] for word in others])
    for path in known.config:
        yield from _names(yaml.safe_load(path.read_text(encoding="utf-8")))


def _names(value: object) -> Iterator[str]:
    if isinstance(value, str) and value.startswith(f"{PROVIDER}/"):
        yield value.removeprefix(f"{PROVIDER}/")
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        yield from _names(list(value.values()))


if __name__ == "__main__":
    main()
