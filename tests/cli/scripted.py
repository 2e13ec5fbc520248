"""Agents that play the oracle's part of a task, as the demo runs them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlite_agent.chat.messages import Message
from dlite_agent.nano.agent import AgentRun
from dlite_agent.nano.world import Task, make_task
from dlite_agent.outputs import Generation, TurnStats
from dlite_agent.testing import ScriptedEngine


def call(name: str, **arguments: str) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def solution(task: Task) -> list[str]:
    """What an agent that solves the task says, turn by turn."""
    path, broken = task.broken_path, task.broken
    edit = {"path": path, "old": broken.line(broken.written), "new": broken.line(broken.right)}
    return [
        "I look.\n" + call("list_files"),
        call("run_tests"),
        call("read_file", path=path),
        call("edit_file", **edit),
        call("run_tests"),
        "Done.",
    ]


def solver(*, steps: int | None = None, then: Sequence[str] = ()) -> ScriptedEngine:
    """Plays the first `steps` turns of the demo's task, all by default, and then others."""
    turns = solution(make_task(0, split="heldout", size="tiny"))
    return ScriptedEngine([*turns[:steps], *then], model_name="nano")


def demo_arguments(**changes: Any) -> argparse.Namespace:
    options: dict[str, Any] = {
        "seed": 0,
        "size": "tiny",
        "bugs": 1,
        "dtype": "float32",
        "drafter": "auto",
        "no_think": True,
        "json": False,
    }
    return argparse.Namespace(**(options | changes))


def agent_run(*turns: tuple[list[int], list[int]], solved: bool = True) -> AgentRun:
    """A run of turns, each the prompt's ids and the sampled ones."""
    return AgentRun(
        solved,
        tuple(
            Generation(
                Message("assistant", ""),
                "stop",
                replace(TurnStats(), prompt_tokens=len(prompt), prefill_s=0.5, decode_s=0.5),
                tuple(sampled),
                tuple(prompt),
            )
            for prompt, sampled in turns
        ),
        1.0,
    )
