"""A LangChain agent on a folder of yours, with a model in this process.

python agent.py FOLDER "The tests fail. Fix the bug." [--model nano]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite
from dlite_agent.nano.agent import repair_tools

SYSTEM = "You are a coding agent."


def make_agent(folder: Path, model: str = "nano") -> Any:
    """An agent with four tools (list, read and edit files, run the tests) on one folder.

    The thread's id of the checkpointer is also the session's hint, so that a second question in
    the same thread is answered from its KV.
    """
    llm = ChatDLite(model, temperature=0, max_tokens=512, enable_thinking=False)
    tools = repair_tools(folder)
    return create_agent(llm, tools, system_prompt=SYSTEM, checkpointer=InMemorySaver())


def main(arguments: Sequence[str] | None = None) -> list[Any]:
    """Run the agent on one request, print every message and what each turn cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("request")
    parser.add_argument("--model", default="nano", help="nano, a folder, or a hub name")
    options = parser.parse_args(arguments)
    agent = make_agent(options.folder, options.model)
    config = {"configurable": {"thread_id": "one"}, "recursion_limit": 40}
    messages: list[Any] = []
    request = {"messages": [{"role": "user", "content": options.request}]}
    for step in agent.stream(request, config, stream_mode="values"):
        messages = step["messages"]
        messages[-1].pretty_print()
        stats = messages[-1].response_metadata.get("dlite")
        if stats:
            print(f"({stats['new_tokens']} new, {stats['prefilled_tokens']} prefilled)")  # noqa: T201
    return messages


if __name__ == "__main__":
    main()
