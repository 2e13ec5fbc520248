"""Sessions of nano behind a server: feed, fork, explain, and an end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlite_agent import (
    AgentSession,
    Engine,
    EngineConfig,
    Message,
    RemoteEngine,
    SessionNotFoundError,
    ToolSpec,
)
from dlite_agent.backend import ChatRequest
from dlite_agent.chat.output_rules import OutputRules, ToolChoice
from dlite_agent.config import SamplingParams
from tests.serving.live_server import live_server

TOOL = ToolSpec("read_file", parameters={"type": "object", "additionalProperties": False})
GREEDY = SamplingParams(temperature=0)
SHORT = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    with (
        Engine(EngineConfig("nano", drafter="null", idle=False)) as backend,
        live_server(backend) as server,
        RemoteEngine(server.url) as engine,
    ):
        yield engine


def test_a_conversation_forks_and_computes_only_what_is_new(engine: RemoteEngine) -> None:
    assert (engine.model_name, engine.max_context) == ("nano", 65_536)
    first = AgentSession(engine, "first", tools=[TOOL])
    first.turn(Message("user", "What is in the file?"), sampling=SHORT)
    second = first.fork("second")
    for session, question in ((first, "And now?"), (second, "Why?")):
        stats = session.turn(Message("user", question), sampling=SHORT).stats
        assert stats.prefilled_tokens <= stats.new_tokens + 1
        assert stats.cached_tokens > 0
    messages = tuple(first.messages)
    assert engine.count_tokens(messages, (TOOL,)) > engine.count_tokens(messages) > 0
    last = first.regenerate().stats
    assert engine.sessions().explain("first") == last


def test_what_a_tool_prints_is_prefilled_while_it_runs(engine: RemoteEngine) -> None:
    session = AgentSession(engine, "fed", tools=[TOOL])
    must = OutputRules(ToolChoice("required"))
    request = ChatRequest(
        (Message("user", "Read it."),), tools=(TOOL,), output=must, sampling=GREEDY
    )
    answer = engine.generate(request)
    (call,) = answer.message.tool_calls
    session.messages = [*request.messages, answer.message]
    session.feed("line 1\nline 2\nline 3\n" * 5)
    text = "line 1\nline 2\nline 3\n" * 5 + "end\n"
    stats = session.turn(Message("tool", text, tool_call_id=call.id), sampling=SHORT).stats
    assert stats.fed_tokens > stats.prefilled_tokens > 0


def test_sessions_are_listed_pinned_copied_and_forgotten(engine: RemoteEngine) -> None:
    conversation = AgentSession(engine, "mine-1", tenant="me")
    held = conversation.turn(Message("user", "Hi."), sampling=SHORT).stats.session_id
    mine, other = engine.sessions("me"), engine.sessions("another")
    assert [session.session_id for session in mine.list()] == [held]
    assert other.list() == ()
    with pytest.raises(SessionNotFoundError):
        other.delete(held)
    assert mine.pin("mine-1") == held
    assert [session.is_pinned for session in mine.list()] == [True]
    assert mine.unpin(held) == mine.load(held) == held
    copy = mine.fork(held, "copy")
    assert {session.session_id for session in mine.list()} == {held, copy}
    assert mine.explain("mine-1").session_id == held
    assert mine.delete("copy") == copy
    mine.delete(held)
    assert mine.list() == ()
    with pytest.raises(SessionNotFoundError):
        mine.explain("mine-1")
