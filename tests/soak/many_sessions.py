"""A process of many conversations with nano in memory for twenty; prints what became of it as JSON.

Run as a program: how many sessions, how many seconds, how many turns at least. What its clients
keep of their own is a few kilobytes a conversation: the memory that is measured is the engine's.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation
from tests.conversations import Agent

NUM_RESIDENT = 20
MAX_PROMPT = 450  # tokens: with an answer, two pages a session
CHECKED_EVERY = 10


def load(**options: object) -> ModelService:
    config = EngineConfig(model="nano", dtype="float64", **options)  # type: ignore[arg-type]
    return load_service(config, lambda stage, fraction: None)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def run(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


def replayed(request: ChatRequest, turn: Generation) -> ChatRequest:
    """The same prompt ids, for an engine that has not seen the conversation."""
    prompt = turn.prompt_token_ids
    return ChatRequest((Message("user", ""),), sampling=request.sampling, prompt=prompt)


def traffic(
    warm: ModelService, cold: ModelService, num_sessions: int, seconds: float, min_turns: int
) -> dict[str, object]:
    """Half of the turns are of any agent, half of a few busy ones."""
    rng, pool = random.Random(num_sessions), warm.model.target.pool
    first = run(warm, Agent("begin").request(max_tokens=24))  # all code and buffers are there now
    run(cold, replayed(Agent("begin").request(max_tokens=24), first))
    agents = [Agent(f"mend part {n}", hint=f"thread-{n}") for n in range(num_sessions)]
    before = resident_bytes()
    num_turns, num_checked, most_bytes, most_grown = 0, 0, 0, 0
    origins = Counter[str]()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or num_turns < min_turns:
        number = rng.randrange(num_sessions if rng.random() < 0.5 else pool.num_pages // 2)
        agent = agents[number]
        request = agent.request(max_tokens=24)
        turn = run(warm, request)
        num_turns += 1
        origins[turn.stats.origin] += 1
        if num_turns % CHECKED_EVERY == 0:
            assert run(cold, replayed(request, turn)).token_ids == turn.token_ids
            num_checked += 1
            most_grown = max(most_grown, resident_bytes() - before)
        most_bytes = max(most_bytes, pool.used_bytes)
        agent.take(turn)
        agent.turns = [first] * len(agent.turns)  # their number is what counts
        if turn.stats.prompt_tokens > MAX_PROMPT - 100:
            agents[number] = Agent(f"mend part {number}.{num_turns}", hint=f"thread-{number}")
    for info in warm.model.sessions.sessions():
        warm.model.sessions.get(info.session_id).check_invariants()
    return {
        "turns": num_turns,
        "sessions": len({agent.task for agent in agents if agent.turns}),
        "checked": num_checked,
        "origins": dict(origins),
        "budget_bytes": pool.max_bytes,
        "most_kv_bytes": most_bytes,
        "grown_bytes": max(most_grown, resident_bytes() - before),
    }


def main() -> None:
    """Print one line."""
    num_sessions, seconds, min_turns = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with closing(load(reuse="none", drafter="null", max_kv_bytes=2**25)) as cold:
        budget = NUM_RESIDENT * 2 * cold.model.target.pool.page_bytes
        with closing(load(max_kv_bytes=budget)) as warm:
            told = traffic(warm, cold, num_sessions, seconds, min_turns)
        told["left_bytes"] = warm.model.target.pool.used_bytes
    print(json.dumps(told))


if __name__ == "__main__":
    main()
