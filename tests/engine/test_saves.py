"""Saves that take long: turns go on, and what is written is what was there at the call."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.agent_session import AgentSession
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.service import ModelService
from dlite_agent.engine.session_tasks import SaveConversation
from dlite_agent.engine.tasks import Count, Event, Finished, Later
from dlite_agent.outputs import Generation
from dlite_agent.sessions.manifest import read_manifest
from tests.conversations import Agent, sampled

WAIT_S = 60.0  # for what comes at once, or not at all


class Gate:
    """Holds the first write of a save until it is opened."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread().name == "dlite saves":
            self.is_reached.set()
            assert self.is_open.wait(WAIT_S)
        _fsync(descriptor)


_fsync = os.fsync


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(os, "fsync", gate.fsync)
    yield gate
    gate.is_open.set()


def test_turns_go_on_while_a_conversation_is_written(
    folder: Path, tmp_path: Path, gate: Gate
) -> None:
    config = EngineConfig(str(folder), dtype="float64", drafter="null", max_kv_bytes=2**25)
    first, second = Agent("mend it" * 60, hint="first"), Agent("build it", hint="second")
    with Engine(config) as engine, ThreadPoolExecutor() as pool:
        session = AgentSession(engine, "first")
        opening = first.request()
        session._request = replace(session._request, tools=opening.tools)
        turn = session.turn(*opening.messages, sampling=opening.sampling)
        saved = pool.submit(session.save, tmp_path)
        assert gate.is_reached.wait(WAIT_S)
        second.take(engine.generate(second.request()))
        first.take(turn)
        later = engine.generate(first.request())
        assert later.stats.session_id == turn.stats.session_id, "on the very session"
        assert later.stats.cached_tokens >= turn.stats.prompt_tokens
        assert not saved.done()
        gate.is_open.set()
        num_rows = turn.stats.prompt_tokens + turn.stats.completion_tokens - 1
        assert saved.result(WAIT_S) == num_rows
        for kept in engine.sessions():
            assert kept.state == "idle"
        engine.purge()
        assert engine.usage().kv_used_bytes == 0, "the save's pages came back"
    with Engine(config) as engine:
        session = AgentSession.load(tmp_path, engine)
        said = replace(
            first.messages[-1],
            tool_call_id=session.messages[-1].tool_calls[0].id
            if session.messages[-1].tool_calls
            else None,
        )
        again = session.turn(said, sampling=sampled(1))
        assert again.stats.origin == "restored"
        assert again.prompt_token_ids == later.prompt_token_ids
        assert again.token_ids == later.token_ids


def take(service: ModelService, agent: Agent) -> Generation:
    *_, last = service.run(agent.request(), time.perf_counter(), lambda: False)
    assert last.generation is not None
    agent.take(last.generation)
    return last.generation


def test_a_turn_that_needs_the_memory_of_a_save_waits_for_it(
    load: Callable[..., ModelService], tmp_path: Path, gate: Gate
) -> None:
    service = load(max_kv_bytes=4 * 2**18)  # four pages
    sessions = service.model.sessions
    first = Agent("mend it" * 40, hint="first")
    turn = take(service, first)
    assert service.model.target.pool.used_bytes == 3 * 2**18
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    task = SaveConversation(first.request(), turn.stats.session_id, str(tmp_path))
    answer = service.answer(task)
    assert isinstance(answer, Later)
    answer.begin(events.put)
    assert gate.is_reached.wait(WAIT_S)
    reclaim = sessions.on_shortage
    assert reclaim is not None

    def opens_the_gate() -> bool:
        gate.is_open.set()
        assert reclaim is not None
        return reclaim()

    sessions.on_shortage = opens_the_gate
    take(service, Agent("build it" * 40))
    assert events.get_nowait() == Count(turn.stats.prompt_tokens + turn.stats.completion_tokens - 1)
    assert events.get_nowait() == Finished()
    saved = (*turn.prompt_token_ids, *turn.token_ids)
    assert tuple(read_manifest(tmp_path).token_ids) == saved, "what was there at the call"


def test_an_engine_that_is_closed_finishes_its_saves(
    folder: Path, tmp_path: Path, gate: Gate
) -> None:
    config = EngineConfig(str(folder), dtype="float64", drafter="null", max_kv_bytes=2**25)
    with ThreadPoolExecutor() as pool:
        with Engine(config) as engine:
            session = AgentSession(engine)
            session.turn(*Agent("mend it").messages, sampling=sampled(0, 5))
            saved = pool.submit(session.save, tmp_path)
            assert gate.is_reached.wait(WAIT_S)
            closed = pool.submit(engine.close)
            gate.is_open.set()
            closed.result(WAIT_S)
        assert saved.result(WAIT_S) > 0
    assert (tmp_path / "manifest.json").exists()
