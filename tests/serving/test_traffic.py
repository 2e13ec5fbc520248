"""Many clients that leave, read slowly and come back: whole answers are right, nothing stays."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.config import EngineConfig, child_environment
from dlite_agent.engine.engine import Engine
from dlite_agent.serving.settings import ServerSettings
from tests.serving.chunk_rules import checked
from tests.serving.live_server import live_server
from tests.tiny_checkpoint import write_checkpoint

NUM_CLIENTS = 64
NUM_TASKS = 12
LIMIT_S = 300.0
HEALTH_S = 0.1
MAX_GROWTH = 96 * 2**20  # of a process; journals and figures grow to their own limits
MAX_RUNNING, MAX_QUEUE, MAX_KV_BYTES = 8, 40, 32 * 2**20
DISCONNECTS = ("leave", "leave at once")
PROBE = Path(__file__).with_name("health_probe.py")


@dataclass
class Served:
    """A server, and the processes that it is made of; none where they are this one."""

    url: str
    pids: tuple[int, ...] = ()


@contextmanager
def served_here(folder: Path) -> Iterator[Served]:
    """Server and engine in threads of this process."""
    config = EngineConfig(
        str(folder),
        dtype="float64",
        max_kv_bytes=MAX_KV_BYTES,
        max_batch=MAX_RUNNING,
        idle=False,  # what it builds belongs to no session yet
    )
    settings = ServerSettings(max_running=MAX_RUNNING, max_queue=MAX_QUEUE)
    with Engine(config) as engine, live_server(engine, settings) as server:
        yield Served(server.url)


def children(pid: int) -> list[int]:
    """Processes that any thread of one has started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text(encoding="ascii").split()]


@contextmanager
def served_apart(folder: Path) -> Iterator[Served]:
    """The command as a user starts it: a process for the server, and one for its engine."""
    command = [sys.executable, "-m", "dlite_agent.cli.main", "serve", str(folder), "--port", "0"]
    flags = f"--dtype float64 --max-num-seqs {MAX_RUNNING} --max-queue {MAX_QUEUE}".split()
    added = {"DLITE_MAX_KV_BYTES": str(MAX_KV_BYTES), "DLITE_IDLE": "false"}
    added["OMP_NUM_THREADS"] = "1"  # the clients are this process, and take a core too
    with subprocess.Popen(
        [*command, *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(added, "127.0.0.1"),
    ) as process:
        assert process.stderr is not None
        try:
            url = re.search(r"http://[^/\s]+", process.stderr.readline())
            assert url is not None
            assert "tokens of context" in process.stderr.readline()
            yield Served(url[0], (process.pid, *children(process.pid)))
        finally:
            process.terminate()
            process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0


@dataclass
class Traffic:
    """What came of all requests."""

    expected: list[str]
    until_s: float
    pause_s: float
    ended: Counter[str] = field(default_factory=Counter)


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
        kind = rng.choice(["answer", "stream", "slow", *DISCONNECTS])
        ended = await once(http, traffic, task, kind)
        traffic.ended[ended] += 1
        refused_s = 1.0 if ended == "refused" else 0.0  # what `retry-after` asks for
        await asyncio.sleep(refused_s + rng.random() * traffic.pause_s)


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


async def drive(http: httpx.AsyncClient, seconds: float, pause_s: float) -> Traffic:
    """Learn the right answers from a server that is quiet, and then make it busy."""
    answers = [
        await http.post("/v1/chat/completions", json=body(task, stream=False))
        for task in range(NUM_TASKS)
    ]
    expected = [said(answer.json()) for answer in answers]
    traffic = Traffic(expected, time.perf_counter() + seconds, pause_s)
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(client(http, traffic, number))
    return traffic


async def settle(http: httpx.AsyncClient) -> None:
    """Wait until turns that were left have ended, then forget all sessions; no memory is held."""
    while await metric(http, "num_requests_running") + await metric(http, "num_requests_waiting"):
        await asyncio.sleep(0.02)
    while await metric(http, "kv_cache_usage_perc"):
        for session in (await http.get("/v1/dlite/sessions")).json()["data"]:
            answer = await http.delete(f"/v1/dlite/sessions/{session['id']}")
            assert answer.status_code in (200, 404, 409), answer.text
        await asyncio.sleep(0.02)
    assert await metric(http, "num_sessions") == 0


async def metric(http: httpx.AsyncClient, name: str) -> float:
    text = (await http.get("/metrics")).text
    found = re.search(rf"^dlite:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def resident_bytes(pids: tuple[int, ...]) -> list[int]:
    """Memory of processes, in bytes; of Linux only."""
    texts = [Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in pids]
    return [int(text.split("VmRSS:")[1].split()[0]) * 1024 for text in texts]


async def loaded(
    served: Served, seconds: float, pause_s: float
) -> tuple[Traffic, list[float], list[int]]:
    """Traffic, health in seconds, and how much each process grew from the first fifth on."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=served.url, timeout=LIMIT_S, verify=False, limits=limits
    ) as http:
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        await drive(http, seconds / 5, pause_s)
        await settle(http)
        before = resident_bytes(served.pids)
        probe = subprocess.Popen(
            [sys.executable, str(PROBE), served.url.removeprefix("http://")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with probe:
            traffic = await drive(http, seconds * 4 / 5, pause_s)
            printed, _ = probe.communicate(timeout=LIMIT_S)
        assert probe.returncode == 0
        await settle(http)
        after = resident_bytes(served.pids)
    growth = [end - start for start, end in zip(before, after, strict=True)]
    return traffic, json.loads(printed), growth


def told(traffic: Traffic, health_s: list[float], growth: list[int]) -> str:
    """The figures for docs/benchmarks/soak.md."""
    ended = traffic.ended
    num_compared = sum(ended[kind] for kind in ("answer", "stream", "slow"))
    by_rank = sorted(health_s)
    grown = " and ".join(f"{size / 2**20:.1f}" for size in growth) or "unknown"
    return (
        f"{ended.total() - ended['refused']} turns: {num_compared} answers compared and equal, "
        f"{sum(ended[kind] for kind in DISCONNECTS)} disconnects; {ended['slow']} of them read "
        f"slowly, {ended['refused']} more were refused (429); {len(health_s)} probes of /health: "
        f"p50 {by_rank[len(by_rank) // 2] * 1e3:.1f} ms, p99 "
        f"{by_rank[len(by_rank) * 99 // 100] * 1e3:.1f} ms, max {by_rank[-1] * 1e3:.1f} ms; server "
        f"and engine grew by {grown} MiB"
    )


@pytest.mark.timeout(600)
async def test_many_clients_get_right_answers_and_leave_nothing(tmp_path: Path) -> None:
    with served_here(write_checkpoint(tmp_path / "model", max_positions=1024)) as served:
        traffic, health_s, _ = await loaded(served, 20.0, pause_s=16.0)
    assert {"answer", "stream", "slow", *DISCONNECTS} <= set(traffic.ended)
    assert health_s


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of processes from /proc")
async def test_five_minutes_of_clients_leave_nothing_and_the_server_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_apart(write_checkpoint(tmp_path / "model", max_positions=1024)) as served:
        assert len(served.pids) == 2  # the engine has an interpreter lock of its own
        traffic, health_s, growth = await loaded(served, 300.0, pause_s=0.2)
    with capsys.disabled():
        print("\n" + told(traffic, health_s, growth))
    assert {"answer", "stream", "slow", *DISCONNECTS} <= set(traffic.ended)
    assert max(health_s) < HEALTH_S
    assert max(growth) < MAX_GROWTH
