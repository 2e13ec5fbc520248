"""Sessions by name, and prompts without a template, as a server asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.session_tasks import (
    Decoded,
    Detokenize,
    SessionAction,
    SessionCommand,
    SessionReply,
    TokenIds,
    Tokenize,
)
from dlite_agent.errors import SessionBusyError, SessionError, SessionNotFoundError
from tests.tiny_checkpoint import control_id, write_checkpoint

PAGE_BYTES = 256 * 2 * 2 * 2 * 16 * 8
HI = ChatRequest((Message("user", "Hi."),), sampling=SamplingParams(max_tokens=8, seed=1))
ENDLESS = SamplingParams(
    seed=2, logit_bias={control_id("<|im_end|>"): -100, control_id("<|endoftext|>"): -100}
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=65_536)
    config = EngineConfig(str(folder), dtype="float64", max_kv_bytes=64 * PAGE_BYTES, idle=False)
    with Engine(config) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _forget(engine: Engine) -> Iterator[None]:
    yield
    engine.purge()


def command(engine: Engine, action: SessionAction, name: str, new_name: str = "") -> SessionReply:
    return engine.ask(SessionCommand(action, name, new_name=new_name), SessionReply)


def test_a_fork_goes_its_own_way_under_its_own_name(engine: Engine) -> None:
    first = engine.generate(ChatRequest(HI.messages, sampling=HI.sampling, session_hint="a"))
    fork = command(engine, "fork", "a", "b").session_id
    assert fork != first.stats.session_id
    held = command(engine, "find", "b")
    assert held == SessionReply(fork, (*first.prompt_token_ids, *first.token_ids))
    assert command(engine, "find", first.stats.session_id).token_ids == held.token_ids
    command(engine, "delete", "b")
    with pytest.raises(SessionNotFoundError, match="'b'"):
        command(engine, "find", "b")
    assert command(engine, "find", "a").token_ids == held.token_ids


def test_a_pinned_session_is_not_evicted(engine: Engine) -> None:
    for name in ("kept", "other"):
        messages = (Message("user", name * 400),)
        engine.generate(ChatRequest(messages, sampling=HI.sampling, session_hint=name))
    command(engine, "pin", "kept")
    assert [s.is_pinned for s in engine.sessions()] == [True, False]
    for number in range(10):  # 80 pages of 64
        messages = (Message("user", f"{number} " + "y" * 2000),)
        engine.generate(ChatRequest(messages, sampling=SamplingParams(max_tokens=2)))
    assert command(engine, "find", "kept").token_ids
    with pytest.raises(SessionNotFoundError):
        command(engine, "find", "other")
    command(engine, "unpin", "kept")


def test_what_runs_is_neither_forked_nor_deleted(engine: Engine) -> None:
    request = ChatRequest(HI.messages, sampling=ENDLESS, session_hint="busy")
    turn = engine.stream(request)
    next(turn)
    (session,) = engine.sessions()
    for action in ("fork", "delete"):
        with pytest.raises(SessionBusyError, match="runs a turn"):
            command(engine, action, session.session_id)
    turn.close()  # type: ignore[attr-defined]


def test_a_session_is_not_saved_without_a_folder(engine: Engine) -> None:
    engine.generate(ChatRequest(HI.messages, sampling=HI.sampling, session_hint="a"))
    with pytest.raises(SessionError, match="kv_disk is 'off'"):
        command(engine, "save", "a")


def test_raw_ids_are_continued_as_the_chat_they_came_from(engine: Engine) -> None:
    ids = engine.ask(Tokenize(HI), TokenIds).token_ids
    raw = engine.generate(ChatRequest((), prompt=ids, sampling=HI.sampling))
    said = engine.generate(HI)
    assert said.prompt_token_ids == raw.prompt_token_ids == ids
    assert said.token_ids == raw.token_ids
    assert said.stats.cached_tokens == len(ids) - 1
    text = engine.ask(Detokenize(ids), Decoded).text
    again = engine.generate(ChatRequest((), prompt=text, sampling=HI.sampling))
    assert again.token_ids == raw.token_ids
    assert again.message.content == raw.message.content


def test_ids_of_a_request_are_those_of_its_turn_also_where_tools_change_places(
    engine: Engine,
) -> None:
    tools = tuple(ToolSpec(name, parameters={"type": "object"}) for name in ("read", "test"))
    engine.generate(replace(HI, tools=tools))
    turned = replace(HI, tools=tools[::-1])
    ids = engine.ask(Tokenize(turned), TokenIds).token_ids
    assert ids == engine.generate(turned).prompt_token_ids


def test_a_partial_raw_prompt_is_prefilled(engine: Engine) -> None:
    ids = engine.ask(Tokenize(HI), TokenIds).token_ids
    assert list(engine.stream(ChatRequest((), prompt=ids, is_partial=True))) == []
    assert engine.generate(HI).stats.cached_tokens == len(ids) - 1


def test_a_small_request_for_one_token_leaves_no_session(engine: Engine) -> None:
    probe = ChatRequest(HI.messages, sampling=SamplingParams(max_tokens=1))
    assert engine.generate(probe).finish_reason == "length"
    assert engine.sessions() == ()
    said = engine.generate(HI)
    assert engine.generate(probe).stats.cached_tokens  # of a session that has had a turn
    assert [s.session_id for s in engine.sessions()] == [said.stats.session_id]
