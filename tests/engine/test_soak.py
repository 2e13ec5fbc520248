"""Agents that edit, cancel and branch at random, against cold recomputation of every turn."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, HistoryMode, SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.errors import CapacityError, ContextLengthExceededError
from dlite_agent.outputs import Generation, GenerationChunk
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from tests.conversations import Agent, respaced
from tests.tiny_checkpoint import write_checkpoint

PAGE_BYTES = 256 * 2 * 2 * 2 * 16 * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


def load(folder: Path, **options: object) -> ModelService:
    config = EngineConfig(model=str(folder), dtype="float64", **options)  # type: ignore[arg-type]
    return load_service(config, lambda stage, fraction: None)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[ModelService]:
    service = load(folder, max_kv_bytes=64 * PAGE_BYTES)
    yield service
    service.close()


def run(
    service: ModelService, request: ChatRequest, should_stop: Callable[[], bool]
) -> Generation | None:
    generation = None
    for event in service.run(request, time.perf_counter(), should_stop):
        assert isinstance(event, GenerationChunk)
        generation = event.generation
    for session in service.model.sessions.sessions():
        assert not session.is_busy
        service.model.sessions.get(session.session_id).check_invariants()
    return generation


def recomputed(service: ModelService, generation: Generation, choice: int) -> tuple[int, ...]:
    """The answer to the very same prompt ids, from an empty session."""
    model, used = service.model, generation.stats.sampling
    params = SamplingParams(used["temperature"], int(used["top_k"]), used["top_p"])
    session = Session(model.target, NullDrafter(), session_id="cold")
    session.sync(generation.prompt_token_ids)
    noise = KeyedNoise.derive(generation.stats.seed, choice, generation.prompt_token_ids)
    limits = StopRules(model.stop_token_ids, int(used["max_tokens"]))
    ids = [i for r in session.decode(Sampler(params, noise), limits) for i in r.token_ids]
    session.close()
    return tuple(ids)


def disturb(agents: list[Agent], rng: random.Random) -> Agent:
    """Choose an agent, and now and then do to its history what clients do."""
    kind = rng.random()
    if len(agents) < 2 or kind < 0.08:
        hint = rng.choice([None, f"thread-{rng.randrange(9)}"])
        edit = rng.choice([respaced, lambda message: message])
        agents.append(Agent(f"task {rng.randrange(5)}", hint=hint, edit=edit))
    del agents[:-6]
    agent = rng.choice(agents)
    place = rng.randrange(1, len(agent.messages))
    if kind > 0.92:
        message = agent.messages[place]
        agent.messages[place] = replace(message, content=message.content + " edited")
    elif kind > 0.86:
        agent.messages.append(Message("user", f"and then {place}"))
    elif kind > 0.82:
        del agent.messages[place + 1 :]
    elif kind > 0.80:
        agents.append(replace(agent, turns=list(agent.turns)))
        agents[-1].messages = list(agent.messages)
    return agent


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_pages", [6, 14, 100])
@pytest.mark.parametrize("history", ["auto", "as_generated", "template"])
def test_every_turn_is_what_a_cold_one_would_be(
    folder: Path, reference: ModelService, history: HistoryMode, num_pages: int
) -> None:
    rng = random.Random(f"{history} {num_pages}")
    chunk = rng.choice([16, 64, 256])
    options = {"max_kv_bytes": num_pages * PAGE_BYTES, "prefill_chunk": chunk}
    service = load(folder, history=history, **options)
    agents: list[Agent] = []
    num_turns = 0
    ends = time.perf_counter() + 30
    while time.perf_counter() < ends:
        agent = disturb(agents, rng)
        request = agent.request(max_tokens=rng.choice([1, 5, 60]))
        choice = rng.randrange(3)
        request = replace(request, sampling=replace(request.sampling, choice_index=choice))
        steps = iter(range(rng.randrange(30) if rng.random() < 0.3 else 10**6))
        try:
            generation = run(service, request, lambda steps=steps: next(steps, None) is None)  # type: ignore[misc]
        except (ContextLengthExceededError, CapacityError):
            agents.remove(agent)
            continue
        if generation is not None:
            assert generation.token_ids == recomputed(reference, generation, choice)
            agent.take(generation)
            num_turns += 1
    assert num_turns > 10
    service.close()
    assert service.model.target.pool.used_bytes == 0
