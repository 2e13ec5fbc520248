"""SWE-agent with the model in its process: `python -m dlite_agent.integrations.swe_agent run …`.

SWE-agent has no setting that imports a LiteLLM provider. This module registers ours and hands the
command line over as it is; what stands behind the module's name is SWE-agent's own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import litellm
import yaml

from dlite_agent.errors import MissingDependencyError
from dlite_agent.integrations.litellm import register
from dlite_agent.integrations.litellm_errors import PROVIDER

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Register the provider and the models that the arguments name, and run SWE-agent.

    A `litellm_model_registry` is read here already: SWE-agent asks what a model can do before it
    reads that file, and would warn of a model that knows no tools.

    Args:
        argv: SWE-agent's command line; None: the process's own.

    Raises:
        MissingDependencyError: SWE-agent is not installed.
        OSError: A file that the arguments name cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _register(_settings(arguments))
    try:  # no import statement: it is on no package index, so it is no dependency that can be named
        host = importlib.import_module("sweagent.run.run")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"SWE-agent needs the package {error.name!r}, which is not installed; it is on no "
            "package index: clone github.com/SWE-agent/SWE-agent and install it from there, with "
            "pip install -e ."
        ) from error
    host.main(arguments)


def _register(settings: Iterable[tuple[str, str]]) -> None:
    prefix = f"{PROVIDER}/"
    models: dict[str, None] = {}  # each once, in order
    for name, value in settings:
        if value.startswith(prefix):
            models[value.removeprefix(prefix)] = None
        elif name == "litellm_model_registry" and value:
            litellm.register_model(json.loads(Path(value).read_text(encoding="utf-8")))
    register(models)


def _settings(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Last part of the name, and value, of what is set on the command line and in its files."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", type=Path, default=[])
    known, others = parser.parse_known_args(arguments)
    for path in known.config:
        yield from _texts("", yaml.safe_load(path.read_text(encoding="utf-8")))
    name = ""
    for word in others:
        if word.startswith("--"):
            option, _, word = word.partition("=")
            name = option.rpartition(".")[2]
        yield name, word


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(name, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(str(key), item)


if __name__ == "__main__":
    main()
