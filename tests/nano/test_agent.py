"""The agent that the demo and the evaluation run, over a scripted model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.errors import CapacityError, ContextLengthExceededError
from dlite_agent.nano.agent import RecordingBackend, repair_tools, run_repair
from dlite_agent.nano.world import make_task
from dlite_agent.outputs import Generation
from dlite_agent.testing import ScriptedEngine

CALL = '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>'
REQUEST = ChatRequest((Message("user", "Hi."),))

host = pytest.mark.host


def texts(generations: list[Generation]) -> list[str]:
    return [generation.message.content for generation in generations]


async def test_a_recorder_keeps_every_finished_turn_however_it_is_asked_for() -> None:
    heard: list[Generation] = []
    engine = ScriptedEngine(["a", "b", "c", "d", "stopped"], model_name="nano", max_context=99)
    recorder = RecordingBackend(engine, heard.append)
    backend: ChatBackend = recorder
    assert (backend.model_name, backend.max_context) == ("nano", 99)
    backend.generate(REQUEST)
    list(backend.stream(REQUEST))
    await backend.agenerate(REQUEST)
    async for _ in backend.astream(REQUEST):
        pass
    stopped = recorder.stream(REQUEST)
    next(stopped)
    stopped.close()  # type: ignore[attr-defined]  # a generator
    backend.close()
    assert texts(recorder.generations) == texts(heard) == ["a", "b", "c", "d"]
    assert backend.count_tokens(REQUEST.messages) == engine.count_tokens(REQUEST.messages)


@host
def test_tools_work_on_the_folder_and_are_logged(tmp_path: Path) -> None:
    logged: list[tuple[str, object, str]] = []
    task = make_task(1, size="tiny")
    tools = repair_tools(
        task.materialise(tmp_path),
        lambda name, arguments, result: logged.append((name, arguments, result)),
    )
    by_name = {tool.name: tool for tool in tools}
    assert list(by_name) == ["list_files", "run_tests", "read_file", "edit_file"]
    text = by_name["read_file"].invoke({"path": task.broken_path})
    assert task.broken.source() in text
    assert logged == [("read_file", {"path": task.broken_path}, text)]


@host
def test_an_agent_that_answers_at_once_has_one_turn_and_solved_nothing(tmp_path: Path) -> None:
    engine = ScriptedEngine(["I can not."], model_name="nano")
    run = run_repair(engine, make_task(1), tmp_path, enable_thinking=False)
    assert not run.solved
    assert run.error is None
    assert texts(list(run.turns)) == ["I can not."]
    request = engine.requests[0]
    assert request.tools[0].name == "list_files"
    assert request.template_kwargs == {"enable_thinking": False}
    assert request.sampling.temperature == 0.0
    assert run.wall_s >= run.model_s == 0.0


@host
def test_a_history_that_outgrows_the_context_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    script = [CALL, ContextLengthExceededError(900, 512, 1024)]
    run = run_repair(ScriptedEngine(script, model_name="nano"), make_task(1), tmp_path)
    assert len(run.turns) == 1
    assert "900 tokens" in (run.error or "")


@host
def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    engine = ScriptedEngine([CapacityError("full; try again")], model_name="nano")
    with pytest.raises(CapacityError):
        run_repair(engine, make_task(1), tmp_path)
