"""`reproducible=True`: the same requests in the same order are computed the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.config import DType, EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.engine.tasks import Event, Failure, unheard
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import Agent

TASKS = ("fix it", "read the file again and again and again")


@dataclass(eq=False)
class Reader:
    """Keeps the answer."""

    submitted_s: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    is_parked: bool = False
    generation: Generation | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, GenerationChunk):
            self.generation = event.generation or self.generation


Load = Callable[[DType], ModelService]


@pytest.fixture
def load() -> Iterator[Load]:
    """Nano: by its shape a draft pays, as it does for no smaller model."""
    services: list[ModelService] = []

    def loader(dtype: DType) -> ModelService:
        config = EngineConfig(dtype=dtype, max_kv_bytes=64 * 2**20, reproducible=True)
        services.append(load_service(config, unheard))
        return services[-1]

    yield loader
    for service in services:
        service.close()


def run(service: ModelService, *requests: ChatRequest) -> list[Generation]:
    """Answer requests that came together."""
    readers = [Reader() for _ in requests]
    for request, reader in zip(requests, readers, strict=True):
        service.add(request, reader)
    while service.num_turns:
        service.step()
    return [reader.generation for reader in readers if reader.generation is not None]


def converse(service: ModelService, num_turns: int) -> list[Generation]:
    """Some agents at once, turn by turn."""
    agents, found = [Agent(task) for task in TASKS], []
    for _ in range(num_turns):
        answers = run(service, *(agent.request(max_tokens=16) for agent in agents))
        for agent, answer in zip(agents, answers, strict=True):
            agent.take(answer)
        found += answers
    return found


def tokens(answers: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def drafts(answers: Sequence[Generation]) -> list[tuple[object, ...]]:
    """How each was computed."""
    found = [answer.stats for answer in answers]
    return [(s.rounds, s.drafted_by, s.accepted_by, s.cached_tokens, s.batch_size) for s in found]


def test_two_engines_draft_and_answer_the_same(load: Load) -> None:
    first, second = (converse(load("float32"), 2) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert drafts(first) == drafts(second)
    assert any(answer.stats.drafted_tokens for answer in first)


def test_neither_what_was_before_nor_who_else_runs_changes_a_token(load: Load) -> None:
    request, other = Agent(TASKS[1]).request(max_tokens=16), Agent(TASKS[0]).request(max_tokens=16)
    service = load("float64")
    cold = run(service, request)
    warm = run(service, request)
    assert warm[0].stats.cached_tokens > 0
    beside = run(service, other, request)[1:]
    assert beside[0].stats.batch_size > 1.0
    assert tokens(cold) == tokens(warm) == tokens(beside)
