"""A LangChain agent on a folder of yours, with a model in this process.

python agent.py FOLDER "The tests fail. Fix the bug." [--model nano]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ContextEditingMiddleware
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite
from dlite_agent.integrations.langchain_middleware import ElideToolResults, FeedToolOutput
from dlite_agent.nano.agent import repair_tools

SYSTEM = "You are a coding agent."


def make_agent(folder: Path, model: str = "nano", **options: Any) -> Any:
    """An agent with four tools (list, read and edit files, run the tests) on one folder.

    The thread's id of a checkpointer is also the session's hint, so that a second question in the
    same thread is answered from its KV. Old results leave a long history in batches.
    """
    llm = ChatDLite(model, temperature=0, max_tokens=512, enable_thinking=False)
    middleware = [ContextEditingMiddleware(edits=[ElideToolResults()]), FeedToolOutput()]
    tools = repair_tools(folder)
    return create_agent(llm, tools, system_prompt=SYSTEM, middleware=middleware, **options)


async def graph(config: RunnableConfig) -> Any:
    """What `langgraph.json` names; the server brings its own checkpointer.

    `configurable` may hold a `folder` (else the working directory) and a `model` (else `nano`).
    """
    chosen = config.get("configurable", {})
    folder, model = Path(chosen.get("folder", ".")), chosen.get("model", "nano")
    return await asyncio.to_thread(make_agent, folder, model)  # it looks at the folder


def main(arguments: Sequence[str] | None = None) -> list[Any]:
    """Run the agent on one request, print every message and what each turn cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("request")
    parser.add_argument("--model", default="nano", help="nano, a folder, or a hub name")
    options = parser.parse_args(arguments)
    agent = make_agent(options.folder, options.model, checkpointer=InMemorySaver())
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
