"""The page of benchmarks, written from what the benches printed.

    dlite-agent bench step --json > docs/benchmarks/results/step.json
    dlite-agent demo --json > docs/benchmarks/results/demo.json
    python -m dlite_agent.bench.page docs/benchmarks

No figure is typed: a file in `results/` is one command's output as it was printed, and the page is
what stands in those files, with the conditions of each. Plots beside `NAME.json` are `NAME-*.png`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dlite_agent.errors import ConfigurationError

__all__ = ["main", "render_page"]

Values = Mapping[str, object]

_BEGIN, _END = "<!-- results: written by dlite_agent.bench.page -->", "<!-- end of results -->"
_NOTHING = "Nothing is stored in `results/` yet."
_NUM_SLOTS = 7
_DEMO_COLUMNS = {
    "num_turns": "turns",
    "prefilled": "prefilled",
    "amplification": "A",
    "prefill_s": "prefill, s",
    "model_s": "model, s",
    "solved": "solved",
}


def render_page(page: str, folder: Path) -> str:
    """The page with everything between its two markers replaced by the results.

    Args:
        page: Markdown with both markers.
        folder: `*.json`, each what `dlite-agent bench --json` or `dlite-agent demo --json` printed.

    Raises:
        ConfigurationError: The page has no markers, or a file is no such output.
    """
    head, begin, rest = page.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise ConfigurationError(f"the page lacks {_BEGIN!r} or {_END!r}; put both in, in order")
    sections = [section for path in sorted(folder.glob("*.json")) for section in _sections(path)]
    return "\n\n".join([head + _BEGIN, *(sections or [_NOTHING]), _END + tail])


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite `index.md` of a folder from its `results/`."""
    parser = argparse.ArgumentParser(prog="python -m dlite_agent.bench.page")
    parser.add_argument("folder", type=Path, help="has index.md and results/")
    folder: Path = parser.parse_args(arguments).folder
    page = folder / "index.md"
    text = render_page(page.read_text(encoding="utf-8"), folder / "results")
    page.write_text(text, encoding="utf-8")
    return 0


def _sections(path: Path) -> list[str]:
    try:
        printed = json.loads(path.read_text(encoding="utf-8"))
        if "runs" in printed:
            sections = [_demo(printed)]
        elif "drafters" in printed:
            sections = [_acceptance(printed)]
        else:
            sections = [_bench(result) for result in printed.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is no output of a bench ({error!r}); store what `dlite-agent bench "
            "--json` or `dlite-agent demo --json` printed"
        ) from error
    plots = sorted(path.parent.glob(f"{path.stem}-*.png"))
    return sections + [f"![{plot.stem}]({path.parent.name}/{plot.name})" for plot in plots]


def _acceptance(printed: Values) -> str:
    """A row a drafter, history and kind of session, with the intervals behind the figures."""
    rows = [
        {
            "drafter": row["name"],
            **{name: row[name] for name in ("history", "session", "requests")},
            "τ": f"{_cell(row['tau_micro'])} ({_cell(row['tau_low'])} to {_cell(row['tau_high'])})",
            "τ macro": row["tau_macro"],
            "per slot": " ".join(f"{share:.2f}" for share in row["per_slot"][:_NUM_SLOTS]),
            "speed-up": f"{_cell(row['speedup'])} "
            f"({_cell(row['speedup_low'])} to {_cell(row['speedup_high'])})",
            **{name: row[name] for name in ("c", "state_bytes", "same_answers")},
        }
        for row in cast(Sequence[Mapping[str, Any]], printed["drafters"])
    ]
    parts = ["## acceptance", f"{printed['about']}.", _table(rows)]
    return "\n\n".join([*parts, _conditions(cast(Values, printed["conditions"]))])


def _bench(result: Values) -> str:
    rows = cast(Sequence[Values], result["rows"])
    parts = [f"## {result['name']}", f"{result['about']}.", _table(rows)]
    return "\n\n".join([*parts, _conditions(cast(Values, result["conditions"]))])


def _demo(report: Values) -> str:
    runs = cast(Mapping[str, Values], report["runs"])
    rows = [
        {"reuse": policy} | {title: run[name] for name, title in _DEMO_COLUMNS.items()}
        for policy, run in runs.items()
    ]
    said = (
        f"The last prompt has {report['last_prompt_tokens']} tokens. Model time without reuse over "
        f"ours: {_cell(report['speedup'])}; with plain prefix caching over ours: "
        f"{_cell(report['speedup_prefix'])}. Tokens identical: {_cell(report['identical'])}, with "
        f"{report['near_ties']} near-ties."
    )
    told = cast(dict[str, object], report["conditions"])
    options = {name: report[name] for name in ("seed", "size", "bugs", "dtype", "drafter")}
    return "\n\n".join(["## demo", said, _table(rows), _conditions(told | options)])


def _conditions(conditions: Values) -> str:
    told = "; ".join(f"{name} {_cell(value)}" for name, value in conditions.items())
    return f"Conditions: {told}."


def _table(rows: Sequence[Values]) -> str:
    header = list(rows[0]) if rows else []
    lines = [
        header,
        ["---"] * len(header),
        *([_cell(row[name]) for name in header] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
