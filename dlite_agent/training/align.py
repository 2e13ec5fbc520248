"""From captured records to a drafter's folder, and from the folder to its figures."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from dlite_agent.drafters.dlite import load_dlite
from dlite_agent.loading import LoadedModel
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.dlite_files import read_dlite, write_dlite
from dlite_agent.models.weights import fingerprint, resolve_checkpoint
from dlite_agent.training.evaluate import Turn, serve
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, simulate
from dlite_agent.training.student import Student
from dlite_agent.training.trainer import Aligner

__all__ = ["align", "drafter_config", "evaluate", "num_parameters"]

logger = logging.getLogger(__name__)


def drafter_config(model: LoadedModel, choices: Mapping[str, object]) -> DLiteConfig:
    """The config that a recipe's `drafter` section asks for, for a loaded target.

    Raises:
        ConfigurationError: A choice is unknown or out of range.
    """
    given = dict(choices)
    taps = given.get("taps")
    if isinstance(taps, list):
        given["taps"] = tuple(taps)
    folder = resolve_checkpoint(model.config.model, model.config.revision)
    num_taps = given.pop("num_taps", 14)
    return DLiteConfig.for_target(
        model.target.config,
        fingerprint(folder),
        num_taps=num_taps if isinstance(num_taps, int) else 0,
        **given,
    )


def num_parameters(config: DLiteConfig) -> int:
    """Trained numbers of a drafter."""
    return sum(math.prod(shape) for shape in dlite_shapes(config).values())


def align(
    recipe: Recipe,
    config: DLiteConfig,
    ends: FrozenEnds,
    records: Records,
    heldout: Records,
    *,
    max_s: float | None = None,
) -> bool:
    """Train in `recipe.work` and keep the drafter with the best held-out τ in `recipe.out`.

    Args:
        recipe: All options.
        config: Shape of the drafter.
        ends: Of the target.
        records: What to learn from.
        heldout: Greedy answers that checkpoints are measured on.
        max_s: Stop after so long; the same call goes on.

    Returns:
        Whether the run is complete.
    """
    out = Path(recipe.out)
    aligner = Aligner(Path(recipe.work) / "align", config, recipe.align, ends)
    best_tau = 0.0
    if (out / "config.json").is_file() and aligner.place.step:
        _, tensors = read_dlite(out)
        kept = {name: tensor.float() for name, tensor in tensors.items()}
        best_tau = simulate(Student(config, kept, ends.embed), ends, heldout).tau

    def keep_best(now: Aligner) -> None:
        nonlocal best_tau
        measured = simulate(now.student, ends, heldout)
        logger.info(
            "step=%d heldout_tau=%.3f best=%.3f slots=%s",
            now.place.step,
            measured.tau,
            best_tau,
            " ".join(f"{share:.2f}" for share in measured.per_slot),
        )
        if measured.tau > best_tau:
            best_tau = measured.tau
            write_dlite(out, config, now.weights, _provenance(recipe, now, records, measured))

    is_complete = aligner.run(records, max_s=max_s, on_state=keep_best)
    keep_best(aligner)
    return is_complete


def evaluate(
    model: LoadedModel, folder: Path, heldout: Records, turns: list[Turn]
) -> tuple[Acceptance, Acceptance]:
    """A saved drafter's acceptance as training computes it, and as the loop serves it.

    Args:
        model: The target, loaded without a drafter.
        folder: Of the drafter.
        heldout: Records of the turns.
        turns: Greedy answers of the target.

    Raises:
        DrafterMismatchError: The drafter is for another target.
    """
    identity = fingerprint(resolve_checkpoint(model.config.model, model.config.revision))
    drafter = load_dlite(folder, model.target, identity)
    config, tensors = read_dlite(folder)
    ends = FrozenEnds.of(model.target)
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    trained = simulate(Student(config, weights, ends.embed), ends, heldout)
    rounds = serve(model.target, drafter, turns)
    return trained, rounds.acceptance(config.block_size)


def _provenance(
    recipe: Recipe, now: Aligner, records: Records, measured: Acceptance
) -> dict[str, object]:
    return {
        "recipe": asdict(recipe),
        "step": now.place.step,
        "loss": now.place.loss,
        "num_records": len(records),
        "heldout": asdict(measured),
        "torch": torch.__version__,
    }
