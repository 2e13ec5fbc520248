"""How the command writes: plain lines to standard output, and sizes and times for a person."""

from __future__ import annotations

import sys

__all__ = ["size", "table", "write"]


def write(text: str = "", *, end: str = "\n") -> None:
    """Write to standard output at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def size(num_bytes: float) -> str:
    """Bytes for a person: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join(
            [first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
        )

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
