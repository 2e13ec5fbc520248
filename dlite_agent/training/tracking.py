"""Figures of a run for those who watch it: in TensorBoard or Weights & Biases."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from dlite_agent.errors import ConfigurationError, MissingDependencyError

__all__ = ["NoTracker", "ReportTo", "Tracker", "find_tracker"]

ReportTo = Literal["tensorboard", "wandb", "none"]


class Tracker(Protocol):
    """Takes figures."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Figures of a step."""
        ...

    def finish(self) -> None:
        """Nothing more comes."""
        ...


class NoTracker:
    """Nobody watches."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, folder: Path, run: str) -> None:
        import wandb

        try:
            self._run = wandb.init(project="dlite-agent", name=run, dir=str(folder))
        except wandb.errors.Error as error:
            raise ConfigurationError(
                f"--report-to wandb does not start ({error}); run: wandb login, or set "
                "WANDB_MODE=offline"
            ) from error

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()


def find_tracker(name: ReportTo, folder: Path, run: str) -> Tracker:
    """The tracker of an option.

    Args:
        name: Of it.
        folder: Where its files go.
        run: What the run is called.

    Raises:
        MissingDependencyError: Its package is not installed.
        ConfigurationError: It does not start: Weights & Biases without a key, for one.
    """
    if name == "none":
        return NoTracker()
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(
            f"--report-to {name} needs the package {name!r}; run: pip install {name}"
        )
    return _TensorBoard(folder) if name == "tensorboard" else _WeightsAndBiases(folder, run)
