from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.engine.tasks import Progress, Service
from dlite_agent.errors import CapacityError, ConfigurationError, ModelNotFoundError
from dlite_agent.outputs import GenerationChunk
from tests.conversations import Agent, sampled
from tests.tiny_checkpoint import write_checkpoint

LONG = SamplingParams(temperature=0.0, max_tokens=3000, stop_token_ids=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float64", max_kv_bytes=32 * 2**20, prefill_chunk=32
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def load_endless(config: EngineConfig, progress: Progress) -> Service:
    """A model that never stops by itself."""
    service = load_service(config, progress)
    service.model.stop_token_ids = frozenset()
    return service


@pytest.fixture
def endless(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config, loader=load_endless) as engine:
        yield engine


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    ends = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < ends, "it never happened"
        time.sleep(0.005)


def hello(**sampling: object) -> ChatRequest:
    params = replace(sampled(1), **sampling)  # type: ignore[arg-type]
    return ChatRequest((Message("user", "hello"),), sampling=params)


def forever() -> ChatRequest:
    return ChatRequest((Message("user", "go on"),), sampling=LONG)


def test_it_is_a_chat_backend(engine: Engine) -> None:
    backend: ChatBackend = engine
    assert backend.max_context == 4096
    assert backend.model_name == engine.config.model


def test_constructing_loads_nothing(config: EngineConfig) -> None:
    before = threading.active_count()
    with Engine(config) as engine:
        assert threading.active_count() == before
        assert repr(engine).startswith("Engine(")


def test_importing_the_engine_loads_no_torch() -> None:
    code = (
        "import sys, dlite_agent.engine.engine as e; e.Engine('nano');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_reports_progress(config: EngineConfig) -> None:
    heard: list[tuple[str, float]] = []
    with Engine(config) as engine:
        info = engine.load(lambda stage, fraction: heard.append((stage, fraction)))
        assert engine.load() == info
    stages = list(dict.fromkeys(stage for stage, _ in heard))
    assert stages == ["download", "load", "tokenizer", "ready"]
    assert all(0.0 <= fraction <= 1.0 for _, fraction in heard)
    assert info.max_context == 4096
    assert info.drafter.startswith("suffix")


def test_a_progress_callback_that_fails_does_not_fail_the_load(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(stage: str, fraction: float) -> None:
        raise ValueError("no terminal")

    with Engine(config) as engine:
        engine.load(broken)
    assert "a progress callback failed" in caplog.text


def test_an_error_of_loading_reaches_every_caller() -> None:
    with Engine("/no/such/folder") as engine, ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(engine.generate, hello()) for _ in range(4)]
        errors = [future.exception() for future in futures]
        assert {type(error) for error in errors} == {ModelNotFoundError}
        for call in (engine.load, lambda: engine.max_context, engine.usage):
            with pytest.raises(ModelNotFoundError, match="/no/such/folder"):
                call()


async def test_an_error_of_loading_reaches_asyncio() -> None:
    with Engine("/no/such/folder") as engine, pytest.raises(ModelNotFoundError):
        await engine.agenerate(hello())


def test_closing_while_it_loads_ends_the_load(config: EngineConfig) -> None:
    started, go_on = threading.Event(), threading.Event()

    def load(config: EngineConfig, progress: Progress) -> Service:
        started.set()
        go_on.wait(10)
        progress("load", 0.5)
        raise AssertionError("not reached")

    engine = Engine(config, loader=load)
    engine.start()
    started.wait(10)
    closer = threading.Thread(target=engine.close)
    closer.start()
    wait_until(lambda: not engine._host.is_usable)
    go_on.set()
    closer.join(10)
    assert not closer.is_alive()
    with pytest.raises(ConfigurationError, match="closed"):
        engine.load()


def test_stream_and_generate_agree(engine: Engine) -> None:
    chunks = list(engine.stream(hello()))
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.token_ids == engine.generate(hello()).token_ids


async def test_asyncio_and_threads_agree(engine: Engine) -> None:
    chunks = [chunk async for chunk in engine.astream(hello())]
    generation = await engine.agenerate(hello())
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.token_ids == generation.token_ids
    assert generation.token_ids == (await asyncio.to_thread(engine.generate, hello())).token_ids


async def test_a_turn_does_not_block_the_event_loop(endless: Engine) -> None:
    await asyncio.to_thread(endless.load)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticker = asyncio.create_task(tick())
    request = replace(forever(), sampling=replace(LONG, max_tokens=200))
    chunks = [chunk async for chunk in endless.astream(request)]
    ticker.cancel()
    assert len(chunks) > 20
    assert ticks > 5


async def test_cancelling_a_task_cancels_its_turn(endless: Engine) -> None:
    reached = asyncio.Event()

    async def read() -> None:
        async for _ in endless.astream(forever()):
            reached.set()

    task = asyncio.create_task(read())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = (await asyncio.to_thread(endless.usage)).rows_computed
    generation = await endless.agenerate(hello(max_tokens=3))
    assert len(generation.token_ids) == 3
    assert endless.usage().rows_computed - before < 200


async def test_leaving_an_async_stream_cancels_its_turn(endless: Engine) -> None:
    stream = endless.astream(forever())
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert len((await endless.agenerate(hello(max_tokens=3))).token_ids) == 3


def test_a_loop_that_was_closed_cancels_its_turn(endless: Engine) -> None:
    async def read() -> object:
        stream = endless.astream(forever())
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(read())
    loop.close()
    assert len(endless.generate(hello(max_tokens=3)).token_ids) == 3
    del stream
    gc.collect()


def test_closing_a_stream_cancels_its_turn(endless: Engine) -> None:
    stream = endless.stream(forever())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    began = time.perf_counter()
    assert len(endless.generate(hello(max_tokens=3)).token_ids) == 3
    assert time.perf_counter() - began < 5
    assert endless.usage().rows_computed < 1000


def test_a_stream_that_is_dropped_cancels_its_turn(endless: Engine) -> None:
    stream = endless.stream(forever())
    next(stream)
    del stream
    gc.collect()
    assert len(endless.generate(hello(max_tokens=3)).token_ids) == 3


def test_a_stream_that_was_never_read_costs_nothing(endless: Engine) -> None:
    endless.load()
    stream = endless.stream(forever())
    del stream
    assert endless.usage().rows_computed == 0


def test_a_turn_can_be_cancelled_at_any_chunk_and_tried_again(engine: Engine) -> None:
    agent = Agent("cancel me")
    expected = engine.generate(agent.request())
    for count in range(len(expected.token_ids)):
        stream = engine.stream(agent.request())
        tokens: list[int] = []
        for _ in range(count):
            tokens += next(stream).token_ids
        stream.close()  # type: ignore[attr-defined]
        assert tuple(tokens) == expected.token_ids[: len(tokens)]
    again = engine.generate(agent.request())
    assert again.token_ids == expected.token_ids
    assert again.stats.prefilled_tokens == 1


def test_eight_threads_get_what_each_gets_alone(engine: Engine, config: EngineConfig) -> None:
    def converse(engine: Engine, number: int) -> list[tuple[int, ...]]:
        agent = Agent(f"repair module {number}")
        for _ in range(3):
            agent.take(engine.generate(agent.request(max_tokens=24)))
        for turn in agent.turns[1:]:
            assert turn.stats.prefilled_tokens == turn.stats.new_tokens + 1
        return [turn.token_ids for turn in agent.turns]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda number: converse(engine, number), range(8)))
    with Engine(config) as other:
        assert together == [converse(other, number) for number in range(8)]


async def test_many_tasks_are_served(engine: Engine) -> None:
    agents = [Agent(f"task {number}") for number in range(8)]
    generations = await asyncio.gather(*(engine.agenerate(a.request()) for a in agents))
    assert len({g.stats.session_id for g in generations}) == 8


async def test_twenty_requests_at_once_share_forwards(engine: Engine, config: EngineConfig) -> None:
    agents = [Agent(f"sub-agent {number}") for number in range(20)]
    generations = await asyncio.gather(*(engine.agenerate(a.request()) for a in agents[:10]))
    with ThreadPoolExecutor(10) as pool:
        generations += pool.map(lambda agent: engine.generate(agent.request()), agents[10:])
    assert sum(g.stats.batch_size for g in generations) / 20 > 2.0
    with Engine(replace(config, max_batch=1)) as other:
        for agent, generation in zip(agents, generations, strict=True):
            alone = await other.agenerate(agent.request())
            assert alone.token_ids == generation.token_ids
            assert alone.stats.batch_size == 1.0


def test_who_reads_slowly_holds_up_nobody(endless: Engine) -> None:
    request = replace(forever(), sampling=replace(LONG, max_tokens=60))
    slow = endless.stream(request)
    first = next(slow)
    for seed in range(3):
        assert len(endless.generate(hello(max_tokens=5, seed=seed)).token_ids) == 5
    rest = list(slow)
    assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) == 60
    assert rest[-1].stats is not None
    assert rest[-1].stats.total_s < 20.0, "its turn ended without being read"


def test_turns_begin_in_the_order_in_which_they_came(config: EngineConfig) -> None:
    with Engine(replace(config, max_batch=1), loader=load_endless) as engine:
        blocker = engine.stream(forever())
        next(blocker)
        done: list[int] = []

        def ask(number: int) -> None:
            engine.generate(hello(max_tokens=2, seed=number))
            done.append(number)

        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            wait_until(lambda count=number + 1: len(engine._host._jobs) == count)  # type: ignore[misc, attr-defined]
        blocker.close()  # type: ignore[attr-defined]
        for thread in threads:
            thread.join(20)
        assert done == sorted(done)


def test_a_full_queue_is_refused(config: EngineConfig) -> None:
    with Engine(replace(config, max_batch=1, max_queue=2), loader=load_endless) as engine:
        running = engine.stream(forever())
        next(running)
        waiting = [threading.Thread(target=list, args=(engine.stream(hello()),)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: len(engine._host._jobs) == 2)  # type: ignore[attr-defined]
        with pytest.raises(CapacityError, match="max_queue=2"):
            engine.generate(hello())
        running.close()  # type: ignore[attr-defined]
        for thread in waiting:
            thread.join(20)
        assert engine.generate(hello()).token_ids


def test_small_questions_do_not_wait_for_a_turn(endless: Engine) -> None:
    running = endless.stream(forever())
    next(running)
    messages = (Message("user", "how long is this?"),)
    num_tokens = endless.count_tokens(messages)
    assert endless.usage().kv_used_bytes > 0
    assert next(running).finish_reason is None
    running.close()  # type: ignore[attr-defined]
    prompt = endless.generate(ChatRequest(messages, sampling=sampled(0, 1))).prompt_token_ids
    assert prompt[num_tokens:] == prompt[-len("<assistant\n") :]


def test_an_error_of_a_turn_is_its_caller_s_alone(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool:
        bad = pool.submit(engine.generate, ChatRequest(()))
        good = pool.submit(engine.generate, hello())
        assert isinstance(bad.exception(), ValueError)
        assert good.result().token_ids


def test_close_gives_the_memory_back(config: EngineConfig) -> None:
    services: list[ModelService] = []

    def load(config: EngineConfig, progress: Progress) -> Service:
        services.append(load_service(config, progress))
        return services[-1]

    engine = Engine(config, loader=load)
    engine.generate(hello())
    pool = services[0].model.target.pool
    assert pool.used_bytes > 0
    target = weakref.ref(services[0].model.target)
    weights = weakref.ref(services[0].model.target._embedding)
    services.clear()
    engine.close()
    engine.close()
    gc.collect()
    assert pool.used_bytes == 0
    assert pool.is_closed
    assert target() is None
    assert weights() is None
    for call in (engine.load, engine.usage, lambda: engine.generate(hello())):
        with pytest.raises(ConfigurationError, match=r"is closed; create another"):
            call()


def test_an_engine_that_is_collected_closes_itself(config: EngineConfig) -> None:
    engine = Engine(config)
    engine.generate(hello())
    thread = engine._host._thread  # type: ignore[attr-defined]
    del engine
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_closing_during_turns_ends_them_all(endless: Engine) -> None:
    errors: list[BaseException] = []
    reached = threading.Event()

    def read(is_first: bool) -> None:
        try:
            for _ in endless.stream(forever()):
                reached.set()
        except ConfigurationError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(i == 0,)) for i in range(3)]
    for thread in threads:
        thread.start()
    reached.wait(20)
    endless.close()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3


def test_closing_from_a_reader_s_own_turn_does_not_deadlock(endless: Engine) -> None:
    stream = endless.stream(forever())
    next(stream)
    endless.close()
    with pytest.raises(ConfigurationError, match="closed"):
        for _ in stream:
            pass


def test_shared_engines_are_one_per_configuration(config: EngineConfig) -> None:
    try:
        engine = Engine.shared(config)
        assert Engine.shared(replace(config)) is engine
        assert Engine.shared(replace(config, drafter="null")) is not engine
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda _: id(Engine.shared(config)), range(32))) == {id(engine)}
        engine.close()
        again = Engine.shared(config)
        assert again is not engine
        assert again.generate(hello()).token_ids
    finally:
        Engine.close_all()
    with pytest.raises(ConfigurationError, match="closed"):
        again.load()


def test_a_shared_engine_that_failed_to_load_is_replaced(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "model"), max_kv_bytes=2**20)
    try:
        with pytest.raises(ModelNotFoundError):
            Engine.shared(config).load()
        write_checkpoint(tmp_path / "model")
        assert Engine.shared(config).load().dtype == "float32"
    finally:
        Engine.close_all()


def test_ctrl_c_leaves_the_engine_usable_and_a_program_may_end_in_a_turn(folder: Path) -> None:
    code = f"""
import os, signal, threading
from dlite_agent.engine.engine import Engine
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
engine = Engine.shared(EngineConfig(model={str(folder)!r}, max_kv_bytes=2**24))
engine.load()
request = ChatRequest((Message("user", "x"),), sampling=SamplingParams(1.0, seed=0))
answer = engine.generate(request).token_ids
for attempt in range(3):
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            engine.generate(request)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
assert engine.generate(request).token_ids == answer
stream = engine.stream(request)
next(stream)
raise SystemExit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "interrupted\n" * 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_engine_does_not_survive_a_fork(config: EngineConfig) -> None:
    shared = Engine.shared(config)
    try:
        shared.generate(hello())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert Engine.shared(config) is not shared
                shared.close()
                shared.generate(hello())
            except ConfigurationError as error:
                code = 0 if "after the fork" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert shared.generate(hello()).token_ids
    finally:
        Engine.close_all()


def test_a_host_s_spinning_thread_is_noticed_once(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    with Engine(config) as engine:
        engine.load()
        spinner = threading.Thread(target=spin)
        spinner.start()
        try:
            turns = []
            for seed in range(200):
                turns.append(engine.generate(hello(seed=seed, max_tokens=100)).stats)
                if any("isolation" in note for note in turns[-1].notes):
                    break
            more = [engine.generate(hello(seed=seed)).stats for seed in range(3)]
        finally:
            stop.set()
            spinner.join()
    assert 'isolation="process"' in turns[-1].notes[-1]
    assert not any("isolation" in note for stats in more for note in stats.notes)
    assert caplog.text.count('isolation="process"') == 1


def test_without_contention_nothing_is_said(engine: Engine) -> None:
    for seed in range(40):
        notes = engine.generate(hello(seed=seed, max_tokens=60)).stats.notes
        assert not any("isolation" in note for note in notes)


def test_chunks_are_chunks(engine: Engine) -> None:
    assert all(isinstance(chunk, GenerationChunk) for chunk in engine.stream(hello()))
