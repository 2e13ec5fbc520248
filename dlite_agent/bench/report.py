"""Figures with the conditions under which they hold, as text, JSON and CSV."""

from __future__ import annotations

import csv
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dlite_agent.bench.machine import (
    bench_clock,
    git_revision,
    package_version,
    processor_name,
)

__all__ = ["BenchResult", "Samples", "Value", "conditions", "measure"]

Value = str | int | float | None
"""Of a cell."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One bench.

    Attributes:
        name: What `dlite-agent bench NAME` measures.
        about: What the columns are, for a person.
        conditions: Everything that the figures depend on.
        rows: One mapping a figure; all have the same keys.
        samples: What the figures follow from, where that is kept; the CSV has them instead.
    """

    name: str
    about: str
    conditions: Mapping[str, Value]
    rows: Sequence[Mapping[str, Value]]
    samples: Sequence[Mapping[str, Value]] = ()

    def write_csv(self, folder: Path) -> Path:
        """Write `<name>.csv` with the conditions as comment lines; returns its path."""
        rows = self.samples or self.rows
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(f"# {key}: {value}\n" for key, value in self.conditions.items())
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
        return path


@dataclass(slots=True)
class Samples:
    """Times of one thing, in seconds."""

    times_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """The middle one."""
        return statistics.median(self.times_s)

    @property
    def spread(self) -> float:
        """(Third quartile - first) / median; 0 of a single sample."""
        if len(self.times_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_s, n=4)
        return (high - low) / self.median_s


def measure(call: Callable[[], object], *, repeats: int, warmup: int = 2) -> Samples:
    """Time a call.

    Args:
        call: Does the work and waits for the device.
        repeats: Timed calls.
        warmup: Calls before them.
    """
    for _ in range(warmup):
        call()
    clock, _ = bench_clock()
    samples = Samples()
    for _ in range(repeats):
        started = clock()
        call()
        samples.times_s.append(clock() - started)
    return samples


def conditions(**more: Value) -> dict[str, Value]:
    """Processor, threads, versions and revision, and what the bench adds."""
    found: dict[str, Value] = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "clock": bench_clock()[1],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dlite-agent": package_version("dlite-agent"),
        "revision": git_revision(),
    }
    return found | more
