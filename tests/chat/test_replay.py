"""Exact replay: which messages are spliced, which are rendered, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.chat.message_keys import chain_keys, seed_key, turn_forms
from dlite_agent.chat.messages import Message, ToolCall, UnparsedToolCall
from dlite_agent.chat.replay import ReplayPlan, plan_replay
from dlite_agent.chat.turn_handles import TurnHandle, TurnHandles
from dlite_agent.sessions.journal import Journal, JournalRecord

SEED = seed_key((), {})


class Agent:
    """A client and the part of an engine that replay is made for.

    Turn number n "samples" the ids [100 n, 100 n + 1, …]; ids of calls are unique.
    """

    def __init__(
        self, journal: Journal | None = None, handles: TurnHandles | None = None, name: str = "s"
    ) -> None:
        self.journal = Journal() if journal is None else journal
        self.handles = TurnHandles() if handles is None else handles
        self.name = name
        self.messages: list[Message] = []
        self.sampled: dict[int, tuple[int, ...]] = {}  # message index → ids

    def plan(self, messages: Sequence[Message] | None = None, **options: Any) -> ReplayPlan:
        messages = self.messages if messages is None else messages
        options = {"mode": "as_generated", "handles": self.handles, **options}
        return plan_replay(messages, SEED, self.journal, **options)

    def say(self, role: Any, content: str, **fields: Any) -> None:
        self.messages.append(Message(role, content, **fields))

    def answer(self, content: str = "", *, thought: str | None = None, call: Any = None) -> None:
        plan = self.plan()
        number = len(self.messages)
        calls = () if call is None else (ToolCall("edit", call, id=f"{self.name}-{number}"),)
        message = Message("assistant", content, reasoning=thought, tool_calls=calls)
        base = 1000 * (sum(map(ord, self.name)) + 1) + 10 * number
        self.sampled[number] = (base, base + 1, base + 2)
        for form in turn_forms(plan.key, message):
            record = JournalRecord(self.sampled[number], form.reasoning_digest, self.name)
            self.journal.record(form.key, record)
        ids = [call.id or "" for call in calls]
        self.handles.remember(ids, plan.handle(message, self.name))
        self.messages.append(message)

    def tool_turn(self, call: Any, result: str, *, thought: str | None = "hm") -> None:
        self.answer(call=call, thought=thought)
        self.say("tool", result, tool_call_id=self.messages[-1].tool_calls[0].id)


@pytest.fixture
def agent() -> Agent:
    """Two tool turns after a query."""
    agent = Agent()
    agent.say("system", "You fix bugs.")
    agent.say("user", "Fix it.")
    agent.tool_turn({"path": "a.py", "text": "    x = 1\n"}, "ok\n")
    agent.tool_turn({"path": "b.py", "text": ""}, "no\n")
    return agent


def reasons(plan: ReplayPlan) -> list[str]:
    return [turn.reason for turn in plan.turns]


def edit_turn(agent: Agent, index: int, **changes: Any) -> list[Message]:
    messages = list(agent.messages)
    messages[index] = replace(messages[index], **changes)
    return messages


def edit_arguments(agent: Agent, index: int, arguments: Any) -> list[Message]:
    call = replace(agent.messages[index].tool_calls[0], arguments=arguments)
    return edit_turn(agent, index, tool_calls=(call,))


def test_history_as_generated_is_spliced_with_the_ids_that_were_sampled(agent: Agent) -> None:
    plan = agent.plan()
    assert plan.splices == agent.sampled
    assert reasons(plan) == ["reasoning_equal", "reasoning_equal"]
    assert all(turn.is_spliced for turn in plan.turns)
    assert plan.keys == chain_keys(agent.messages, SEED)
    assert plan.key == plan.keys[-1]


@pytest.mark.parametrize("blank", [None, "", " \n"])
def test_dropped_reasoning_is_restored(agent: Agent, blank: str | None) -> None:
    messages = [replace(message, reasoning=blank) for message in agent.messages]
    plan = agent.plan(messages)
    assert plan.splices == agent.sampled
    assert reasons(plan) == ["reasoning_absent", "reasoning_absent"]


def test_reasoning_equal_up_to_its_ends_is_equal(agent: Agent) -> None:
    assert agent.plan(edit_turn(agent, 2, reasoning="\nhm\n")).splices == agent.sampled


def test_reasoning_that_differs_wins_and_later_turns_still_match(agent: Agent) -> None:
    plan = agent.plan(edit_turn(agent, 2, reasoning="I was told to think this."))
    assert reasons(plan) == ["reasoning_differs", "reasoning_equal"]
    assert plan.splices == {4: agent.sampled[4]}


def test_reasoning_for_a_turn_that_had_none_wins() -> None:
    agent = Agent()
    agent.say("user", "Hi")
    agent.answer("Hello.")
    assert reasons(agent.plan(edit_turn(agent, 1, reasoning="made up"))) == ["reasoning_differs"]


@pytest.mark.parametrize("index", [2, 4])
@pytest.mark.parametrize(
    "dump",
    [
        lambda value: json.dumps(value),
        lambda value: json.dumps(value, separators=(",", ":"), sort_keys=True),
        lambda value: json.dumps(value, indent=4),
        lambda value: dict(reversed(value.items())),
    ],
    ids=["text", "compact", "indented", "re-ordered"],
)
def test_rewritten_json_is_spliced(agent: Agent, index: int, dump: Any) -> None:
    original = agent.messages[index].tool_calls[0].arguments
    assert agent.plan(edit_arguments(agent, index, dump(original))).splices == agent.sampled


def test_changed_argument_is_an_edit_of_that_turn_and_of_all_behind_it(agent: Agent) -> None:
    plan = agent.plan(edit_arguments(agent, 2, {"path": "c.py", "text": "    x = 1\n"}))
    assert plan.splices == {}
    assert reasons(plan) == ["edited_turn", "edited_history"]


def test_indentation_inside_a_string_is_an_edit(agent: Agent) -> None:
    plan = agent.plan(edit_arguments(agent, 2, {"path": "a.py", "text": "  x = 1\n"}))
    assert reasons(plan) == ["edited_turn", "edited_history"]


def test_edited_tool_result_leaves_the_turns_before_it_alone(agent: Agent) -> None:
    plan = agent.plan(edit_turn(agent, 3, content="(elided)"))
    assert reasons(plan) == ["reasoning_equal", "edited_history"]
    assert plan.splices == {2: agent.sampled[2]}


def test_message_that_was_never_generated_here_is_unknown(agent: Agent) -> None:
    agent.say("user", "And this example:")
    agent.say("assistant", "written by hand")
    assert reasons(agent.plan())[-1] == "unknown"


def test_forgotten_turn_is_unknown_rather_than_edited(agent: Agent) -> None:
    agent.journal.clear()
    assert reasons(agent.plan()) == ["unknown", "unknown"]


def test_replay_needs_no_ids(agent: Agent) -> None:
    messages = [
        replace(
            message,
            tool_call_id=None,
            tool_calls=tuple(replace(call, id=None) for call in message.tool_calls),
        )
        for message in agent.messages
    ]
    plan = agent.plan(messages, handles=None)
    assert plan.splices == agent.sampled
    assert plan.owner_session_id is None
    assert plan.last_session_id == "s"


def test_plan_of_an_empty_history_continues_the_seed() -> None:
    plan = plan_replay((), SEED, Journal())
    assert (plan.key, plan.turns, plan.splices) == (SEED, (), {})


def test_template_mode_splices_nothing(agent: Agent) -> None:
    plan = agent.plan(mode="template")
    assert plan.splices == {}
    assert reasons(plan) == ["template_history", "template_history"]
    assert plan.owner_session_id == "s", "it still says where to look"


def test_auto_splices_inside_the_tool_loop(agent: Agent) -> None:
    assert agent.plan(mode="auto", strips_thoughts=True).splices == agent.sampled


def test_auto_renders_turns_before_a_new_query_where_the_template_strips_thoughts(
    agent: Agent,
) -> None:
    agent.answer("Done.", thought="so")
    agent.say("user", "Thanks. And now?")
    agent.tool_turn({"path": "c.py"}, "ok")
    plan = agent.plan(mode="auto", strips_thoughts=True)
    assert reasons(plan) == ["template_history"] * 3 + ["reasoning_equal"]
    assert plan.splices == {8: agent.sampled[8]}


def test_auto_splices_across_queries_where_the_template_keeps_thoughts(agent: Agent) -> None:
    agent.answer("Done.", thought="so")
    agent.say("user", "Thanks.")
    assert agent.plan(mode="auto", strips_thoughts=False).splices == agent.sampled


def test_auto_takes_a_wrapped_tool_response_for_no_query(agent: Agent) -> None:
    agent.answer("Look.", thought="so")
    agent.say("user", "<tool_response>\nok\n</tool_response>")
    assert agent.plan(mode="auto", strips_thoughts=True).splices == agent.sampled


def test_auto_without_any_query_splices(agent: Agent) -> None:
    loop = Agent()
    loop.say("system", "Work until done.")
    loop.tool_turn({"path": "a"}, "ok")
    assert loop.plan(mode="auto", strips_thoughts=True).splices == loop.sampled


def test_newest_known_call_id_names_the_session(agent: Agent) -> None:
    other = Agent(agent.journal, agent.handles, name="t")
    other.messages = list(agent.messages)
    other.tool_turn({"path": "z"}, "ok")
    assert other.plan().owner_session_id == "t"
    assert other.plan(other.messages[:-3]).owner_session_id == "s"
    assert other.plan(other.messages[:-1]).owner_session_id == "t", "the call itself says so too"


def twins(ids: tuple[str, str], thoughts: tuple[str, str]) -> tuple[Agent, Agent]:
    """Two agents that share an engine and look the same from outside."""
    first = Agent(name=ids[0])
    second = Agent(first.journal, first.handles, name=ids[1])
    for agent, thought in zip((first, second), thoughts, strict=True):
        agent.say("user", "Fix it.")
        agent.tool_turn({"path": "a"}, "ok", thought=thought)
    return first, second


def test_reasoning_picks_among_turns_that_look_the_same() -> None:
    for agent in twins(("s", "t"), ("one", "two")):
        assert agent.plan(handles=None).splices == agent.sampled


def test_call_id_picks_among_turns_that_look_the_same_without_reasoning() -> None:
    for agent in twins(("s", "t"), ("one", "two")):
        assert agent.plan(edit_turn(agent, 1, reasoning=None)).splices == agent.sampled


def test_session_of_the_turn_before_picks_among_turns_that_look_the_same() -> None:
    first, second = twins(("s", "t"), ("one", "two"))
    for agent, thought in ((first, "three"), (second, "four")):
        agent.tool_turn({"path": "b"}, "ok", thought=thought)
    for agent in (first, second):
        messages = edit_turn(agent, 3, reasoning=None)
        assert agent.plan(messages, handles=None).splices == agent.sampled


def test_newest_turn_is_taken_where_nothing_else_decides() -> None:
    first, second = twins(("s", "t"), ("one", "two"))
    messages = edit_turn(first, 1, reasoning=None)
    assert first.plan(messages, handles=None).splices == second.sampled


def test_broken_call_that_the_client_echoes_is_spliced() -> None:
    journal = Journal()
    broken = UnparsedToolCall('{"name": "ls"', "unexpected end", "id-1", name="ls")
    question, answer = Message("user", "Look."), Message("assistant")
    plan = plan_replay((question,), SEED, journal)
    for form in turn_forms(plan.key, answer, (broken,)):
        journal.record(form.key, JournalRecord([5, 6]))
    handles = TurnHandles()
    handles.remember([broken.id], plan.handle(answer, "s", (broken,)))
    echoed = replace(answer, tool_calls=(ToolCall("ls", broken.text, id=broken.id),))
    for turn in (answer, echoed):
        assert plan_replay((question, turn), SEED, journal).splices == {1: (5, 6)}
    journal.clear()
    forgotten = plan_replay((question, echoed), SEED, journal, handles=handles)
    assert reasons(forgotten) == ["unknown"]


def test_handles_forget_the_least_recently_used() -> None:
    handles = TurnHandles(max_handles=2)
    for name in ("a", "b"):
        handles.remember([name], TurnHandle(name, (), b""))
    assert handles.find("a") is not None
    handles.remember(["c"], TurnHandle("c", (), b""))
    assert handles.find("b") is None
    assert [handles.find(name) is not None for name in ("a", "c")] == [True, True]
    assert len(handles) == 2


@pytest.mark.parametrize("call_id", [None, "", "unknown"])
def test_missing_or_unknown_id_has_no_handle(call_id: str | None) -> None:
    assert TurnHandles().find(call_id) is None


turn_texts = st.tuples(
    st.text(max_size=5),
    st.one_of(st.none(), st.text(max_size=5)),
    st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers(), max_size=3),
    st.text(max_size=5),
)


@settings(max_examples=30)
@given(st.lists(turn_texts, min_size=1, max_size=5), st.data())
def test_any_loop_comes_back_spliced_however_its_client_rewrites_it(
    turns: list[tuple[str, str | None, dict[str, Any], str]], data: st.DataObject
) -> None:
    agent = Agent()
    agent.say("user", "Go.")
    for content, thought, arguments, result in turns:
        agent.answer(content, thought=thought, call=arguments)
        agent.say("tool", result, tool_call_id=agent.messages[-1].tool_calls[0].id)
    rewritten = []
    for message in agent.messages:
        if message.role == "assistant":
            (call,) = message.tool_calls
            text = json.dumps(call.arguments, indent=data.draw(st.sampled_from([None, 0, 2])))
            kept = message.reasoning if data.draw(st.booleans()) else None
            calls = (replace(call, arguments=text),)
            content = data.draw(st.sampled_from(["", "\n"])) + message.content
            message = replace(message, content=content, reasoning=kept, tool_calls=calls)
        rewritten.append(message)
    assert agent.plan(rewritten).splices == agent.sampled
