"""Tools in the chat: a repair, consent, Ctrl-C, limits, and a history that is always valid."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.cli.chat_tools import ChatTool, Consent, ToolStopped
from dlite_agent.cli.conversation import Conversation
from dlite_agent.cli.tool_choice import ToolOptions, choose_tools
from dlite_agent.errors import CapacityError, ContextLengthExceededError
from dlite_agent.nano.world import make_task
from dlite_agent.testing import ScriptedEngine
from tests.cli.scripted import call, solution

ALWAYS = Consent(is_given=True)


def tool(
    run: Callable[..., str], name: str = "look", *, is_reading: bool = True, each: bool = False
) -> ChatTool:
    schema: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
    return ChatTool(ToolSpec(name, "", schema), run, is_reading=is_reading, is_asked_each=each)


def echo(arguments: Any, on_output: Any) -> str:
    return f"seen {arguments.get('x')}"


def talk(
    turns: Sequence[Any], tools: Sequence[ChatTool], *lines: str, **options: Any
) -> tuple[Conversation, ScriptedEngine]:
    engine = ScriptedEngine(turns)
    conversation = Conversation(engine, tools=tools, **options)
    for line in lines:
        conversation.ask(line)
    return conversation, engine


def roles(conversation: Conversation) -> str:
    """First letters of the history's roles."""
    return "".join(message.role[0] for message in conversation.history)


def results(conversation: Conversation) -> list[str]:
    return [m.content for m in conversation.history if m.role == "tool"]


def assert_valid(messages: Sequence[Message]) -> None:
    """Every call has one result before anybody else speaks."""
    open_ids: list[str | None] = []
    for message in messages:
        if message.role == "tool":
            open_ids.remove(message.tool_call_id)
            continue
        assert open_ids == []
        open_ids = [made.id for made in message.tool_calls]
    assert open_ids == []


def test_a_broken_repository_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = make_task(0, split="heldout", size="tiny")
    root = task.materialise(tmp_path)
    tools = choose_tools(ToolOptions(root=str(root), names=["repair"]))
    conversation, engine = talk(solution(task), tools, task.prompt, consent=ALWAYS)
    assert task.solved(root)
    assert roles(conversation) == "uatatatatata"
    assert [spec.name for spec in engine.requests[0].tools] == [
        "list_files",
        "run_tests",
        "read_file",
        "edit_file",
    ]
    shown = capsys.readouterr().out
    assert f"* read_file(path={task.broken_path!r})\n" in shown
    assert f"  Edited {task.broken_path}\n" in shown
    assert "0 failed" in results(conversation)[-1]


def test_what_a_test_prints_is_fed_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "go").write_text("")
    command = "echo one; while [ -e go ]; do sleep 0.01; done; echo two"
    options = ToolOptions(root=str(tmp_path), names=["tests"], test_command=command)

    class Fed(ScriptedEngine):
        def stream(self, request: ChatRequest) -> Any:
            if request.is_partial:
                (tmp_path / "go").unlink(missing_ok=True)
            return super().stream(request)

    engine = Fed([call("run_tests"), "Done."])
    conversation = Conversation(engine, tools=choose_tools(options), consent=ALWAYS)
    conversation.ask("go")
    partial = engine.partial_requests[0]
    assert partial.messages[-1].content == "one\n"
    assert partial.messages[-1].tool_call_id == conversation.history[1].tool_calls[0].id
    assert results(conversation) == ["one\ntwo"]


def test_a_status_line_is_for_every_turn_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    talk([call("look", x="\x1b[2J"), "The \x1b]0;end."], [tool(echo)], "go")
    shown = capsys.readouterr().out
    assert shown.count(" cached, ") == 2
    assert shown.count("tok/s") == 2
    assert "\x1b" not in shown, "neither colours nor what a model makes up"
    assert "The \\x1b]0;end." in shown
    assert "\r" in shown, "what was announced is wiped"


def test_a_call_is_shown_whole_and_as_it_is_where_it_is_coloured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Who is asked about a command or an edit must see all of it."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    command = "echo [b]:smile: \x1b[8m; " + "word " * 30 + "x" * 300 + "; rm y\n\ttrue"
    turns = [
        call("run_command", command=command)
        + call("edit_file", path="a", old=" \n[b]old", new="new\u202e"),
        "Ok.",
    ]
    options = ToolOptions(root=str(tmp_path), names=["files", "shell"])
    talk(turns, choose_tools(options), "go")
    coloured = capsys.readouterr().out
    shown = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert "\x1b" not in shown
    lines = [line.strip() for line in shown.splitlines()]
    words = "".join("".join(lines).split())
    assert "".join(f"$ {command}".replace("\x1b", "\\x1b").replace("\n", "$").split()) in words
    for line in ("- ", "- [b]old", "+ new\\u202e"):
        assert line.strip() in lines
    assert "\x1b[91m- [b]old\x1b[0m" in coloured
    assert "\x1b[31m  Error: run_command was refused" in coloured
    panels = [line for line in shown.splitlines() if line.startswith((" ─", "  "))]
    assert max(len(line) for line in panels if "Error: " not in line) <= 40


def test_json_has_the_calls_and_their_results(capsys: pytest.CaptureFixture[str]) -> None:
    turns = ["I look.\n" + call("look", x="1") + call("look", x="2"), "Done."]
    talk(turns, [tool(echo)], "go", as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["finish_reason"] == "tool_calls"
    assert [made["result"] for made in first["tool_calls"]] == ["seen 1", "seen 2"]
    assert first["tool_calls"][0]["arguments"] == {"x": "1"}
    assert first["tool_calls"][0]["name"] == "look"
    assert first["stats"]["prompt_tokens"] > 0
    assert (second["content"], second["tool_calls"]) == ("Done.", [])


def test_what_writes_asks_first_and_what_reads_does_not() -> None:
    ran: list[str] = []
    answers = iter(["no", "yes", "always"])

    def write(arguments: Any, on_output: Any) -> str:
        ran.append(str(arguments["x"]))
        return "written"

    tools = [tool(write, "write", is_reading=False), tool(echo)]
    turns = [call("look", x="0"), *(call("write", x=x) for x in "1234"), "Done."]
    conversation, _ = talk(turns, tools, "go", consent=Consent(ask=lambda: next(answers)))  # type: ignore[arg-type,return-value]
    assert ran == ["2", "3", "4"]
    assert results(conversation)[1] == "Error: the user declined this call."


def test_always_is_for_the_same_command_only() -> None:
    asked: list[str] = []

    def ask() -> Any:
        asked.append("?")
        return "always"

    turns = [*(call("do", x=x) for x in "112"), "Done."]
    talk(turns, [tool(echo, "do", is_reading=False, each=True)], "go", consent=Consent(ask=ask))
    assert len(asked) == 2


def test_nobody_to_ask_is_a_refusal_that_the_model_is_told() -> None:
    turns = [call("do", x="1"), "I would have."]
    conversation, _ = talk(turns, [tool(echo, "do", is_reading=False)], "go")
    assert "needs the user's consent" in results(conversation)[0]
    assert conversation.history[-1].content == "I would have."


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        (call("nothing"), "no tool nothing; there are: look"),
        (call("look", y="1"), "look takes x; got y"),
        ('<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>', "must be a text"),
        ("<tool_call>\nlook at this\n</tool_call>", "this is no call: "),
    ],
)
def test_a_call_that_cannot_be_run_is_shown_and_told(
    turn: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation, engine = talk([turn, "Sorry."], [tool(echo)], "go")
    assert told in results(conversation)[0]
    assert results(conversation)[0].startswith("Error: ")
    assert engine.requests[1].messages[-1].content == results(conversation)[0]
    assert f"  {results(conversation)[0][:60]}" in capsys.readouterr().out


def test_turns_of_a_line_have_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [call("look", x=str(i)) for i in range(3)] + ["Going on."]
    conversation, _ = talk(turns, [tool(echo)], "go", "go on", max_turns=3)
    assert "--max-turns" in capsys.readouterr().err
    assert results(conversation) == [
        "seen 0",
        "seen 1",
        "Error: not run; the work was stopped here.",
    ]
    assert_valid(conversation.history)
    assert roles(conversation) == "uatatatua"


def test_the_same_error_again_and_again_ends_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [call("do", x="1")] * 3 + ["Well."]
    conversation, engine = talk(turns, [tool(echo, "do", is_reading=False)], "go")
    assert len(engine.requests) == 3
    assert "do failed three times in the same way" in capsys.readouterr().err
    assert_valid(conversation.history)
    turns = [call("look", x="1")] * 4 + ["Well."]
    assert len(talk(turns, [tool(echo)], "go")[1].requests) == 5, "a result is no error"


def stopping(*, output: str = "") -> Callable[..., str]:
    def run(arguments: Any, on_output: Any) -> str:
        raise ToolStopped(output) if output else KeyboardInterrupt

    return run


@pytest.mark.parametrize("output", ["half", ""])
def test_ctrl_c_in_a_tool_keeps_what_it_printed_and_the_next_line_follows(output: str) -> None:
    turns = [call("stop") + call("look", x="2"), "Next."]
    tools = [tool(stopping(output=output), "stop"), tool(echo)]
    conversation, engine = talk(turns, tools, "go", "and now?")
    assert len(engine.requests) == 2
    assert_valid(conversation.history)
    assert roles(conversation) == "uattua"
    stopped, never = results(conversation)
    assert stopped == (f"{output}\n" if output else "") + "Error: the user stopped this call."
    assert never.startswith("Error: not run")


class Interrupted(ScriptedEngine):
    """Ctrl-C arrives in the second turn."""

    def stream(self, request: Any) -> Any:
        for number, chunk in enumerate(super().stream(request)):
            if len(self.requests) == 2 and number == 2:
                raise KeyboardInterrupt
            yield chunk


def test_ctrl_c_in_an_answer_behind_a_tool_keeps_the_result() -> None:
    thought = "<think>\n" + "Hm. " * 20 + "\n</think>\n\nYes."
    for turn, kept in ((thought, "uatua"), ("A long answer to it.", "uataua")):
        engine = Interrupted([call("look", x="1"), turn, "Next."])
        conversation = Conversation(engine, tools=[tool(echo)])
        conversation.ask("go")
        conversation.ask("and now?")
        assert_valid(conversation.history)
        assert roles(conversation) == kept


def test_a_stop_between_an_answer_and_its_call_leaves_a_valid_history() -> None:
    conversation, _ = talk([call("look", x="1"), "Next."], [tool(echo)])
    conversation._screen.answered = lambda generation: stopping()(None, None)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("go")
    conversation._screen.answered = lambda generation: None  # type: ignore[method-assign]
    conversation.ask("and now?")
    assert_valid(conversation.history)


def test_an_error_behind_a_call_forgets_the_line_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    turns = ["Hello.", call("look", x="1"), ContextLengthExceededError(900, 1, 256), "Yes."]
    conversation, _ = talk(turns, [tool(echo)], "hi", "go", "again?")
    assert roles(conversation) == "uaua"
    assert "what they changed stays" in capsys.readouterr().err
    conversation, _ = talk([CapacityError("full; try again")], [], "hi")
    assert "stays" not in capsys.readouterr().err
    assert conversation.history == []
