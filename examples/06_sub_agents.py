"""An agent hands work to sub-agents; each has its own session, and the parent keeps its tokens.

pip install -c constraints.txt -e ".[demo]"
python examples/06_sub_agents.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent import ChatDLite
from dlite_agent.nano.agent import repair_tools
from dlite_agent.nano.world import make_task

PARENT = "You hand each repository to a sub-agent, and say what came of it."


def repair(repository: int) -> str:
    """Let a sub-agent repair a repository."""
    task = make_task(repository, size="tiny")
    with tempfile.TemporaryDirectory() as scratch:
        folder = task.materialise(Path(scratch))
        agent = create_agent(make_model(), repair_tools(folder), system_prompt="Repair it.")
        request: Any = {"messages": [HumanMessage(task.prompt)]}
        agent.invoke(request, {"recursion_limit": 40})
        return "The tests pass." if task.solved(folder) else "The tests still fail."


def make_model() -> ChatDLite:
    return ChatDLite("nano", temperature=0, max_tokens=256, enable_thinking=False)


def main(repositories: tuple[int, ...] = (1, 2)) -> list[dict[str, Any]]:
    """The figures of the parent's turns."""
    parent = make_model().bind_tools([repair], tool_choice="repair")
    messages: list[BaseMessage] = [SystemMessage(PARENT), HumanMessage("Repair repository 1.")]
    turns = []
    for number in repositories:
        answer: AIMessage = parent.invoke(messages)  # a small model calls what it is told to
        turns.append(answer.response_metadata["dlite"])
        (call,) = answer.tool_calls
        result = repair(number)
        messages += [answer, ToolMessage(result, tool_call_id=call["id"])]
        print(f"sub-agent {number}: {result} The parent computed {turns[-1]['prefilled_tokens']}.")
    return turns


if __name__ == "__main__":
    main()
