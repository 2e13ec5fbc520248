"""The page of benchmarks is what the benches printed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dlite_agent.bench.page import main, render_page
from dlite_agent.bench.report import BenchResult, conditions
from dlite_agent.cli.comparison import compare
from dlite_agent.cli.demo_report import demo_report
from dlite_agent.errors import ConfigurationError
from tests.cli.scripted import agent_run

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
EMPTY = (
    "# Page\n\n<!-- results: written by dlite_agent.bench.page -->\n\nold\n\n"
    "<!-- end of results -->\n\nEnd.\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.md").write_text(EMPTY, encoding="utf-8")
    (tmp_path / "results").mkdir()
    return tmp_path


def page_of(folder: Path, **printed: object) -> str:
    for name, value in printed.items():
        (folder / "results" / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    assert main([str(folder)]) == 0
    return (folder / "index.md").read_text(encoding="utf-8")


def test_the_page_of_this_repository_is_what_its_results_say() -> None:
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    assert render_page(page, DOCS / "results") == page


def test_a_bench_becomes_a_table_with_its_conditions(folder: Path) -> None:
    rows = [{"rows": 1, "median_ms": 1.23456}, {"rows": 8, "median_ms": None}]
    result = BenchResult("step", "one forward", {"torch": "2", "threads": 1}, rows)
    page = page_of(folder, step={"step": asdict(result)})
    assert page == EMPTY.replace(
        "old",
        "## step\n\none forward.\n\n| rows | median_ms |\n| --- | --- |\n| 1 | 1.235 |\n| 8 | - |"
        "\n\nConditions: torch 2; threads 1.",
    )
    assert page_of(folder) == page, "writing it again changes nothing"


def test_the_demo_becomes_a_row_a_policy(folder: Path) -> None:
    ours, none = agent_run(([1], [2]), ([1, 2, 3], [4])), agent_run(([1], [2]), ([1, 2, 3], [4]))
    compared = {"none": compare(ours, none, "float64", lambda *_: 0.0)}
    report = demo_report({"session": ours, "prefix": ours, "none": none}, compared)  # type: ignore[arg-type]
    options = {"seed": 3, "size": "large", "bugs": 2, "dtype": "float64", "drafter": "auto"}
    page = page_of(folder, demo=report | options | {"conditions": conditions()})
    assert "| session | 2 |" in page
    assert "without reuse over ours: 1; " in page
    assert "Tokens identical: yes, with 0 near-ties." in page
    assert "; seed 3; size large;" in page


def test_acceptance_becomes_a_row_a_drafter_and_its_plots_are_shown(folder: Path) -> None:
    row: dict[str, object] = {"name": "dlite", "history": "long", "session": "restored"}
    row |= {"tau_micro": 4.56789, "tau_low": 4.0, "tau_high": 5.25, "tau_macro": 4.5}
    row |= {"speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.75, "c": 3.0}
    row |= {"requests": 7, "per_slot": [0.75] * 9, "state_bytes": 0, "same_answers": 7}
    (folder / "results" / "acceptance-tau.png").touch()
    printed = {"model": "nano", "drafters": [row], "about": "all of it", "conditions": {"seed": 1}}
    page = page_of(folder, acceptance=printed)
    assert "\n\nall of it.\n\n| drafter | history |" in page
    shares = " ".join(["0.75"] * 7)
    assert f"| dlite | long | restored | 7 | 4.568 (4 to 5.25) | 4.5 | {shares} |" in page
    assert "Conditions: seed 1.\n\n![acceptance-tau](results/acceptance-tau.png)" in page


@pytest.mark.parametrize("printed", [[1], {"step": {"name": "x"}}, {"runs": {}}, 3])
def test_what_no_bench_printed_is_refused(folder: Path, printed: object) -> None:
    with pytest.raises(ConfigurationError, match="is no output of a bench"):
        page_of(folder, broken=printed)


def test_a_page_without_markers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="put both in"):
        render_page("# Page\n", tmp_path)
