"""The plot of `bench turns`, from its rows and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent.bench.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_turns"]

_COLORS = {"as_generated": "C0", "auto": "C1", "template": "C2", "plain": "C3", "none": "C4"}


def plot_turns(samples: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write `turns-<transcript>.png` for each transcript; returns their paths.

    Each client has a panel: rows prefilled so far, turn by turn and mode by mode, over the rows
    that are new.

    Args:
        samples: One row a turn.
        folder: Exists.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows = list(samples)
    paths = []
    for transcript in dict.fromkeys(row["transcript"] for row in rows):
        chosen = [row for row in rows if row["transcript"] == transcript]
        clients = list(dict.fromkeys(row["client"] for row in chosen))
        figure, axes = new_figure(len(clients))
        for client, axis in zip(clients, axes, strict=True):
            runs = {
                mode: [row for row in chosen if (row["client"], row["mode"]) == (client, mode)]
                for mode in dict.fromkeys(row["mode"] for row in chosen)
            }
            for mode, turns in runs.items():
                _draw(axis, [row["prefilled"] for row in turns], _COLORS[mode], "-", mode)
            # All modes need the same rows.
            _draw(axis, [row["new"] for row in next(iter(runs.values()))], "black", "--", "new")
            axis.set_title(client)
            axis.set_xlabel("turn")
        axes[0].set_ylabel("rows prefilled so far")
        axes[0].legend()
        paths.append(save_figure(figure, folder / f"turns-{transcript}.png"))
    return paths


def _draw(axes: Axes, counts: Sequence[int], color: str, style: str, label: str) -> None:
    sums = list(accumulate(counts))
    axes.plot(range(1, len(sums) + 1), sums, style, color=color, label=label)
