"""Every example runs as it stands, on nano, and shows what it says it shows."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.host


@pytest.fixture(scope="module", autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    yield
    Engine.close_all()


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_fits_a_screen_and_says_how_to_run_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 60
    assert f"python examples/{path.name}" in source


def test_an_agent_repairs_a_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("01_agent.py")["main"](size="tiny") is True
    assert "The tests pass." in capsys.readouterr().out


def test_a_stopped_turn_leaves_its_prompt_in_the_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = example("02_stream_and_cancel.py")["main"]()
    stats = answer.response_metadata["dlite"]
    assert stats["cached_tokens"] == stats["prompt_tokens"] - 1
    assert "[stopped]" in capsys.readouterr().out


def test_two_interleaved_agents_pay_for_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    for first, *later in example("03_two_agents.py")["main"]():
        assert first["prompt_tokens"] > 0
        for turn in later:
            assert turn["prefilled_tokens"] == turn["new_tokens"] + 1
    assert capsys.readouterr().out.count("A = 1.00") == 2


def test_an_answer_fits_its_schema_and_a_tool_is_called(
    capsys: pytest.CaptureFixture[str],
) -> None:
    finding, calls = example("04_structured_output.py")["main"]()
    assert finding.kind in ("bug", "style", "nothing")
    assert isinstance(finding.line, int)
    assert [(call["name"], call["args"]) for call in calls] == [("run_tests", {})]
    assert "kind=" in capsys.readouterr().out


def test_another_way_from_an_earlier_step_computes_what_is_new(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end, branch = example("05_time_travel.py")["main"]()
    assert branch["prompt_tokens"] < end["prompt_tokens"]
    assert branch["prefilled_tokens"] < branch["prompt_tokens"] / 5
    assert "the other way" in capsys.readouterr().out


def test_a_parent_of_sub_agents_computes_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    _, second = example("06_sub_agents.py")["main"]()
    assert second["prefilled_tokens"] == second["new_tokens"] + 1
    assert capsys.readouterr().out.count("The tests pass.") == 2
