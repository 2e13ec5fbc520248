"""`integrations/langchain/`: the agent that a user opens by path, and its README."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from dlite_agent import Engine
from dlite_agent.cli.main import main as dlite_agent
from dlite_agent.nano.world import make_task
from tests.integrations.test_langchain_blocking import armed

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


async def test_the_graph_of_the_server_answers_without_blocking_its_loop(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "langgraph.json").read_text(encoding="utf-8"))
    assert all((FOLDER / path).is_dir() for path in config["dependencies"])
    file, _, name = config["graphs"]["repair"].partition(":")
    make_graph = runpy.run_path(str(FOLDER / file))[name]
    task = make_task(1, size="tiny")
    run: Any = {
        "configurable": {"folder": str(task.materialise(tmp_path)), "thread_id": "one"},
        "recursion_limit": 40,
    }
    with armed():
        graph = await make_graph(run)
        result = await graph.ainvoke({"messages": [HumanMessage(task.prompt)]}, run)
    assert result["messages"][-1].type == "ai"
    assert task.solved(tmp_path)


def test_the_page_names_tests_that_exist() -> None:
    root = FOLDER.parents[1]
    page = (root / "docs" / "integrations" / "langchain.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:integrations|engine)/\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for file, name in named:
        source = (root / "tests" / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source, name


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
