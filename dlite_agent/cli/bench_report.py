"""What `dlite-agent bench` prints of its results: text, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dlite_agent.cli.console import table

if TYPE_CHECKING:
    from dlite_agent.bench.report import BenchResult, Value

__all__ = ["bench_json", "bench_text"]


def bench_text(result: BenchResult) -> str:
    """Conditions, figures and what they are; of turns, a row for each before the figures."""
    told = "\n".join(f"{name:<24} {value}" for name, value in result.conditions.items())
    shown = [result.samples, result.rows] if result.name == "turns" else [result.rows]
    tables = "\n\n".join(_table(rows) for rows in shown)
    return f"=== {result.name}\n{told}\n\n{tables}\n\n{result.about}"


def bench_json(results: Sequence[BenchResult]) -> dict[str, object]:
    """By bench; acceptance and turns, when they are the only one, in a form of their own."""
    from dlite_agent.bench.acceptance_figures import acceptance_json
    from dlite_agent.bench.turns import turns_json

    forms = {"acceptance": acceptance_json, "turns": turns_json}
    if len(results) == 1 and results[0].name in forms:
        return forms[results[0].name](results[0])
    kept = ("name", "about", "conditions", "rows")
    return {
        result.name: {name: value for name, value in asdict(result).items() if name in kept}
        for result in results
    }


def _table(rows: Sequence[Mapping[str, Value]]) -> str:
    header = list(rows[0]) if rows else []
    return table(header, [[str(row[name]) for name in header] for row in rows])
