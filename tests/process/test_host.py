from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
    ContextLengthExceededError,
    ModelNotFoundError,
    UnsupportedParameterError,
)
from tests.conversations import Agent, sampled
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)
    return EngineConfig(
        model=str(folder),
        dtype="float64",
        max_kv_bytes=32 * 2**20,
        isolation="process",
        threads=1,
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def child_pid(engine: Engine) -> int:
    return engine._host._child._process.pid  # type: ignore[attr-defined, no-any-return]


def forever() -> ChatRequest:
    """Greedy, and the model that the tests use repeats itself long enough."""
    params = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=0, max_tokens=3000)
    return ChatRequest((Message("user", "go on"),), sampling=params)


def test_it_answers_as_the_engine_in_a_thread(engine: Engine, config: EngineConfig) -> None:
    agents = Agent("fix it"), Agent("fix it")
    with Engine(replace(config, isolation="thread", threads=None)) as other:
        assert engine.load().max_context == other.load().max_context
        for _ in range(3):
            for agent, backend in zip(agents, (engine, other), strict=True):
                agent.take(backend.generate(agent.request()))
    ours, theirs = agents
    assert [t.token_ids for t in ours.turns] == [t.token_ids for t in theirs.turns]
    for turn in ours.turns[1:]:
        assert turn.stats.prefilled_tokens == turn.stats.new_tokens + 1
    messages = tuple(ours.messages)
    assert engine.count_tokens(messages) > 100
    assert engine.usage().num_sessions == 1


async def test_asyncio_reads_from_it(engine: Engine) -> None:
    request = Agent("in asyncio").request()
    chunks = [chunk async for chunk in engine.astream(request)]
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.token_ids == (await engine.agenerate(request)).token_ids


def test_errors_keep_their_class_and_advice(engine: Engine) -> None:
    long = ChatRequest((Message("user", "x"),), sampling=SamplingParams(max_tokens=10_000))
    with pytest.raises(ContextLengthExceededError, match="longer context") as caught:
        engine.generate(long)
    assert caught.value.limit == 4096
    unknown = SamplingParams(stop_token_ids=(10**6,))
    with pytest.raises(UnsupportedParameterError, match="stop_token_ids"):
        engine.generate(ChatRequest((Message("user", "x"),), sampling=unknown))


async def test_concurrent_turns_share_forwards_in_the_child(
    engine: Engine, config: EngineConfig
) -> None:
    agents = [Agent(f"task {number} of many") for number in range(8)]
    together = await asyncio.gather(*(engine.agenerate(agent.request()) for agent in agents))
    assert max(generation.stats.batch_size for generation in together) > 1.5
    with Engine(replace(config, isolation="thread", threads=None)) as other:
        for agent, generation in zip(agents, together, strict=True):
            alone = await asyncio.to_thread(other.generate, agent.request())
            assert alone.token_ids == generation.token_ids
            assert alone.stats.batch_size == 1.0


def test_closing_a_stream_cancels_the_turn_in_the_child(engine: Engine) -> None:
    rows = engine.usage().rows_computed
    stream = engine.stream(forever())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    began = time.perf_counter()
    params = replace(sampled(0), max_tokens=2)
    assert engine.generate(ChatRequest((Message("user", "x"),), sampling=params)).token_ids
    assert time.perf_counter() - began < 10
    assert engine.usage().rows_computed - rows < 2500


def test_a_child_that_dies_fails_its_turns_and_is_replaced(config: EngineConfig) -> None:
    heard: list[str] = []
    with Engine(config) as engine:
        request = Agent("fix it").request()
        engine.load(lambda stage, fraction: heard.append(stage))
        assert list(dict.fromkeys(heard)) == ["download", "load", "tokenizer", "ready"]
        expected = engine.generate(request).token_ids
        first = child_pid(engine)
        os.kill(first, signal.SIGSTOP)  # so that the turn is surely unfinished
        errors: list[BaseException] = []

        def read() -> None:
            try:
                engine.generate(request)
            except CapacityError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        thread.join(20)
        assert "exit code -9" in str(errors[0])
        assert errors[0].retryable  # type: ignore[attr-defined]
        assert engine.generate(request).token_ids == expected
        second = child_pid(engine)
        assert second != first
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(ConfigurationError, match="closed"):
        engine.generate(request)


def test_errors_of_loading_come_through(config: EngineConfig) -> None:
    with Engine(replace(config, model="/no/such/folder")) as engine:
        for _ in range(2):
            with pytest.raises(ModelNotFoundError, match="/no/such/folder"):
                engine.load()
        with pytest.raises(ModelNotFoundError):
            engine.generate(forever())
        assert not engine._host.is_usable


def test_the_line_of_a_turn_reaches_the_host_s_log(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="dlite_agent"):
        engine.generate(Agent("log it").request())
    lines = [r.getMessage() for r in caplog.records if r.name == "dlite_agent.engine.turn"]
    assert len(lines) == 1
    assert lines[0].startswith("turn session=")


def test_a_child_that_dies_while_it_loads_is_a_configuration_error(config: EngineConfig) -> None:
    with Engine(config) as engine:
        engine.start()
        os.kill(child_pid(engine), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="that loads"):
                engine.load()


def test_closing_while_it_loads_is_quick(config: EngineConfig) -> None:
    engine = Engine(config)
    engine.start()
    pid = child_pid(engine)
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_script_needs_no_main_guard_and_the_child_ends_with_it(
    config: EngineConfig, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    code = f"""
import os, signal
from dlite_agent.engine.engine import Engine
from dlite_agent.config import EngineConfig
engine = Engine(EngineConfig(model={config.model!r}, max_kv_bytes=2**24, isolation="process"))
engine.load()
print(engine._host._child._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    pid = int(done.stdout)
    ends = time.perf_counter() + 20
    while Path(f"/proc/{pid}").exists() and time.perf_counter() < ends:
        if "(zombie)" in Path(f"/proc/{pid}/status").read_text(encoding="ascii"):
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.soak  # it is timed, so it wants both cores for itself
def test_a_spinning_host_does_not_slow_it_down(engine: Engine) -> None:
    def tokens_per_second() -> float:
        stats = [
            engine.generate(replace(Agent("race").request(), sampling=sampled(seed, 100))).stats
            for seed in range(8)
        ]
        return sum(s.completion_tokens for s in stats) / sum(s.decode_s for s in stats)

    tokens_per_second()
    before = tokens_per_second()
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        during = tokens_per_second()
    finally:
        stop.set()
        spinner.join()
    # Two cores: the host has its own. One core is shared by both, whatever we do.
    cores = len(os.sched_getaffinity(0))
    assert during > before / (1.5 if cores > 1 else 4)


def test_a_request_that_cannot_cross_is_refused(engine: Engine) -> None:
    request = ChatRequest((Message("user", "x"),), template_kwargs={"x": lambda: None})  # type: ignore[dict-item]
    with pytest.raises(Exception, match="pickle"):
        engine.generate(request)
    assert engine.generate(Agent("still here").request(max_tokens=2)).token_ids


async def test_a_closed_engine_says_so(config: EngineConfig) -> None:
    engine = Engine(config)
    await asyncio.to_thread(engine.close)
    with pytest.raises(ConfigurationError, match="closed"):
        await engine.agenerate(forever())


def test_a_loader_cannot_cross_the_border(config: EngineConfig) -> None:
    with pytest.raises(ConfigurationError, match="isolation"):
        Engine(config, loader=lambda config, progress: None)  # type: ignore[arg-type, return-value]
