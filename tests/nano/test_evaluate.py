"""The share of tasks solved, and what a long evaluation says meanwhile."""

from __future__ import annotations

import io
import json
import sys

import pytest

from dlite_agent.nano import evaluate as evaluation
from dlite_agent.nano.evaluate import SEED_STRIDE, evaluate, main
from dlite_agent.nano.world import make_task
from dlite_agent.testing import ScriptedEngine
from tests.cli.scripted import solution

pytestmark = pytest.mark.host
ARGUMENTS = ["--tasks", "2", "--size", "tiny"]


class Loaded(ScriptedEngine):
    """Solves the first task of seed 1 and gives the second one up."""

    def __init__(self, model: str) -> None:
        first = make_task(SEED_STRIDE, split="heldout", size="tiny")
        super().__init__([*solution(first), "I give up."], model_name=model)

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self) -> None:
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "Engine", Loaded)


def test_the_report_has_the_share_and_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["solved"], report["num_solved"], report["by_size"]) == (0.5, 1, {"tiny": "1/2"})
    assert report["failures"][0]["seed"] == SEED_STRIDE + 1
    assert shown.err == "", "nobody looks"


def test_progress_is_a_line_a_task_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json", "--progress"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1
    first, second = shown.err.splitlines()
    assert first.startswith("1 of 2 tasks, 1 solved, 6 turns, ")
    assert second.startswith("2 of 2 tasks, 1 solved, 7 turns, ")


def test_a_terminal_shows_progress_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(ARGUMENTS) == 0
    assert terminal.getvalue().startswith("\r1 of 2 tasks, 1 solved")
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_no_task_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tasks", count])
    assert "--tasks" in capsys.readouterr().err


def test_a_caller_hears_of_every_task() -> None:
    heard: list[bool] = []
    tasks = [make_task(SEED_STRIDE + i, split="heldout", size="tiny") for i in range(2)]
    evaluate(Loaded("tiny"), tasks, on_task=lambda run: heard.append(run.solved))
    assert heard == [True, False]
