"""The worker thread alone, with a service that counts instead of computing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.engine.tasks import (
    Count,
    CountTokens,
    EngineInfo,
    Event,
    Failure,
    Finished,
    Inspect,
    Progress,
    Question,
    Sink,
    Ticket,
)
from dlite_agent.engine.worker import Worker, close_dropped
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.outputs import GenerationChunk

INFO = EngineInfo("counting", 10, "null", "float32", "cpu", 1, 0.0)


class CountingService:
    """Its turns take one step for each permission, until they are stopped or have `max_tokens`."""

    info = INFO

    def __init__(self, max_turns: int = 1) -> None:
        self.permissions = threading.Semaphore(0)
        self.additions = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.num_steps = 0
        self.is_closed = False
        self.turns: list[tuple[ChatRequest, Ticket, int]] = []
        self._max_turns = max_turns

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def num_free(self) -> int:
        return self._max_turns - len(self.turns)

    @property
    def is_idle_work_left(self) -> bool:
        return False

    def idle_step(self) -> None:
        raise AssertionError("there is none")

    def answer(self, question: Question) -> Count:
        self.thread = threading.current_thread()
        return Count(self.num_steps)

    def add(self, request: ChatRequest, ticket: Ticket) -> None:
        self.turns.append((request, ticket, 0))
        self.additions.release()

    def step(self) -> None:
        if not self.permissions.acquire(timeout=0.01) and not self._is_any_over():
            return
        turns, self.turns = self.turns, []
        for request, ticket, step in turns:
            if ticket.is_cancelled:
                ticket.put(Finished())
            elif step == (request.sampling.max_tokens or 10**9):
                ticket.put(GenerationChunk(finish_reason="stop"))
                ticket.put(Finished())
            else:
                self.num_steps += 1
                ticket.put(GenerationChunk(token_ids=(step,)))
                self.turns.append((request, ticket, step + 1))

    def _is_any_over(self) -> bool:
        return any(
            ticket.is_cancelled or step == request.sampling.max_tokens
            for request, ticket, step in self.turns
        )

    def close(self, error: BaseException) -> None:
        for _, ticket, _ in self.turns:
            ticket.put(Failure(error))
        self.is_closed = True


@pytest.fixture
def service() -> CountingService:
    return CountingService()


@pytest.fixture
def worker(service: CountingService) -> Iterator[Worker]:
    worker = Worker(lambda progress: service, name="counting", max_queue=2)
    yield worker
    worker.close()


def turn(**changes: object) -> ChatRequest:
    return ChatRequest((Message("user", "count"),), **changes)  # type: ignore[arg-type]


class Reader:
    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=60)


def test_nothing_starts_before_it_is_needed(worker: Worker, service: CountingService) -> None:
    assert worker.is_usable
    assert threading.active_count() == threading.active_count()
    assert worker._thread is None
    assert worker.wait_ready() == INFO
    assert worker._thread is not None


def test_the_service_is_used_by_one_thread(worker: Worker, service: CountingService) -> None:
    reader = Reader()
    worker.submit(Inspect(), reader)
    assert reader.next() == Count(0)
    assert reader.next() == Finished()
    assert service.thread is worker._thread


def test_a_cancelled_turn_ends_within_one_step(worker: Worker, service: CountingService) -> None:
    reader = Reader()
    cancel = worker.submit(turn(), reader)
    service.permissions.release()
    assert reader.next() == GenerationChunk(token_ids=(0,))
    cancel()
    service.permissions.release(100)
    assert reader.next() == Finished()
    assert service.num_steps <= 2


def test_a_task_that_is_cancelled_while_it_waits_is_never_run(
    worker: Worker, service: CountingService
) -> None:
    first, second = Reader(), Reader()
    stop_first = worker.submit(turn(), first)
    service.permissions.release()
    first.next()
    worker.submit(turn(), second)()
    stop_first()
    third = Reader()
    worker.submit(CountTokens(()), third)
    assert third.next() == Count(1)
    assert second.events.empty()


def test_cancelled_tasks_do_not_fill_the_queue(worker: Worker, service: CountingService) -> None:
    reader = Reader()
    worker.submit(turn(), reader)
    service.permissions.release()
    reader.next()
    for _ in range(10):
        worker.submit(turn(), Reader())()
    worker.submit(turn(), Reader())
    worker.submit(turn(), Reader())
    with pytest.raises(CapacityError, match="2 requests wait"):
        worker.submit(turn(), Reader())


def test_a_question_is_answered_between_two_steps(worker: Worker, service: CountingService) -> None:
    reader, asker = Reader(), Reader()
    worker.submit(turn(), reader)
    service.permissions.release()
    reader.next()
    worker.submit(Inspect(), asker)
    assert asker.next() == Count(1)
    assert reader.events.empty()


def test_an_error_belongs_to_its_task(
    worker: Worker, service: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(question: Question) -> Count:
        raise ValueError("no such thing")

    reader, other = Reader(), Reader()
    with monkeypatch.context() as patch:
        patch.setattr(service, "answer", answer)
        worker.submit(Inspect(), reader)
        failure = reader.next()
    assert isinstance(failure, Failure)
    assert "no such thing" in str(failure.error)
    worker.submit(Inspect(), other)
    assert other.next() == Count(0)


class Panic(BaseException):
    """What a panic of a Rust extension (tokenizers, safetensors) is: no `Exception`."""


def test_a_panic_of_an_extension_is_its_tasks_error_too(
    worker: Worker, service: CountingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(question: Question) -> Count:
        raise Panic("index out of bounds")

    reader, other = Reader(), Reader()
    with monkeypatch.context() as patch:
        patch.setattr(service, "answer", answer)
        worker.submit(Inspect(), reader)
        failure = reader.next()
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, RuntimeError)
    assert str(failure.error) == "Panic: index out of bounds"
    worker.submit(Inspect(), other)
    assert other.next() == Count(0)


def test_a_sink_that_raises_cancels_its_task_only(worker: Worker, service: CountingService) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("nobody listens")

    worker.submit(turn(), broken)
    service.permissions.release(100)
    reader = Reader()
    worker.submit(Inspect(), reader)
    assert isinstance(reader.next(), Count)
    worker.submit(Inspect(), reader)
    reader.next()
    assert service.num_steps <= 2


def test_turns_are_added_while_others_run_and_in_the_order_in_which_they_came() -> None:
    service = CountingService(max_turns=3)
    worker = Worker(lambda progress: service, name="counting", max_queue=9)
    readers = [Reader() for _ in range(5)]
    cancels = []
    for number, reader in enumerate(readers):
        cancels.append(worker.submit(turn(session_hint=str(number)), reader))
    for _ in range(3):  # a step that began with fewer turns would not serve them all
        assert service.additions.acquire(timeout=60)
    service.permissions.release()
    for reader in readers[:3]:
        assert reader.next() == GenerationChunk(token_ids=(0,))
    assert [request.session_hint for request, _, _ in service.turns] == ["0", "1", "2"]
    cancels[1]()
    assert readers[1].next() == Finished()
    service.permissions.release()
    assert readers[3].next() == GenerationChunk(token_ids=(0,))
    assert readers[4].events.empty()
    worker.close()


def test_close_fails_what_runs_and_what_waits(worker: Worker, service: CountingService) -> None:
    readers = [Reader(), Reader(), Reader()]
    worker.submit(turn(), readers[0])
    service.permissions.release()
    readers[0].next()
    for reader in readers[1:]:
        worker.submit(turn(), reader)
    worker.close()
    for reader in readers:
        failure = reader.next()
        assert isinstance(failure, Failure)
        assert "closed" in str(failure.error)
    assert service.is_closed
    assert not worker.is_usable
    with pytest.raises(ConfigurationError, match="closed"):
        worker.submit(Inspect(), readers[0])


def test_a_turn_that_ended_before_close_is_not_failed(
    worker: Worker, service: CountingService
) -> None:
    reader = Reader()
    from dlite_agent.config import SamplingParams

    def sink(event: Event) -> None:
        reader(event)
        if isinstance(event, GenerationChunk) and event.finish_reason:
            worker._state = "closed"  # the worst moment: answered, not finished

    worker.submit(turn(sampling=SamplingParams(max_tokens=1)), sink)
    service.permissions.release()
    reader.next()
    assert reader.next() == GenerationChunk(finish_reason="stop")
    assert reader.next() == Finished()


def test_close_may_be_called_by_the_worker_itself(worker: Worker, service: CountingService) -> None:
    reader = Reader()

    def sink(event: Event) -> None:
        worker.close()
        reader(event)

    worker.submit(Inspect(), sink)
    assert reader.next() == Count(0)
    assert reader.next() == Finished()
    worker.close()
    assert service.is_closed


@pytest.mark.parametrize("error", [ConfigurationError("no"), OSError(28, "No space left")])
def test_an_error_of_loading_is_kept(error: Exception) -> None:
    go_on = threading.Event()

    def load(progress: Progress) -> CountingService:
        go_on.wait(10)
        raise error

    worker = Worker(load, name="broken", max_queue=2)
    reader = Reader()
    worker.submit(Inspect(), reader)
    go_on.set()
    failure = reader.next()
    assert isinstance(failure, Failure)
    assert type(failure.error) is type(error)
    for _ in range(2):
        with pytest.raises(type(error)):
            worker.wait_ready()
    with pytest.raises(type(error)):
        worker.submit(Inspect(), reader)
    assert not worker.is_usable
    worker.close()
    with pytest.raises(type(error)):
        worker.wait_ready()


def test_a_worker_that_was_closed_unused_stays_closed() -> None:
    worker = Worker(lambda progress: CountingService(), name="unused", max_queue=1)
    worker.close()
    worker.start()
    assert worker._thread is None
    sink: Sink = Reader()
    with pytest.raises(ConfigurationError, match="closed"):
        worker.submit(Inspect(), sink)
    with pytest.raises(ConfigurationError, match="closed"):
        worker.wait_ready()


class Watched(Worker):
    """Notes which thread closes it."""

    def __init__(self) -> None:
        super().__init__(lambda _: CountingService(), name="watched", max_queue=1)
        self.closer: threading.Thread | None = None
        self.is_closed = threading.Event()

    def close(self) -> None:
        super().close()
        self.closer = threading.current_thread()
        self.is_closed.set()


async def test_an_engine_that_is_collected_on_an_event_loop_is_closed_beside_it() -> None:
    host = Watched()
    close_dropped(host)
    assert host.is_closed.wait(60)
    assert host.closer is not threading.current_thread()


def test_an_engine_that_is_collected_elsewhere_is_closed_where_it_was_dropped() -> None:
    host = Watched()
    close_dropped(host)
    assert host.closer is threading.current_thread()
