"""`dlite-agent train STEP RECIPE [key=value ...]`: make a DLite drafter."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dlite_agent.cli.console import note, table, write
from dlite_agent.config import EngineConfig

if TYPE_CHECKING:
    from dlite_agent.engine.loading import LoadedModel
    from dlite_agent.models.dlite_config import DLiteConfig
    from dlite_agent.training.conversations import Conversation
    from dlite_agent.training.recipe import Recipe
    from dlite_agent.training.stages import StageName

__all__ = ["STEPS", "add_arguments", "run"]

STEPS = {
    "capture": "the target answers the transcripts' turns; its taps are kept in shards",
    "teacher": "stage 1: train a teacher that reads the history too",
    "align": "stage 2: train the drafter, from the teacher where there is one",
    "eval": "the drafter in the real loop, beside what training computes",
    "compare": "DLite and DSpark on the same windows, with equal parameters and steps",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    listed = "; ".join(f"{name}: {about}" for name, about in STEPS.items())
    parser.add_argument("step", choices=tuple(STEPS), help=listed)
    parser.add_argument(
        "recipe", help="a YAML file, or one of ours by name: nano, smollm2, qwen3-0.6b, ..."
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. align.steps=100")
    parser.add_argument("--dry-run", action="store_true", help="say what it will take, and stop")
    parser.add_argument(
        "--minutes", type=float, help="of capture and the stages: stop after so long; run again"
    )
    parser.add_argument(
        "--report-to", choices=("tensorboard", "wandb", "none"), default="none", help="of a stage"
    )
    parser.add_argument("--json", action="store_true", help="of eval, compare: one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run one step of a recipe."""
    from dlite_agent.engine.loading import load_model
    from dlite_agent.training.recipe import find_recipe, read_recipe

    recipe = read_recipe(find_recipe(arguments.recipe), arguments.overrides)
    reads = arguments.step == "capture" or arguments.dry_run or recipe.capture.store != "disk"
    conversations = _conversations(recipe) if reads else []
    if arguments.dry_run:
        return _tell(recipe, conversations)
    model = load_model(EngineConfig(model=recipe.model, drafter="null"), _unheard)
    with contextlib.closing(model.target), _progress():
        if arguments.step == "capture":
            return _capture(model, recipe, conversations, max_s=_seconds(arguments))
        if arguments.step == "eval":
            return _evaluate(model, recipe, as_json=arguments.json)
        if arguments.step == "compare":
            return _compare(model, recipe, as_json=arguments.json)
        return _train(model, recipe, conversations, arguments)


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    """Show what training logs: how far it is, how fast, and how long it will take."""
    logger, handler = logging.getLogger("dlite_agent.training"), logging.StreamHandler(sys.stderr)
    is_shown = logging.root.isEnabledFor(logging.INFO)  # by --verbose, already
    level = logger.level
    logger.setLevel(logging.INFO)
    if not is_shown:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _unheard(_stage: str, _share: float) -> None:
    """Loading takes seconds, and the log tells of it."""


def _conversations(recipe: Recipe) -> list[Conversation]:
    """Read all of them before a model is loaded, so that a wrong file is found at once."""
    from dlite_agent.training.conversations import read_conversations

    found = list(read_conversations([Path(path) for path in recipe.transcripts]))
    note(f"{sum(len(item.turns) for item in found)} turns to answer")
    return found


def _tell(recipe: Recipe, conversations: list[Conversation]) -> int:
    """What it will take; reads configs only."""
    from dlite_agent.cli.train_report import forecast

    write(table(["what", "value"], forecast(recipe, conversations)))
    return 0


def _seconds(arguments: argparse.Namespace) -> float | None:
    minutes: float | None = arguments.minutes
    return None if minutes is None else 60 * minutes


def _capture(
    model: LoadedModel,
    recipe: Recipe,
    conversations: list[Conversation],
    *,
    max_s: float | None,
) -> int:
    from dlite_agent.cli.train_report import forecast
    from dlite_agent.training.shards import CaptureRun
    from dlite_agent.training.sizes import row_bytes

    for name, value in forecast(recipe, conversations):
        note(f"{name}: {value}")
    config = _config(model, recipe)
    each = row_bytes(config, recipe.capture.dtype)
    run = CaptureRun(model, Path(recipe.work), recipe.capture, config.taps, each)
    num_records = run.run(conversations, max_s=max_s)
    note(f"{num_records} records in {recipe.work}")
    return 0


def _train(
    model: LoadedModel,
    recipe: Recipe,
    conversations: list[Conversation],
    arguments: argparse.Namespace,
) -> int:
    from dlite_agent.training.frozen import FrozenEnds
    from dlite_agent.training.stage_data import stage_data
    from dlite_agent.training.stages import train_stage

    stage = cast("StageName", arguments.step)
    config = _config(model, recipe)
    data = stage_data(model, recipe, stage, config, conversations)
    train_stage(
        recipe,
        stage,
        (config, FrozenEnds.of(model.target)),
        data,
        max_s=_seconds(arguments),
        report_to=arguments.report_to,
    )
    return 0


def _evaluate(model: LoadedModel, recipe: Recipe, *, as_json: bool) -> int:
    from dlite_agent.training.measure import bigram_share
    from dlite_agent.training.served import evaluate, require_equal
    from dlite_agent.training.shards import captured_with, load_ids, load_records, load_turns

    work = Path(recipe.work)
    heldout, learned = load_records(work, "heldout"), load_ids(work)
    found = evaluate(
        model,
        Path(recipe.out),
        (heldout, load_turns(work)),
        captured_with(work),
        recipe.capture.enable_thinking,
    )
    bigram = bigram_share(learned, heldout) if len(learned[0]) else None
    if as_json:
        write(json.dumps(asdict(found) | {"bigram": bigram}))
    else:
        shares = zip(found.trained.per_slot, found.served.per_slot, found.by_position, strict=True)
        rows = [[str(slot), *(f"{share:.3f}" for share in row)] for slot, row in enumerate(shares)]
        rows.append(["tau", f"{found.trained.tau:.3f}", f"{found.served.tau:.3f}", ""])
        if bigram is not None:
            rows.append(["a bigram's slot 0", "", "", f"{bigram:.3f}"])
        write(table(["slot", "trained", "served", "by position"], rows))
    require_equal(found)
    return 0


def _compare(model: LoadedModel, recipe: Recipe, *, as_json: bool) -> int:
    from dlite_agent.cli.train_report import comparison_rows
    from dlite_agent.training.comparison import compare, contestants
    from dlite_agent.training.frozen import FrozenEnds
    from dlite_agent.training.shards import load_windows

    config, work = _config(model, recipe), Path(recipe.work)
    windows, heldout = load_windows(work), load_windows(work, "heldout_windows")
    entries = contestants(recipe, model.target.config, config, FrozenEnds.of(model.target))
    results = compare(recipe, entries, windows, heldout)
    if as_json:
        write(json.dumps([asdict(result) for result in results]))
    else:
        write(table(*comparison_rows(results)))
    return 0


def _config(model: LoadedModel, recipe: Recipe) -> DLiteConfig:
    from dlite_agent.models.weights import fingerprint, resolve_checkpoint
    from dlite_agent.training.stages import drafter_config

    folder = resolve_checkpoint(model.config.model, model.config.revision)
    return drafter_config(model.target.config, fingerprint(folder), recipe.drafter)
