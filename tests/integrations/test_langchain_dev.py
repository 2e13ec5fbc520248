"""`langgraph dev` itself, as the README says it: its server, its check for blocking calls.

Needs `langgraph-cli[inmem]`, which is no dependency of the tests; it asks nothing of a network.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.nano.world import make_task

pytest.importorskip("langgraph_api", reason='needs pip install "langgraph-cli[inmem]"')
langgraph_sdk = pytest.importorskip("langgraph_sdk")

FOLDER = Path(__file__).parents[2] / "integrations" / "langchain"
LIMIT_S = 300.0

pytestmark = [pytest.mark.host, pytest.mark.soak, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a `langgraph dev`, and where it logs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = tmp_path / "server.log"
    command = [Path(sys.executable).with_name("langgraph"), "dev", "--no-browser", "--no-reload"]
    offline = {"LANGSMITH_TRACING": "false", "LANGGRAPH_CLI_NO_ANALYTICS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=FOLDER,
            env={**os.environ, **offline},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            process.wait(LIMIT_S)


async def connected(url: str) -> Any:
    client = langgraph_sdk.get_client(url=url)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await client.assistants.search()
            except httpx.TransportError:
                await asyncio.sleep(0.2)
            else:
                return client


async def run(client: Any, thread_id: str, request: str, folder: Path) -> list[str]:
    """Take a run on a thread; the events of its stream."""
    config = {"configurable": {"folder": str(folder)}, "recursion_limit": 40}
    asked = {"messages": [{"role": "user", "content": request}]}
    modes = ["messages-tuple", "values"]
    stream = client.runs.stream(thread_id, "repair", input=asked, config=config, stream_mode=modes)
    return [part.event async for part in stream]


async def test_a_thread_of_the_server_is_a_session(
    server: tuple[str, Path], tmp_path: Path
) -> None:
    url, log = server
    task = make_task(1, size="tiny")
    folder = task.materialise(tmp_path / "task")
    client = await connected(url)
    thread_id = (await client.threads.create())["thread_id"]
    for request in (task.prompt, "Run the tests again."):
        events = await run(client, thread_id, request, folder)
        assert "error" not in events, log.read_text()
        assert events.count("messages") > 2
    assert task.solved(folder)
    messages = (await client.threads.get_state(thread_id))["values"]["messages"]
    await client.aclose()
    first, *others = [m["response_metadata"]["dlite"] for m in messages if m["type"] == "ai"]
    assert first["cached_tokens"] == 0
    assert all(turn["cached_tokens"] > 0 for turn in others)
    assert "tool" in [message["type"] for message in messages]
    assert "BlockingError" not in log.read_text()
