"""What is computed between turns: the next prompt where it is not simply what was sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.service import ModelService
from dlite_agent.outputs import Generation
from tests.clients import Client
from tests.conversations import sampled
from tests.engine.loader import loader
from tests.tiny_checkpoint import write_checkpoint

Load = Callable[..., ModelService]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    with loader(folder, drafter="null") as load:
        yield load


def generate(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


def talk(service: ModelService) -> tuple[ChatRequest, Generation]:
    """A conversation whose last turn is an answer without a call, as a person reads it."""
    messages: tuple[Message, ...] = (Message("system", "Talk."), Message("user", "Hello there."))
    for seed in range(50):
        request = ChatRequest(
            messages,
            sampling=sampled(seed, 40),
            template_kwargs={"enable_thinking": False},
        )
        turn = generate(service, request)
        messages = (*messages, turn.message)
        if not turn.message.tool_calls:
            return request, turn
        messages = (*messages, Message("tool", "done", tool_call_id=turn.message.tool_calls[0].id))
    raise AssertionError("it never stops calling")


def following(request: ChatRequest, turn: Generation, text: str = "Go on.") -> ChatRequest:
    return replace(request, messages=(*request.messages, turn.message, Message("user", text)))


def rest(service: ModelService) -> int:
    """Let it be idle for as long as there is something to do; returns the rows computed."""
    before = service.model.target.rows_computed
    while service.is_idle_work_left:
        service.idle_step()
    return service.model.target.rows_computed - before


@pytest.mark.parametrize("history", ["auto", "template"])
def test_a_prompt_that_the_template_changes_costs_nothing_after_idle_time(
    load: Load, history: Any
) -> None:
    service = load(history=history)
    request, turn = talk(service)
    num_sessions = len(service.model.sessions)
    rows = rest(service)
    assert rows > 0
    assert len(service.model.sessions) == num_sessions + 1
    stats = generate(service, following(request, turn)).stats
    assert stats.prefilled_tokens <= stats.new_tokens + 1, "A = 1.00 on the critical path"
    assert stats.idle_prefilled_tokens == rows
    assert stats.miss is None or not stats.miss.tokens


def test_without_idle_time_the_next_turn_pays(load: Load) -> None:
    service = load(idle=False)
    request, turn = talk(service)
    assert not service.is_idle_work_left
    stats = generate(service, following(request, turn)).stats
    assert stats.prefilled_tokens > stats.new_tokens + 1
    assert stats.idle_prefilled_tokens == 0
    assert stats.miss is not None
    assert stats.miss.cause == "thoughts_stripped"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_request_that_comes_meanwhile_uses_what_was_built(load: Load, num_steps: int) -> None:
    service = load()
    request, turn = talk(service)
    service._idle._chunk_rows = 8
    before = service.model.target.rows_computed
    for _ in range(num_steps):
        service.idle_step()
    built = service.model.target.rows_computed - before
    assert (built > 0) == (num_steps > 1)
    stats = generate(service, following(request, turn)).stats
    assert stats.idle_prefilled_tokens == built
    assert stats.prefilled_tokens + built >= stats.new_tokens
    for info in service.model.sessions.sessions():
        assert not info.is_busy
        service.model.sessions.get(info.session_id).check_invariants()


def test_a_request_that_goes_on_otherwise_drops_it(load: Load) -> None:
    service = load()
    request, turn = talk(service)
    rest(service)
    num_sessions = len(service.model.sessions)
    kept = replace(following(request, turn), history="as_generated")
    stats = generate(service, kept).stats
    assert stats.prefilled_tokens == stats.new_tokens + 1
    assert stats.idle_prefilled_tokens == 0
    assert len(service.model.sessions) == num_sessions - 1


def test_nothing_is_evicted_for_it(load: Load) -> None:
    service = load()
    request, turn = talk(service)
    pool = service.model.target.pool
    hoard = []
    while pool.free_bytes:
        hoard.append(pool.new_cache())
        hoard[-1].reserve(1)
    assert rest(service) == 0
    for cache in hoard:
        cache.release()
    assert generate(service, following(request, turn)).stats.prefilled_tokens > 0


def test_while_a_tool_runs_the_processor_is_the_tools(load: Load) -> None:
    service = load(history="template")
    client = Client("call something")
    while not client.turns or not client.turns[-1].message.tool_calls:
        client.take(generate(service, client.request()))
        client.turns[-1].message.tool_calls or rest(service)
    assert not service.is_idle_work_left


def test_a_failure_is_nobodys(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    service = load()
    request, turn = talk(service)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("told to fail")

    with monkeypatch.context() as patch:
        patch.setattr(type(service.model.target), "forward", fail)
        assert rest(service) == 0
    assert generate(service, following(request, turn)).stats.idle_prefilled_tokens == 0


def test_an_engine_works_while_nobody_asks(folder: Path) -> None:
    config = EngineConfig(model=str(folder), drafter="null", dtype="float64")
    with Engine(config) as engine:
        messages: tuple[Message, ...] = (Message("user", "Hello there."),)
        request = ChatRequest(messages, template_kwargs={"enable_thinking": False})
        for seed in range(50):
            turn = engine.generate(replace(request, sampling=sampled(seed, 40)))
            if not turn.message.tool_calls:
                break
        deadline = time.perf_counter() + 60.0
        while engine.usage().num_sessions < 2:  # the answer's, and the fork
            assert time.perf_counter() < deadline
        stats = engine.generate(following(replace(request, sampling=sampled(0, 8)), turn)).stats
        assert stats.prefilled_tokens <= stats.new_tokens + 1
