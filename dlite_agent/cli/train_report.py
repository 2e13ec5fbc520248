"""Tables of `dlite-agent train`: what a recipe will take, and how a comparison came out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from dlite_agent.cli.console import size
from dlite_agent.models.device import free_memory_bytes
from dlite_agent.models.weights import read_config
from dlite_agent.training.comparison import Result
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.sizes import (
    Speed,
    capture_s,
    num_weights,
    row_bytes,
    stage_s,
    train_bytes,
)
from dlite_agent.training.stages import drafter_config, num_parameters

__all__ = ["comparison_rows", "forecast"]


def forecast(recipe: Recipe, conversations: Sequence[Conversation]) -> list[list[str]]:
    """Rows of name and value; reads configs only, and tries the CPU for a moment.

    Raises:
        ModelNotFoundError: The target is not found.
        ConfigurationError: The drafter's section is wrong.
    """
    target = read_config(recipe.model)
    config = drafter_config(target, "", recipe.drafter)
    capture, speed = recipe.capture, Speed()
    num_turns = sum(len(conversation.turns) for conversation in conversations)
    each = row_bytes(config, capture.dtype)
    captured = capture.num_rows(0, 0) * each
    work = Path(recipe.work)
    there = next(folder for folder in [work, *work.absolute().parents] if folder.is_dir())
    stages = [("teacher", recipe.teacher), ("align", recipe.align)]
    rows = [
        ["target", f"{recipe.model}, {num_weights(target):,} weights"],
        ["conversations, turns", f"{len(conversations)}, {num_turns}"],
        ["taps", " ".join(map(str, config.taps))],
        ["drafter parameters", f"{num_parameters(config):,}"],
        ["store, dtype", f"{capture.store}, {capture.dtype}"],
        ["bytes a position", str(each)],
        ["captured, at most", f"{size(captured)} ({capture.store})"],
        ["free disk, memory", f"{size(shutil.disk_usage(there).free)}, {_free_memory()}"],
        ["capture, at most about", _hours(capture_s(target, capture, num_turns, speed))],
    ]
    for name, options in stages:
        if options is not None:
            epochs = options.steps * options.batch_size / capture.max_records
            rows.append([f"{name}: epochs", f"{epochs:.2f}"])
            rows.append([f"{name}: memory beside records", size(train_bytes(config, options))])
            rows.append([f"{name}: on this CPU about", _hours(stage_s(config, options, speed))])
    return rows


def comparison_rows(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the mean τ over the seeds with its deviation, and the slots' means."""
    num_slots = len(results[0].per_slot)
    header = ["drafter", "parameters", "steps", "records", "state B/token", "tau", "sd", "seeds"]
    header += [f"slot {slot}" for slot in range(num_slots)]
    rows = []
    for result in results:
        mean, deviation = result.tau
        rows.append(
            [
                result.name,
                f"{result.num_parameters:,}",
                str(result.num_steps),
                f"{result.num_records:,}",
                str(result.state_bytes),
                f"{mean:.3f}",
                f"{deviation:.3f}",
                " ".join(f"{run.tau:.2f}" for run in result.runs),
                *(f"{share:.3f}" for share in result.per_slot),
            ]
        )
    return header, rows


def _free_memory() -> str:
    return size(free_memory_bytes(torch.device("cpu")))


def _hours(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
