"""The stages of a recipe: from what was captured to a drafter's folder, and to its figures."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.training.curve import Curve, draw_curve
from dlite_agent.training.devices import find_devices
from dlite_agent.training.export import export_drafter
from dlite_agent.training.files import write_tensors
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.measure import measure
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance
from dlite_agent.training.sources import Source
from dlite_agent.training.teacher import TeacherLearner, without_history
from dlite_agent.training.tracking import ReportTo, Tracker, find_tracker
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.warm_start import warm_start
from dlite_agent.training.windows import Windows

__all__ = ["StageName", "drafter_config", "num_parameters", "stage_options", "train_stage"]

logger = logging.getLogger(__name__)

StageName = Literal["teacher", "align"]
_BEST = "best.safetensors"
_PICTURE = "curve.png"


def drafter_config(
    target: TargetConfig, fingerprint: str, choices: Mapping[str, object]
) -> DLiteConfig:
    """The config that a recipe's `drafter` section asks for.

    Args:
        target: Shape of the target.
        fingerprint: Of its checkpoint.
        choices: The section.

    Raises:
        ConfigurationError: A choice is unknown or out of range.
    """
    given = dict(choices)
    taps = given.get("taps")
    if isinstance(taps, list):
        given["taps"] = tuple(taps)
    num_taps = given.pop("num_taps", 14)
    return DLiteConfig.for_target(
        target, fingerprint, num_taps=num_taps if isinstance(num_taps, int) else 0, **given
    )


def num_parameters(config: DLiteConfig) -> int:
    """Trained numbers of a drafter."""
    return sum(math.prod(shape) for shape in dlite_shapes(config).values())


def stage_options(recipe: Recipe, stage: StageName) -> AlignOptions:
    """How a stage is trained.

    Raises:
        ConfigurationError: The recipe has no such stage.
    """
    options = recipe.align if stage == "align" else recipe.teacher
    if options is None:
        raise ConfigurationError(
            "the recipe has no stage 1; add a section `teacher` (its keys are those of `align`)"
        )
    return options


def train_stage(
    recipe: Recipe,
    stage: StageName,
    model: tuple[DLiteConfig, FrozenEnds],
    data: tuple[Source, Records | Windows],
    *,
    max_s: float | None = None,
    report_to: ReportTo = "none",
) -> bool:
    """Train in `recipe.work`, and keep what has the best held-out τ.

    Args:
        recipe: All options.
        stage: `teacher` keeps its best weights in the stage's folder; `align` starts from them and
            writes the drafter into `recipe.out`.
        model: Shape of the drafter, and the target's ends.
        data: What to learn from, and greedy answers to measure on.
        max_s: Stop after so long; the same call goes on.
        report_to: Takes figures too, of the process that writes.

    Returns:
        Whether the run is complete.

    Raises:
        ConfigurationError: There is no such stage, or the teacher is missing.
        MissingDependencyError: What reports is not installed.
        NonFiniteLossError: As `Trainer.run`.
    """
    (config, ends), (source, heldout) = model, data
    options = stage_options(recipe, stage)
    devices = find_devices(options.device)
    kind = DLiteLearner if stage == "align" else TeacherLearner
    start = _start(recipe, stage, config)
    learner = kind(config, ends, start, seed=options.seed, device=devices.device)
    folder = Path(recipe.work) / stage
    trainer = Trainer(folder, learner, options, devices)
    if not trainer.is_main:
        return trainer.run(source, max_s=max_s)
    tracker = find_tracker(report_to, folder, f"{Path(recipe.out).name}-{stage}")
    try:
        watch = _Watch(recipe, stage, trainer, heldout, tracker)
        is_complete = trainer.run(source, max_s=max_s, on_log=watch.note, on_state=watch.measure)
        watch.measure(trainer)
        watch.draw()
    finally:
        tracker.finish()
    wrote = recipe.out if stage == "align" else str(folder)
    logger.info("wrote %s%s", wrote, "" if is_complete else "; run again to go on")
    return is_complete


class _Watch:
    """Keeps the curve of a stage, and its best weights."""

    def __init__(
        self,
        recipe: Recipe,
        stage: StageName,
        trainer: Trainer,
        heldout: Records | Windows,
        tracker: Tracker,
    ) -> None:
        self._recipe, self._stage, self._heldout, self._tracker = recipe, stage, heldout, tracker
        self._folder = Path(recipe.work) / stage
        self._curve = Curve(self._folder / "curve.jsonl", trainer.place.step)
        found = [float(str(row["heldout_tau"])) for row in self._curve.rows if "heldout_tau" in row]
        self._best = max(found, default=0.0)

    def note(self, trainer: Trainer) -> None:
        """A line of the log."""
        place = trainer.place
        row = {"step": place.step, "loss": place.loss, "per_slot": place.per_slot}
        self._curve.add(row)
        slots = {f"slot_{slot}": share for slot, share in enumerate(place.per_slot)}
        self._tracker.log({"loss": place.loss, **slots}, place.step)

    def measure(self, trainer: Trainer) -> None:
        """A saved state: measure it, and keep it if none was better."""
        measured, step = measure(trainer.learner, self._heldout), trainer.place.step
        logger.info(
            "step=%d heldout_tau=%.3f best=%.3f slots=%s",
            step,
            measured.tau,
            self._best,
            " ".join(f"{share:.2f}" for share in measured.per_slot),
        )
        per_slot = list(measured.per_slot)
        row = {"step": step, "heldout_tau": measured.tau, "heldout_per_slot": per_slot}
        self._curve.add(row)
        slots = {f"heldout_slot_{slot}": share for slot, share in enumerate(per_slot)}
        self._tracker.log({"heldout_tau": measured.tau, **slots}, step)
        if measured.tau > self._best:
            self._best = measured.tau
            self._keep(trainer, measured)

    def draw(self) -> None:
        """The curve as a picture, beside the state and beside the drafter."""
        path, out = self._folder / _PICTURE, Path(self._recipe.out)
        draw_curve(self._curve.rows, path, f"{self._recipe.model}, stage {self._stage}")
        if self._stage == "align" and out.is_dir():
            shutil.copyfile(path, out / _PICTURE)

    def _keep(self, trainer: Trainer, measured: Acceptance) -> None:
        learner = trainer.learner
        if isinstance(learner, DLiteLearner):
            told = {
                "recipe": asdict(self._recipe),
                "step": trainer.place.step,
                "loss": trainer.place.loss,
                "heldout": asdict(measured),
                "torch": torch.__version__,
            }
            export_drafter(Path(self._recipe.out), learner.config, learner.weights, told)
        else:
            write_tensors(self._folder / _BEST, learner.weights)


def _start(recipe: Recipe, stage: StageName, config: DLiteConfig) -> dict[str, Tensor] | None:
    """Weights that a stage starts from; None: new ones."""
    if stage == "align" and recipe.teacher is not None:
        best = Path(recipe.work) / "teacher" / _BEST
        if not best.is_file():
            raise ConfigurationError(
                f"there is no teacher {str(best)!r}; run dlite-agent train teacher first, or take "
                "the section `teacher` out of the recipe"
            )
        return without_history(load_file(best))
    if recipe.start is None:
        return None
    found = warm_start(recipe.start, config)
    logger.info("start=%s taken=%s", recipe.start, ",".join(sorted(found)))
    return found
