"""An agent repairs a small repository: a LangChain agent on the embedded model.

pip install -c constraints.txt -e ".[demo]"
python examples/01_agent.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from langchain.agents import create_agent

from dlite_agent import ChatDLite
from dlite_agent.nano.agent import repair_tools
from dlite_agent.nano.world import make_task


def main(seed: int = 1, size: str = "small") -> bool:
    task = make_task(seed, size=size)  # a package with one bug, and tests that find it
    model = ChatDLite("nano", temperature=0, max_tokens=512, enable_thinking=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = task.materialise(Path(scratch) / "repository")
        agent = create_agent(model, repair_tools(folder))
        request = {"messages": [{"role": "user", "content": task.prompt}]}
        for step in agent.stream(request, {"recursion_limit": 40}, stream_mode="values"):
            message = step["messages"][-1]
            message.pretty_print()
            stats = message.response_metadata.get("dlite")
            if stats:
                print(f"({stats['new_tokens']} new, {stats['prefilled_tokens']} prefilled)")
        solved = task.solved(folder)
    print("\nThe tests pass." if solved else "\nThe tests still fail.")
    return solved


if __name__ == "__main__":
    main()
