"""Two agents take turns on one engine, with one system prompt and no ids; neither pays twice.

pip install -c constraints.txt -e ".[demo]"
python examples/03_two_agents.py
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from langchain.agents import create_agent

from dlite_agent import ChatDLite
from dlite_agent.nano.agent import repair_tools
from dlite_agent.nano.world import make_task

SYSTEM = "You are a coding agent."


def run_agent(seed: int, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """One agent on a task of its own; yields the figures of its turns so far, after each step."""
    task = make_task(seed, size="tiny")
    model = ChatDLite("nano", temperature=0, max_tokens=256, enable_thinking=False)
    tools = repair_tools(task.materialise(folder))
    agent = create_agent(model, tools, system_prompt=SYSTEM)
    request = {"messages": [{"role": "user", "content": task.prompt}]}
    for step in agent.stream(request, {"recursion_limit": 40}, stream_mode="values"):
        metadata = (message.response_metadata for message in step["messages"])
        yield [data["dlite"] for data in metadata if "dlite" in data]


def main(seeds: tuple[int, int] = (1, 2)) -> list[list[dict[str, Any]]]:
    turns: list[list[dict[str, Any]]] = [[], []]
    with tempfile.TemporaryDirectory() as scratch:
        agents = [run_agent(seed, Path(scratch) / str(seed)) for seed in seeds]
        for steps in itertools.zip_longest(*agents):
            turns = [now or before for now, before in zip(steps, turns, strict=True)]
    for name, (first, *later) in zip("AB", turns, strict=True):
        # A turn has to compute what is new, and the last token that was sampled before.
        needed = sum(turn["new_tokens"] + 1 for turn in later)
        prefilled = sum(turn["prefilled_tokens"] for turn in later)
        print(
            f"agent {name}: {len(later) + 1} turns, {prefilled} of {needed} rows, "
            f"A = {prefilled / needed if needed else 1:.2f}; "
            f"{first['cached_tokens']} of its first {first['prompt_tokens']} tokens were cached"
        )
    return turns


if __name__ == "__main__":
    main()
