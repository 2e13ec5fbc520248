"""Clients that give up and ask again, and clients that ask twice at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.engine.tasks import Event, Failure, Finished
from dlite_agent.errors import ConfigurationError, SessionBusyError
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import sampled
from tests.tiny_checkpoint import write_checkpoint

Load = Callable[..., ModelService]
CHUNK = 32
NUM_CHUNKS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture(scope="module")
def load(folder: Path) -> Iterator[Load]:
    """One service for the same options; each test has a task of its own."""
    services: dict[str, ModelService] = {}

    def loader(**options: Any) -> ModelService:
        if (known := services.get(str(options))) is not None:
            return known
        name = str(options)
        options = {"dtype": "float64", "drafter": "null", "prefill_chunk": CHUNK} | options
        config = EngineConfig(model=str(folder), max_kv_bytes=32 * 2**20, idle=False, **options)
        services[name] = load_service(config, lambda *_: None)
        return services[name]

    yield loader
    for service in services.values():
        service.close()


@dataclass(eq=False)
class Reader:
    submitted_s: float = 0.0
    is_cancelled: bool = False
    is_parked: bool = False
    events: list[Event] = field(default_factory=list)

    def put(self, event: Event) -> None:
        self.events.append(event)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Failure | Finished)

    @property
    def generation(self) -> Generation | None:
        chunks = [event for event in self.events if isinstance(event, GenerationChunk)]
        return chunks[-1].generation if chunks else None


def add(service: ModelService, request: ChatRequest) -> Reader:
    reader = Reader()
    service.add(request, reader)
    return reader


def finish(service: ModelService, *readers: Reader) -> None:
    for _ in range(2000):
        if all(reader.is_over for reader in readers):
            return
        service.step()
    raise AssertionError("it does not end")


def long_request(task: str = "read this", **fields: Any) -> ChatRequest:
    """Its prompt takes ten chunks."""
    text = task + " word" * ((NUM_CHUNKS * CHUNK - 40 - len(task)) // 5)
    return ChatRequest((Message("user", text),), sampling=sampled(0, 4), **fields)


def test_a_client_that_gives_up_early_gets_its_answer_after_the_time_of_one_prefill(
    load: Load,
) -> None:
    service = load()
    request = long_request("give up")
    before = service.model.target.rows_computed
    attempts = 0
    num_steps = 0
    while True:
        attempts += 1
        reader = add(service, request)
        for _ in range(1):  # "one second": a tenth of the prefill
            service.step()
            num_steps += 1
        if attempts >= NUM_CHUNKS:
            break
        reader.is_cancelled = True
        finish(service, reader)
    finish(service, reader)
    assert reader.generation is not None
    stats = reader.generation.stats
    computed = service.model.target.rows_computed - before - (stats.completion_tokens - 1)
    assert computed <= stats.prompt_tokens + attempts, "a row or none again at each attempt"
    assert num_steps == NUM_CHUNKS
    assert stats.prefilled_tokens <= 2 * CHUNK


def test_a_retry_beside_the_first_attempt_computes_nothing_again(load: Load) -> None:
    service = load()
    before = service.model.target.rows_computed
    first = add(service, long_request("overlap"))
    for _ in range(4):
        service.step()
    retry = add(service, long_request("overlap"))
    service.step()
    first.is_cancelled = True
    finish(service, first, retry)
    assert retry.generation is not None
    stats = retry.generation.stats
    computed = service.model.target.rows_computed - before - (stats.completion_tokens - 1)
    assert computed <= stats.prompt_tokens + 2


def test_another_request_of_the_same_thread_leaves_what_a_retry_needs(load: Load) -> None:
    service = load()
    request = long_request("a title", session_hint="thread")
    reader = add(service, request)
    for _ in range(NUM_CHUNKS // 2):
        service.step()
    reader.is_cancelled = True
    title = ChatRequest(
        (Message("user", "Give it a title."),), sampling=sampled(1, 4), session_hint="thread"
    )
    finish(service, reader, add(service, title))
    retry = add(service, request)
    finish(service, retry)
    assert retry.generation is not None
    assert retry.generation.stats.prefilled_tokens <= (NUM_CHUNKS // 2 + 2) * CHUNK


def second_turn(service: ModelService) -> ChatRequest:
    """A request that names a session."""
    request = long_request(session_hint="thread")
    reader = add(service, request)
    finish(service, reader)
    assert reader.generation is not None
    messages = (*request.messages, reader.generation.message, Message("tool", "go on"))
    return replace(request, messages=messages, sampling=sampled(2, 30))


@pytest.mark.parametrize(("on_conflict", "num_sessions"), [("fork", 2), ("wait", 1)])
def test_a_second_turn_on_a_session_forks_or_waits(
    load: Load, on_conflict: Any, num_sessions: int
) -> None:
    service = load(on_conflict=on_conflict)
    request = second_turn(service)
    first = add(service, request)
    for _ in range(6):
        service.step()
    assert first.events, "it decodes"
    second = add(service, replace(request, sampling=sampled(2, 8)))
    finish(service, first, second)
    assert second.generation is not None
    assert first.generation is not None
    assert second.generation.token_ids == first.generation.token_ids[:8]
    assert len(service.model.sessions) == num_sessions


def test_a_second_turn_on_a_session_is_refused_where_that_is_asked_for(load: Load) -> None:
    service = load(on_conflict="error")
    request = second_turn(service)
    first = add(service, request)
    for _ in range(6):
        service.step()
    second = add(service, request)
    finish(service, first, second)
    (failure,) = second.events
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, SessionBusyError)
    assert first.generation is not None


@pytest.mark.parametrize("field", ["on_conflict", "control_tokens"])
def test_an_option_that_does_not_exist_is_refused(field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        EngineConfig(**{field: "maybe"})


@pytest.mark.parametrize(("control_tokens", "is_control"), [("guarded", False), ("parity", True)])
def test_a_spelled_control_token_becomes_one_only_in_parity(
    load: Load, control_tokens: Any, is_control: bool
) -> None:
    service = load(control_tokens=control_tokens)
    renderer = service.model.renderer
    spelled = renderer.render((Message("user", "a <|im_end|> b"),))
    plain = renderer.render((Message("user", "a b"),))
    closing = [ids.token_ids.count(service.model.closing_id) for ids in (spelled, plain)]
    assert closing[0] - closing[1] == is_control
    others = service.model.tenants.of("them").renderer
    assert others.render((Message("user", "a <|im_end|> b"),)).token_ids == spelled.token_ids
