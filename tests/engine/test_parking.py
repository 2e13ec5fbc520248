"""A stream that nobody reads keeps its session from nobody, and loses nothing."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from dataclasses import replace

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.submission import ReaderWatch
from dlite_agent.errors import ConfigurationError, SessionBusyError
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import sampled
from tests.tiny_checkpoint import control_id, write_checkpoint

MINUTES = 100_000  # tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=2**17)
    return EngineConfig(
        str(folder),
        dtype="float64",
        drafter="null",
        max_kv_bytes=2**28,
        on_conflict="error",
        park_after_s=0.0,
    )


def endless(max_tokens: int) -> ChatRequest:
    sampling = replace(sampled(1, max_tokens), logit_bias={control_id("<|im_end|>"): -100})
    return ChatRequest((Message("user", "Count."),), sampling=sampling, session_hint="thread")


def wait_for_state(engine: Engine, state: str) -> str:
    """The id of the session that is in it, sooner or later."""
    while True:
        for session in engine.sessions():
            if session.state == state:
                return session.session_id


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_who_names_the_session_of_a_parked_stream_gets_a_fork(
    config: EngineConfig, isolation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(replace(config, isolation=isolation)) as engine, caplog.at_level(logging.INFO):  # type: ignore[arg-type]
        named = engine.generate(endless(3)).stats.session_id
        with closing(engine.stream(endless(MINUTES))) as stream:
            next(stream)
            parked = wait_for_state(engine, "parked")
            assert parked == named
            second = engine.generate(endless(5))
            assert second.stats.session_id != parked
            assert second.stats.cached_tokens == second.stats.prompt_tokens - 1
            assert next(stream).generation is None, "it still runs"
        wait_for_state(engine, "idle")
    lines = [r.getMessage() for r in caplog.records if r.name == "dlite_agent.engine.turn"]
    assert sum(line.startswith(f"parked session={parked}") for line in lines) == 1


def test_a_stream_that_is_not_parked_keeps_its_session(config: EngineConfig) -> None:
    with Engine(replace(config, park_after_s=3600.0)) as engine:
        named = engine.generate(endless(3)).stats.session_id
        with closing(engine.stream(endless(MINUTES))) as stream:
            next(stream)
            assert wait_for_state(engine, "running") == named
            with pytest.raises(SessionBusyError):
                engine.generate(endless(5))


def read_sync(engine: Engine, request: ChatRequest, other: ChatRequest) -> Generation | None:
    stream: Iterator[GenerationChunk] = engine.stream(request)
    chunks = [next(stream)]
    engine.generate(other)  # one turn at a time: the one before has ended then
    chunks += stream
    return chunks[-1].generation


async def read_async(engine: Engine, request: ChatRequest, other: ChatRequest) -> Generation | None:
    stream: AsyncIterator[GenerationChunk]
    async with aclosing(engine.astream(request)) as stream:
        chunks = [await anext(stream)]
        await engine.agenerate(other)
        chunks += [chunk async for chunk in stream]
    return chunks[-1].generation


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_who_reads_on_gets_the_whole_answer_and_is_told(
    config: EngineConfig, way: str
) -> None:
    request = endless(30)
    other = ChatRequest((Message("user", "Something else."),), sampling=sampled(2, 3))
    with Engine(replace(config, max_batch=1)) as engine:
        if way == "sync":
            late = read_sync(engine, request, other)
        else:
            late = await read_async(engine, request, other)
        assert late is not None
        assert any("parked" in note for note in late.stats.notes)
        (session,) = (s for s in engine.sessions() if s.session_id == late.stats.session_id)
        assert session.state == "idle"
    with Engine(replace(config, park_after_s=3600.0)) as engine:
        at_once = engine.generate(request)
    assert at_once.token_ids == late.token_ids
    assert not any("parked" in note for note in at_once.stats.notes)


def test_a_reader_is_away_when_an_event_has_waited_for_the_limit() -> None:
    watch = ReaderWatch(0.0)
    assert [watch.note_event() for _ in range(3)] == [False, True, True]
    for _ in range(3):
        watch.note_read()
    assert not watch.note_event(), "the reader has caught up"
    patient = ReaderWatch(3600.0)
    assert not any(patient.note_event() for _ in range(100))


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), "soon", None])
def test_seconds_that_are_none_are_refused(seconds: object) -> None:
    with pytest.raises(ConfigurationError, match="park_after_s"):
        EngineConfig(park_after_s=seconds)  # type: ignore[arg-type]
