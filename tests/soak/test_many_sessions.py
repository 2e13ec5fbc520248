"""A thousand conversations with nano in memory for twenty: nothing grows, nothing is wrong."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation
from tests.conversations import Agent

MAX_PROMPT = 450  # tokens: with an answer, two pages a session
CHECKED_SHARE = 0.1
BESIDE_BYTES = 48 * 2**20  # journal, renderer's segments, past requests, allocator


def load(**options: object) -> ModelService:
    config = EngineConfig(model="nano", dtype="float64", **options)  # type: ignore[arg-type]
    return load_service(config, lambda stage, fraction: None)


@contextmanager
def services(num_resident: int) -> Iterator[tuple[ModelService, ModelService]]:
    with closing(load(reuse="none", drafter="null", max_kv_bytes=2**26)) as cold:
        budget = num_resident * 2 * cold.model.target.pool.page_bytes
        with closing(load(max_kv_bytes=budget)) as warm:
            yield warm, cold


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def run(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_sessions_in_memory_for_twenty() -> None:
    with services(20) as (warm, cold):
        told = traffic(warm, cold, random.Random(1000), num_sessions=1000, seconds=600.0)
    print(told)


def traffic(
    warm: ModelService,
    cold: ModelService,
    rng: random.Random,
    num_sessions: int,
    seconds: float,
) -> str:
    """Half of the turns are of any agent, half of a few busy ones."""
    pool = warm.model.target.pool
    num_busy = pool.num_pages // 2
    agents = [Agent(f"mend part {n}", hint=f"thread-{n}") for n in range(num_sessions)]
    before = resident_bytes()
    num_turns, num_checked, origins = 0, 0, Counter[str]()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        number = rng.randrange(num_sessions if rng.random() < 0.5 else num_busy)
        agent = agents[number]
        request = agent.request(max_tokens=24)
        turn = run(warm, request)
        num_turns += 1
        origins[turn.stats.origin] += 1
        if rng.random() < CHECKED_SHARE:
            assert run(cold, replayed(request, turn)).token_ids == turn.token_ids
            num_checked += 1
        assert pool.used_bytes <= pool.max_bytes
        agent.take(turn)
        if turn.stats.prompt_tokens > MAX_PROMPT - 100:
            agents[number] = Agent(f"mend part {number}.{num_turns}", hint=f"thread-{number}")
    for info in warm.model.sessions.sessions():
        warm.model.sessions.get(info.session_id).check_invariants()
    grown = resident_bytes() - before
    assert grown <= 1.1 * pool.max_bytes + BESIDE_BYTES
    assert num_checked > 0
    return (
        f"{num_turns} turns of {num_sessions} sessions, {num_checked} checked; {dict(origins)}; "
        f"KV {pool.used_bytes / 2**20:.0f} of {pool.max_bytes / 2**20:.0f} MiB, "
        f"memory grew by {grown / 2**20:.0f} MiB"
    )


def replayed(request: ChatRequest, turn: Generation) -> ChatRequest:
    """The same prompt ids, for an engine that has not seen the conversation."""
    prompt = turn.prompt_token_ids
    return ChatRequest((Message("user", ""),), sampling=request.sampling, prompt=prompt)
