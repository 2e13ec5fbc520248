"""The curve of a run: what it logged and measured, as lines of JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlite_agent.errors import MissingDependencyError

__all__ = ["Curve", "draw_curve"]


class Curve:
    """Rows of one run, appended to a file as they come.

    Args:
        path: Of the lines.
        step: Where the run stands; later rows are of a run that was killed, and are dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.rows: list[dict[str, object]] = []
        if path.is_file():
            lines = path.read_text("utf-8").splitlines()
            rows = [row for row in map(_row, lines) if row is not None]
            self.rows = [row for row in rows if row["step"] <= step]  # type: ignore[operator]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in self.rows), "utf-8")

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row; it has a `step`."""
        self.rows.append(dict(row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def draw_curve(rows: Sequence[Mapping[str, object]], path: Path, title: str) -> None:
    """Draw loss, held-out τ and per-slot acceptance over the steps.

    Args:
        rows: With `step`, and any of `loss`, `heldout_tau`, `per_slot` and `heldout_per_slot`.
        path: Of the PNG.
        title: Above.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'a picture of the run needs matplotlib; run: pip install "dlite-agent[train]"'
        ) from error
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for name, axis, color in (("loss", left, "C0"), ("heldout_tau", left.twinx(), "C1")):
        found = [row for row in rows if name in row]
        axis.plot([row["step"] for row in found], [row[name] for row in found], f"{color}.-")
        axis.set_ylabel(name, color=color)
    left.set_xlabel("step")
    measured = [row for row in rows if "heldout_per_slot" in row]
    kind = "heldout_per_slot" if measured else "per_slot"
    shown = measured or [row for row in rows if row.get("per_slot")]
    slots = list(zip(*(row[kind] for row in shown), strict=True))
    for slot, shares in enumerate(slots):
        right.plot([row["step"] for row in shown], shares, ".-", label=f"slot {slot}")
    right.set_ylim(0, 1)
    right.set_xlabel("step")
    right.set_ylabel(f"acceptance ({kind})")
    if slots:
        right.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=100)


def _row(line: str) -> dict[str, object] | None:
    """A row, or None of a line that a kill cut."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
