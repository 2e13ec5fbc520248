"""Plots of `bench acceptance` from its rows, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent.bench.acceptance_figures import figures_of
from dlite_agent.bench.figure import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_acceptance"]

_STYLES = {"fresh": "-", "fork": "-.", "restored": "--", "restored+state": ":"}
_SHADES = (1.0, 0.7, 0.45, 0.25)
_BAR = 0.2
_MAX_SLOTS = 8

Figures = Mapping[str, Any]


def plot_acceptance(rows: Iterable[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write `acceptance-tau.png` and `acceptance-slots.png`; returns their paths.

    Args:
        rows: Of requests.
        folder: Exists.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figures = [row for row in figures_of(rows) if row["drafter"] != "null"]
    histories = sorted({str(row["history"]) for row in figures}, reverse=True)  # short, long
    paths = []
    for name, draw in (("tau", _draw_tau), ("slots", _draw_slots)):
        figure, axes = new_figure(len(histories))
        for history, axis in zip(histories, axes, strict=True):
            draw(axis, [row for row in figures if row["history"] == history])
            axis.set_title(f"{history} histories")
        paths.append(save_figure(figure, folder / f"acceptance-{name}.png"))
    return paths


def _draw_tau(axes: Axes, figures: Sequence[Figures]) -> None:
    """τ of every drafter with its interval; beside each other what made the session."""
    names = list(dict.fromkeys(str(row["drafter"]) for row in figures))
    for number, session in enumerate(_STYLES):
        chosen = [row for row in figures if row["session"] == session]
        places = [names.index(str(row["drafter"])) + _BAR * (number - 1.5) for row in chosen]
        taus = [row["tau_micro"] for row in chosen]
        below = [row["tau_micro"] - row["tau_low"] for row in chosen]
        above = [row["tau_high"] - row["tau_micro"] for row in chosen]
        axes.bar(
            places,
            taus,
            _BAR,
            yerr=[below, above],
            capsize=2,
            color="tab:blue",
            alpha=_SHADES[number],
            label=session if chosen else None,
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("τ, tokens a round")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.legend()


def _draw_slots(axes: Axes, figures: Sequence[Figures]) -> None:
    """Share of rounds that accepted at least k tokens; dashed: after a restore."""
    names = list(dict.fromkeys(str(row["drafter"]) for row in figures))
    shown = [row for row in figures if row["session"] != "fork"]  # as a fresh one
    for row in sorted(shown, key=lambda row: names.index(str(row["drafter"]))):
        session, name = str(row["session"]), str(row["drafter"])
        shares = [float(share) for share in str(row["per_slot"]).split()][:_MAX_SLOTS]
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            _STYLES[session],
            marker="o",
            markersize=3,
            color=f"C{names.index(name)}",
            label=f"{name}, {session}",
        )
    axes.set_xlabel("slot")
    axes.set_ylabel("accepted at least so many")
    axes.set_ylim(0.0, 1.0)
    axes.legend()
