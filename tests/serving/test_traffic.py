"""Many clients that leave, read slowly and come back: whole answers are right, nothing stays."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.serving.settings import ServerSettings
from tests.serving.chunk_rules import checked
from tests.serving.live_server import LiveServer, live_server
from tests.tiny_checkpoint import write_checkpoint

NUM_CLIENTS = 64
NUM_TASKS = 12
LIMIT_S = 300.0
HEALTH_S = 0.1


@dataclass
class Traffic:
    """What came of all requests."""

    expected: list[str]
    until_s: float
    ended: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)


def body(task: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Task {task}: " + "go on. " * task}]
    return {"messages": messages, "seed": task, "max_tokens": 24, "n": 1, "stream": stream}


def said(answer: dict[str, Any]) -> str:
    message = answer["choices"][0]["message"]
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return json.dumps([message["content"] or "", message.get("reasoning_content") or "", calls])


async def client(http: httpx.AsyncClient, traffic: Traffic, number: int) -> None:
    """Ask again and again, now and then as no good client does."""
    rng = random.Random(number)
    while time.perf_counter() < traffic.until_s:
        task = rng.randrange(NUM_TASKS)
        kind = rng.choice(["answer", "stream", "slow", "leave", "leave at once"])
        traffic.ended[await once(http, traffic, task, kind)] += 1


async def once(http: httpx.AsyncClient, traffic: Traffic, task: int, kind: str) -> str:
    path = "/v1/chat/completions"
    if kind == "answer":
        answer = await http.post(path, json=body(task, stream=False))
        if answer.status_code == 429:
            return "refused"
        assert answer.status_code == 200, answer.text
        assert said(answer.json()) == traffic.expected[task]
        return kind
    if kind == "leave at once":
        asking = asyncio.create_task(http.post(path, json=body(task, stream=False)))
        await asyncio.sleep(0.005 * task)
        asking.cancel()
        await asyncio.wait([asking])
        return kind
    async with http.stream("POST", path, json=body(task, stream=True)) as answer:
        if answer.status_code == 429:
            return "refused"
        assert answer.status_code == 200
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if kind == "leave" and len(lines) > task:
                return kind
            if kind == "slow":
                await asyncio.sleep(0.02)
    (told,), _ = checked("\n".join(lines) + "\n", includes_usage=False)
    names = [call["name"] for call in told.calls]
    assert json.dumps([told.content, told.reasoning, names]) == traffic.expected[task]
    return kind


async def watch_health(http: httpx.AsyncClient, traffic: Traffic) -> None:
    while time.perf_counter() < traffic.until_s:
        began_s = time.perf_counter()
        assert (await http.get("/health")).is_success
        traffic.health_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.05)


async def drive(server: LiveServer, seconds: float) -> Traffic:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=server.url, timeout=LIMIT_S, verify=False, limits=limits
    ) as http:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        answers = [
            await http.post("/v1/chat/completions", json=body(task, stream=False))
            for task in range(NUM_TASKS)
        ]
        expected = [said(answer.json()) for answer in answers]
        traffic = Traffic(expected, time.perf_counter() + seconds)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_health(http, traffic))
            for number in range(NUM_CLIENTS):
                group.create_task(client(http, traffic, number))
        while server.service.num_running:  # those that were left end within a chunk or a round
            await asyncio.sleep(0.01)
    return traffic


@pytest.mark.parametrize(
    ("seconds", "isolation"),
    [
        pytest.param(2.0, "thread", id="sample", marks=pytest.mark.timeout(400)),
        pytest.param(
            300.0, "process", id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]
        ),
    ],
)
async def test_many_clients_get_right_answers_and_leave_nothing(
    tmp_path: Path, seconds: float, isolation: Literal["thread", "process"]
) -> None:
    folder = write_checkpoint(tmp_path / "model", max_positions=1024)
    config = EngineConfig(
        str(folder),
        dtype="float64",
        isolation=isolation,
        max_kv_bytes=32 * 2**20,
        max_batch=8,
        idle=False,  # what it builds belongs to no session yet
    )
    settings = ServerSettings(max_running=8, max_queue=40)
    with Engine(config) as engine, live_server(engine, settings) as server:
        traffic = await drive(server, seconds)
        assert server.service.num_waiting == 0
        async with asyncio.timeout(LIMIT_S):
            # What was left ends within a round, and then nothing holds memory but idle sessions.
            while engine.usage().kv_used_bytes:
                engine.purge()
                await asyncio.sleep(0.01)
    print(dict(traffic.ended), f"health: at most {max(traffic.health_s):.3f} s")
    assert {"answer", "stream", "slow", "leave", "leave at once"} <= set(traffic.ended)
    if isolation == "process":  # else the model's thread, the server's and ours share one lock
        assert max(traffic.health_s) < HEALTH_S
