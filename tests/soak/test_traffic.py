"""Random agents on a small KV budget: every answer is that of a cold run, in float64.

Clients change what they send back, stop turns in the middle and ask again, come with hints or
without, and begin anew when their history is long. A few turns run always; a thousand are for
`make soak`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import Agent, respaced
from tests.tiny_checkpoint import write_checkpoint

MAX_PROMPT = 1200  # tokens; then the agent begins anew
KV_BYTES = 6 * 2**20  # 6,144 rows of the tiny model
STOPPED_SHARE = 0.2


def load(folder: Path, **options: object) -> ModelService:
    config = EngineConfig(model=str(folder), dtype="float64", **options)  # type: ignore[arg-type]
    return load_service(config, lambda stage, fraction: None)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[ModelService, ModelService]]:
    folder = write_checkpoint(tmp_path, max_positions=4096)
    warm = load(folder, max_kv_bytes=KV_BYTES, prefill_chunk=64)
    cold = load(folder, max_kv_bytes=KV_BYTES, drafter="null", reuse="none")
    with closing(warm), closing(cold):
        yield warm, cold


def run(
    service: ModelService, request: ChatRequest, stop_after: int | None, closes: bool
) -> Generation | None:
    """The answer, or None when the turn was stopped by its reader or by `should_stop`."""
    polls = iter(range(stop_after)) if stop_after is not None and not closes else None

    def should_stop() -> bool:
        return polls is not None and next(polls, None) is None

    events = service.run(request, time.perf_counter(), should_stop)
    generation = None
    for number, event in enumerate(events):
        assert isinstance(event, GenerationChunk)
        generation = event.generation
        if closes and number == stop_after and generation is None:
            events.close()  # type: ignore[attr-defined]  # a generator
            break
    return generation


def check(service: ModelService) -> None:
    sessions = service.model.sessions
    assert service.model.target.pool.used_bytes <= KV_BYTES
    for info in sessions.sessions():
        assert not info.is_busy
        sessions.get(info.session_id).check_invariants()


def new_agent(rng: random.Random, number: int, count: int) -> Agent:
    return Agent(
        f"agent {number}, task {count}: mend part {rng.randrange(10)}",
        hint=f"thread-{number}" if rng.random() < 0.3 else None,
        edit=rng.choice([same, respaced, without_thought]),
    )


def same(message: Message) -> Message:
    return message


def without_thought(message: Message) -> Message:
    return replace(message, reasoning=None)


@pytest.mark.parametrize(
    ("num_turns", "num_agents"),
    [
        pytest.param(30, 6, id="sample"),
        pytest.param(1000, 20, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_random_turns_on_a_small_budget_equal_cold_ones(
    services: tuple[ModelService, ModelService], num_turns: int, num_agents: int
) -> None:
    warm, cold = services
    rng = random.Random(num_turns)
    agents = [new_agent(rng, number, 0) for number in range(num_agents)]
    cached = prefilled = prompted = num_stopped = 0
    for count in range(1, num_turns + 1):
        number = rng.randrange(num_agents)
        agent = agents[number]
        request = agent.request()
        while rng.random() < STOPPED_SHARE:
            stopped = run(warm, request, rng.randrange(12), rng.random() < 0.5)
            num_stopped += stopped is None
            check(warm)
        ours, theirs = run(warm, request, None, False), run(cold, request, None, False)
        check(warm)
        assert ours is not None
        assert theirs is not None
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.token_ids == theirs.token_ids
        assert theirs.stats.cached_tokens == 0
        cached += ours.stats.cached_tokens
        prefilled += ours.stats.prefilled_tokens
        prompted += ours.stats.prompt_tokens
        agent.take(ours)
        if ours.stats.prompt_tokens > MAX_PROMPT:
            agents[number] = new_agent(rng, number, count)
    assert cached + prefilled == prompted
    assert num_stopped > 0
    assert cached > 0
    print(f"{num_turns} turns, {num_stopped} stopped: {cached} tokens cached of {prompted}")
