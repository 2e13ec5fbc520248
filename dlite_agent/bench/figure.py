"""Figures as PNG, without a display and without matplotlib's global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "save_figure"]


def new_figure(num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'plots need matplotlib, which is not installed; run: pip install "dlite-agent[bench]"'
        ) from error
    figure = Figure(figsize=(4.8 * num_columns, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, num_columns, squeeze=False)[0]
    return figure, list(axes)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG that is the same for the same figure; returns its path."""
    figure.savefig(path, format="png", metadata={"Software": None})
    return path
