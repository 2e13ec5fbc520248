"""Conversations that branch, go back and are fed, on a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.agent_session import AgentSession
from dlite_agent.engine.engine import Engine
from dlite_agent.errors import (
    CheckpointError,
    ConfigurationError,
    RequestError,
    SessionError,
)
from dlite_agent.testing import ScriptedEngine
from tests.conversations import READ_FILE, sampled
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)
    config = EngineConfig(model=str(folder), dtype="float64", drafter="null")
    with Engine(config) as engine:
        yield engine


def calling(engine: Engine, task: str) -> AgentSession:
    """A session whose last answer calls a tool."""
    session = AgentSession(engine, tools=[READ_FILE])
    said = [Message("system", "Read files."), Message("user", task)]
    for seed in range(50):
        turn = session.turn(*said, sampling=sampled(seed, 30))
        if turn.message.tool_calls:
            return session
        said = [Message("user", "Call a tool.")]
    raise AssertionError("it never calls")


def result(session: AgentSession, text: str) -> Message:
    return Message("tool", text, tool_call_id=session.messages[-1].tool_calls[0].id)


def test_a_tool_that_is_read_while_it_prints_is_prefilled_when_it_ends(engine: Engine) -> None:
    session = calling(engine, "feed me")
    lines = [f"    line {number}: x = {number}\n" for number in range(12)]
    for count in (3, 6, 6, 9):
        session.feed("".join(lines[:count]) + "    half a li")
    turn = session.turn(result(session, "".join(lines)), sampling=sampled(1, 20))
    stats = turn.stats
    fed = len("".join(lines[:9]))
    assert 0 < stats.prefilled_tokens <= stats.new_tokens - fed + 20
    assert stats.fed_tokens >= fed
    cold = AgentSession(engine, tenant="cold", tools=[READ_FILE], history="as_generated")
    assert cold.name != session.name


def test_a_result_that_ends_otherwise_drops_what_was_fed(engine: Engine) -> None:
    session = calling(engine, "feed me nonsense")
    unfed = session.fork()
    session.feed("nothing of this\nwill be in the result\n")
    turn = session.turn(result(session, "another text"), sampling=sampled(1, 20))
    plain = unfed.turn(result(unfed, "another text"), sampling=sampled(1, 20))
    assert turn.prompt_token_ids == plain.prompt_token_ids
    assert turn.token_ids == plain.token_ids
    assert turn.stats.fed_tokens < 20


def test_feeding_needs_a_call_that_waits(engine: Engine) -> None:
    session = AgentSession(engine)
    with pytest.raises(RequestError, match="no call waits"):
        session.feed("text")
    session = calling(engine, "feed me after")
    for call in session.messages[-1].tool_calls:
        session.messages.append(Message("tool", "done", tool_call_id=call.id))
    with pytest.raises(RequestError, match="no call waits"):
        session.feed("text")


def test_branches_share_what_was_said_and_disturb_nobody(engine: Engine) -> None:
    session = calling(engine, "branch")
    branches = [session.fork(), session.fork("named")]
    assert branches[1].name == "named"
    for branch in (session, *branches):
        stats = branch.turn(result(branch, "ok"), sampling=sampled(3, 10)).stats
        assert stats.prefilled_tokens <= stats.new_tokens + 20
    before = len(session.messages)
    assert len(branches[0].messages) == before
    branches[0].rewind(2)
    assert len(session.messages) == before


def test_a_session_that_went_back_goes_on_from_there(engine: Engine) -> None:
    session = calling(engine, "go back")
    length = len(session.messages)
    first = session.turn(result(session, "ok"), sampling=sampled(4, 20))
    session.rewind(length)
    again = session.turn(result(session, "ok"), sampling=sampled(4, 20))
    assert again.token_ids == first.token_ids
    assert again.stats.prefilled_tokens <= 2
    for wrong in (100, -1, True, "2", 1.0, None):
        with pytest.raises(RequestError, match="num_messages"):
            session.rewind(wrong)  # type: ignore[arg-type]  # what users pass


def test_another_answer_costs_a_token_of_prefill(engine: Engine) -> None:
    session = calling(engine, "again")
    first = session.turn(result(session, "ok"), sampling=sampled(5, 20))
    length = len(session.messages)
    other = session.regenerate()
    assert other.prompt_token_ids == first.prompt_token_ids
    assert other.token_ids != first.token_ids
    assert other.stats.prefilled_tokens == 1
    assert len(session.messages) == length
    assert session.messages[-1].turn == other.stats.turn


def test_an_answer_that_fails_is_not_lost(engine: Engine) -> None:
    session = calling(engine, "fail")
    messages = list(session.messages)
    with pytest.raises(RequestError):
        session.regenerate(sampled(0, 100_000))
    assert session.messages == messages
    with pytest.raises(RequestError, match="no answer"):
        AgentSession(engine).regenerate()


def test_a_turn_that_is_not_read_to_its_end_changes_nothing(engine: Engine) -> None:
    session = calling(engine, "stop")
    messages = list(session.messages)
    stream = session.stream(result(session, "ok"), sampling=sampled(6, 20))
    next(stream)
    stream.close()
    assert session.messages == messages


def test_a_closed_session_takes_no_turn(engine: Engine) -> None:
    session = AgentSession(engine)
    session.close()
    for use in (lambda: session.turn(Message("user", "x")), session.fork, lambda: session.feed("")):
        with pytest.raises(SessionError, match="closed"):
            use()


def held(engine: Engine) -> set[str]:
    return {session.session_id for session in engine.sessions() if session.tier == "device"}


def test_a_closed_session_frees_its_memory_and_no_forks(engine: Engine) -> None:
    before, used = held(engine), engine.usage().kv_used_bytes
    with calling(engine, "close me") as session:
        fork, other = session.fork(), session.fork()
        other.turn(result(other, "other"), sampling=sampled(1, 10))
        assert held(engine) > before
    stats = fork.turn(result(fork, "ok"), sampling=sampled(1, 10)).stats
    assert stats.prefilled_tokens <= stats.new_tokens + 20, "the parent left what it goes on with"
    fork.close()
    other.close()
    other.close()
    assert held(engine) <= before
    assert engine.usage().kv_used_bytes <= used


def test_a_conversation_that_others_go_on_with_stays(engine: Engine) -> None:
    before = held(engine)
    session = calling(engine, "shared")
    same = AgentSession(engine, "another", tools=[READ_FILE])
    same.messages = list(session.messages)
    same.turn(result(same, "ok"), sampling=sampled(1, 10))
    session.close()
    assert held(engine) > before
    same.close()
    assert held(engine) <= before


def test_closing_after_the_engine_does_nothing(engine: Engine) -> None:
    with Engine(replace(engine.config, drafter="suffix")) as other:
        session = AgentSession(other)
        session.turn(Message("user", "hello"), sampling=sampled(1, 5))
    session.close()


def test_a_saved_conversation_goes_on_in_another_process(engine: Engine, tmp_path: Path) -> None:
    session = calling(engine, "save me")
    num_rows = session.save(tmp_path)
    assert num_rows > 100
    with Engine(engine.config) as other:
        later = AgentSession.load(tmp_path, other, tenant="me")
        assert later.messages == session.messages
        turn = later.turn(result(later, "ok"), sampling=sampled(3, 20))
        again = AgentSession.load(tmp_path, other, tenant="somebody else")
        again.turn(result(again, "ok"), sampling=sampled(3, 20))
    here = session.turn(result(session, "ok"), sampling=sampled(3, 20))
    assert turn.prompt_token_ids == here.prompt_token_ids, "thoughts and spelling as sampled"
    assert turn.token_ids == here.token_ids
    assert turn.stats.origin == "restored"
    # One row more, which is computed to be compared with what was saved.
    assert turn.stats.prefilled_tokens == here.stats.prefilled_tokens + 1
    assert session.save(tmp_path) > num_rows


def test_a_conversation_whose_kv_is_gone_is_saved_without_it(
    engine: Engine, tmp_path: Path
) -> None:
    session = calling(engine, "save my words")
    engine.purge()
    assert session.save(tmp_path) == 0
    later = AgentSession.load(tmp_path, engine)
    assert later.turn(result(later, "ok"), sampling=sampled(3, 5)).stats.origin != "restored"
    scripted = AgentSession(ScriptedEngine(["It is late."]), tools=[READ_FILE])
    scripted.turn(Message("user", "What time is it?"))
    assert scripted.save(tmp_path / "scripted") == 0
    loaded = AgentSession.load(tmp_path / "scripted", ScriptedEngine([]))
    assert loaded.messages == scripted.messages


def test_a_folder_that_holds_no_conversation_is_refused(engine: Engine, tmp_path: Path) -> None:
    session = calling(engine, "save me whole")
    with pytest.raises(CheckpointError, match="holds no conversation"):
        AgentSession.load(tmp_path, engine)
    for wrong in (None, "", 7, "a\0b"):
        with pytest.raises(RequestError, match="use the path of a folder"):
            session.save(wrong)  # type: ignore[arg-type]  # what users pass
    with pytest.raises(CheckpointError, match="cannot save the session to"):
        session.save("/dev/null/here")
    session.save(tmp_path)
    path = tmp_path / "transcript.json"
    whole = path.read_text()
    for damaged in ("", "[]", whole[:-9], whole.replace('"role"', '"roll"')):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            AgentSession.load(tmp_path, engine)
    path.write_text(json.dumps(json.loads(whole) | {"format": 9}))
    with pytest.raises(CheckpointError, match="has format 9"):
        AgentSession.load(tmp_path, engine)
    path.write_text(whole)
    (tmp_path / "journal").unlink()
    with pytest.raises(CheckpointError, match="journal is missing"):
        AgentSession.load(tmp_path, engine)


async def test_turns_are_taken_in_asyncio(engine: Engine) -> None:
    session = AgentSession(engine)
    first = await session.aturn(Message("user", "Hello."), sampling=sampled(1, 8))
    assert session.messages[1].content == first.message.content
    again = await session.aregenerate()
    assert len(session.messages) == 2
    assert session.messages[1].turn == again.stats.turn != first.stats.turn
    chunks = [chunk async for chunk in session.astream(Message("user", "And?"))]
    assert chunks[-1].generation is not None
    assert [message.role for message in session.messages] == ["user", "assistant"] * 2


async def test_a_turn_of_asyncio_that_is_left_changes_nothing(engine: Engine) -> None:
    session = AgentSession(engine)
    stream = session.astream(Message("user", "Hello."), sampling=sampled(1, 2000))
    await anext(stream)
    await stream.aclose()
    assert session.messages == []
    with pytest.raises(RequestError, match="no call waits for a result"):
        await session.afeed("12 passed")


async def test_a_tool_is_read_in_asyncio_while_it_prints(engine: Engine) -> None:
    session = calling(engine, "feed me here")
    printed = "".join(f"    line {number}: y = {number}\n" for number in range(12))
    await session.afeed(printed)
    turn = await session.aturn(result(session, printed), sampling=sampled(1, 20))
    assert turn.stats.fed_tokens > 0


def test_a_session_is_pinned_and_let_go(engine: Engine) -> None:
    session = AgentSession(engine, tenant="pins")
    with pytest.raises(SessionError, match="no session has the id or name"):
        session.pin()
    turn = session.turn(Message("user", "Hello."), sampling=sampled(1, 8))

    def pinned() -> list[str]:
        return [stored.session_id for stored in engine.sessions("pins") if stored.is_pinned]

    session.pin()
    assert pinned() == [turn.stats.session_id]
    session.pin(False)
    assert pinned() == []
    with pytest.raises(ConfigurationError, match="is no Engine; pin a server's session with"):
        AgentSession(ScriptedEngine([])).pin()
