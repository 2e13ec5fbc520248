"""Record agents with nano on held-out tasks, for `dlite-agent bench acceptance`.

    python docs/benchmarks/record_suite.py --tasks 14 > dlite_agent/bench/assets/nano.jsonl

A line is a conversation in OpenAI's form. nano answers greedily and without drafts; half of the
agents are LangChain's with four tools, half are mini-swe-agent with its `bash`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.openai_format import message_to_openai
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.nano.agent import RecordingBackend, run_repair
from dlite_agent.nano.evaluate import SEED_STRIDE
from dlite_agent.nano.mini_agent import run_mini
from dlite_agent.nano.world import Size, make_task
from dlite_agent.outputs import Generation, GenerationChunk

SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large", "large")
SEED = 5


class Recorder(RecordingBackend):
    """Keeps the last request, which holds the whole conversation so far."""

    request: ChatRequest

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        """Keep it, then as ever."""
        self.request = request
        return super().stream(request)

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Keep it, then as ever."""
        self.request = request
        return super().generate_choices(request)


def conversation(engine: Engine, number: int) -> dict[str, object]:
    """Let an agent work on a task."""
    size = SIZES[number // 2 % len(SIZES)]
    num_bugs = 3 if size == "large" else 1
    task = make_task(SEED * SEED_STRIDE + number, split="heldout", size=size, num_bugs=num_bugs)
    run, dialect = (run_mini, "bash") if number % 2 else (run_repair, "tools")
    recorder = Recorder(engine)
    with tempfile.TemporaryDirectory() as folder:
        run(recorder, task, Path(folder))
    request = recorder.request
    messages = [*request.messages, recorder.generations[-1].message]
    return {
        "name": f"{dialect}-{size}-{number}",
        "messages": [message_to_openai(message) for message in messages],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in request.tools
        ],
    }


def main() -> None:
    """Print a line a task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=14)
    tasks = parser.parse_args().tasks
    with Engine(EngineConfig(model="nano", drafter="null")) as engine:
        for number in range(tasks):
            line = json.dumps(conversation(engine, number), ensure_ascii=False)
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
