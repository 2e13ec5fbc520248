"""`dlite-agent bench turns`: its options, and JSON in the form that a bench asks for."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlite_agent.bench.report import BenchResult
    from dlite_agent.config import EngineConfig

__all__ = ["add_turns_arguments", "own_form", "run_turns"]

_QUICK = ("append-only", "json-rewritten", "timestamp")


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

    presets = "" if arguments.quick else arguments.presets
    clients = _QUICK if arguments.quick else tuple(CLIENTS)
    options = TurnsOptions(
        transcripts=arguments.transcripts,
        presets=tuple(filter(None, presets.split(","))),
        clients=tuple(arguments.clients.split(",")) if arguments.clients else clients,
        modes=tuple(arguments.modes.split(",")) if arguments.modes else tuple(MODES),
        split_rate=arguments.split_rate,
        seed=arguments.seed,
    )
    with closing(LoadingNote()) as progress:
        result = bench_turns(config, options, progress)
    if arguments.plots is not None:
        for path in plot_turns(result.samples, arguments.plots):
            note(f"wrote {path}")
    return result


def own_form(result: BenchResult) -> dict[str, object] | None:
    """JSON of a bench that has a form of its own; None for the others."""
    from dlite_agent.bench.acceptance_figures import acceptance_json
    from dlite_agent.bench.turns import turns_json

    forms = {"acceptance": acceptance_json, "turns": turns_json}
    form = forms.get(result.name)
    return form(result) if form is not None else None
