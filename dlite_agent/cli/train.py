"""`dlite-agent train capture|align|eval RECIPE [key=value ...]`: make a DLite drafter."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import note, table, write
from dlite_agent.config import EngineConfig

if TYPE_CHECKING:
    from dlite_agent.loading import LoadedModel
    from dlite_agent.training.recipe import Recipe

__all__ = ["STEPS", "add_arguments", "run"]

STEPS = {
    "capture": "the target answers the transcripts' turns; its taps are kept in shards",
    "align": "train a drafter on what was captured",
    "eval": "the drafter in the real loop, beside what training computes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    listed = "; ".join(f"{name}: {about}" for name, about in STEPS.items())
    parser.add_argument("step", choices=tuple(STEPS), help=listed)
    parser.add_argument("recipe", type=Path, help="a YAML file; see docs/guides/train-a-drafter.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. align.steps=100")
    parser.add_argument("--dry-run", action="store_true", help="say what it will take, and stop")
    parser.add_argument("--minutes", type=float, help="of align: stop after so long; run again")
    parser.add_argument("--json", action="store_true", help="of eval: print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run one step of a recipe."""
    from dlite_agent.loading import load_model
    from dlite_agent.training.recipe import read_recipe

    recipe = read_recipe(arguments.recipe, arguments.overrides)
    if arguments.step == "capture":
        _check_transcripts(recipe)
    model = load_model(EngineConfig(model=recipe.model, drafter="null"), _unheard)
    try:
        if arguments.dry_run:
            return _tell(model, recipe)
        if arguments.step == "capture":
            return _capture(model, recipe)
        if arguments.step == "align":
            return _align(model, recipe, arguments.minutes)
        return _evaluate(model, recipe, as_json=arguments.json)
    finally:
        model.target.close()


def _unheard(_stage: str, _share: float) -> None:
    """Loading takes seconds, and the log tells of it."""


def _check_transcripts(recipe: Recipe) -> None:
    """Read all of them before a model is loaded, so that a wrong file is found at once."""
    from dlite_agent.training.conversations import read_conversations

    paths = [Path(path) for path in recipe.transcripts]
    num_turns = sum(len(conversation.turns) for conversation in read_conversations(paths))
    note(f"{num_turns} turns to answer")


def _tell(model: LoadedModel, recipe: Recipe) -> int:
    from dlite_agent.training.align import drafter_config, num_parameters
    from dlite_agent.training.conversations import read_conversations
    from dlite_agent.training.on_policy import record_bytes

    config = drafter_config(model, recipe.drafter)
    paths = [Path(path) for path in recipe.transcripts]
    conversations = list(read_conversations(paths))
    each = record_bytes(model, config.taps)
    told = {
        "target": f"{recipe.model}, fingerprint {config.target_fingerprint}",
        "conversations": len(conversations),
        "turns": sum(len(conversation.turns) for conversation in conversations),
        "taps": " ".join(map(str, config.taps)),
        "drafter parameters": num_parameters(config),
        "bytes a record": each,
        "records at most": recipe.capture.max_records,
        "bytes at most (disk, and memory of align)": each * recipe.capture.max_records,
        "epochs": round(
            recipe.align.steps * recipe.align.batch_size / recipe.capture.max_records, 2
        ),
    }
    write(table(["what", "value"], [[name, str(value)] for name, value in told.items()]))
    return 0


def _capture(model: LoadedModel, recipe: Recipe) -> int:
    from dlite_agent.training.align import drafter_config
    from dlite_agent.training.conversations import read_conversations
    from dlite_agent.training.on_policy import CaptureRun

    config = drafter_config(model, recipe.drafter)
    conversations = list(read_conversations([Path(path) for path in recipe.transcripts]))
    run = CaptureRun(model, Path(recipe.work), recipe.capture, config.taps)
    num_records = run.run(conversations)
    note(f"{num_records} records in {recipe.work}")
    return 0


def _align(model: LoadedModel, recipe: Recipe, minutes: float | None) -> int:
    from dlite_agent.training.align import align, drafter_config
    from dlite_agent.training.frozen import FrozenEnds
    from dlite_agent.training.on_policy import load_records

    config = drafter_config(model, recipe.drafter)
    work = Path(recipe.work)
    records, heldout = load_records(work), load_records(work, "heldout")
    ends = FrozenEnds.of(model.target)
    seconds = None if minutes is None else 60 * minutes
    is_complete = align(recipe, config, ends, records, heldout, max_s=seconds)
    note(f"wrote {recipe.out}" + ("" if is_complete else "; run again to go on"))
    return 0


def _evaluate(model: LoadedModel, recipe: Recipe, *, as_json: bool) -> int:
    from dlite_agent.training.align import evaluate
    from dlite_agent.training.evaluate import check_served
    from dlite_agent.training.on_policy import load_records, load_turns

    work = Path(recipe.work)
    heldout, turns = load_records(work, "heldout"), load_turns(work)
    trained, served = evaluate(model, Path(recipe.out), heldout, turns)
    if as_json:
        write(json.dumps({"trained": asdict(trained), "served": asdict(served)}))
    else:
        rows = [
            [str(slot), f"{a:.3f}", f"{b:.3f}"]
            for slot, (a, b) in enumerate(zip(trained.per_slot, served.per_slot, strict=True))
        ]
        rows.append(["tau", f"{trained.tau:.3f}", f"{served.tau:.3f}"])
        write(table(["slot", "trained", "served"], rows))
    check_served(trained, served)
    return 0
