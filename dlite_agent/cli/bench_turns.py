"""`dlite-agent bench turns`: its options."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.bench.report import BenchResult
    from dlite_agent.config import EngineConfig

__all__ = ["add_turns_arguments", "run_turns"]

_QUICK = ("append-only", "mixed", "timestamp")


def add_turns_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("turns")
    group.add_argument("--clients", metavar="A,B", help="what clients do to a transcript: all")
    group.add_argument(
        "--modes", metavar="A,B", help="as_generated, auto, template, plain, none (default: all)"
    )
    group.add_argument(
        "--presets", metavar="A,B", default="ci", help="generated: ci, swe, long (default: ci)"
    )
    group.add_argument(
        "--bfcl",
        metavar="A,B",
        help="multi-turn tasks of the package bfcl-eval, each call run on its own back end: ids, "
        "categories (base, long_context, miss_func, miss_param) or all",
    )
    group.add_argument(
        "--bfcl-limit", type=int, metavar="N", help="the first N tasks of each category (all)"
    )
    group.add_argument(
        "--drift-rate",
        type=float,
        default=0.5,
        metavar="X",
        help="share of turns that the client mixed rewrites (default: 0.5)",
    )
    group.add_argument(
        "--split-rate",
        type=float,
        default=0.02,
        metavar="X",
        help="share of sampled tokens that are split in two (default: 0.02)",
    )


def run_turns(arguments: argparse.Namespace, config: EngineConfig) -> BenchResult:
    """Run the bench."""
    from dlite_agent.bench.clients import CLIENTS
    from dlite_agent.bench.turns import MODES, TurnsOptions, bench_turns
    from dlite_agent.bench.turns_plot import plot_turns
    from dlite_agent.cli.console import LoadingNote, note

    for name in ("split_rate", "drift_rate"):
        if not 0.0 <= getattr(arguments, name) <= 1.0:
            option, value = name.replace("_", "-"), getattr(arguments, name)
            raise ConfigurationError(f"--{option} is {value}; use a share between 0 and 1")
    presets = "" if arguments.quick else arguments.presets
    clients = _QUICK if arguments.quick else tuple(CLIENTS)
    options = TurnsOptions(
        transcripts=arguments.transcripts or (),
        bfcl=_names(arguments.bfcl),
        bfcl_limit=arguments.bfcl_limit,
        presets=_names(presets),
        clients=_names(arguments.clients) or clients,
        modes=_names(arguments.modes) or tuple(MODES),
        drift_rate=arguments.drift_rate,
        split_rate=arguments.split_rate,
        seed=arguments.seed,
    )
    with closing(LoadingNote()) as progress:
        result = bench_turns(config, options, progress)
    if arguments.plots is not None:
        for path in plot_turns(result.samples, arguments.plots):
            note(f"wrote {path}")
    return result


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (text or "").split(",")))
