"""`integrations/langchain/`: the agent that a user opens by path, and its README."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent import Engine
from dlite_agent.cli.main import main as dlite_agent
from dlite_agent.nano.world import make_task

FOLDER = Path(__file__).parents[2] / "integrations" / "langchain"

pytestmark = pytest.mark.host


@pytest.fixture(scope="module", autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    yield
    Engine.close_all()


@pytest.fixture
def agent() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "agent.py"))


def test_it_answers_a_request_on_a_folder(
    agent: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = make_task(1, size="tiny")
    messages = agent["main"]([str(task.materialise(tmp_path)), task.prompt])
    assert [message.type for message in messages[:2]] == ["human", "ai"]
    turns = [m.response_metadata["dlite"] for m in messages if m.type == "ai"]
    assert all(turn["prefilled_tokens"] == turn["new_tokens"] + 1 for turn in turns[1:])
    assert "prefilled)" in capsys.readouterr().out


def test_the_readme_is_short_and_its_lines_work(
    agent: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    for link in re.findall(r"\]\((\S+?)\)", text):
        assert (FOLDER / link).is_file(), link
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})
    for command in (agent["main"], dlite_agent):
        with pytest.raises(SystemExit):
            command(["--help"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("folder", "request", "--model", "doctor"))
