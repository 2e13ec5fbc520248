"""Go back to an earlier step of an agent and take another way, without computing the past again.

pip install -c constraints.txt -e ".[demo]"
python examples/05_time_travel.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite
from dlite_agent.nano.agent import repair_tools
from dlite_agent.nano.world import make_task

CONFIG: Any = {"configurable": {"thread_id": "repair"}, "recursion_limit": 40}


def last_turn(state: dict[str, Any]) -> dict[str, Any]:
    answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
    return answers[-1].response_metadata["dlite"]


def main(seed: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of the last turn, and of the first one on the other way."""
    task = make_task(seed, size="tiny")
    model = ChatDLite("nano", temperature=0, max_tokens=256, enable_thinking=False)
    with tempfile.TemporaryDirectory() as scratch:
        tools = repair_tools(task.materialise(Path(scratch)))
        agent = create_agent(model, tools, checkpointer=InMemorySaver())
        ended = agent.invoke({"messages": [{"role": "user", "content": task.prompt}]}, CONFIG)
        # The oldest step at which the model waits with a tool's result: there the ways part.
        waiting = [step for step in agent.get_state_history(CONFIG) if step.next == ("model",)]
        past = [step for step in waiting if isinstance(step.values["messages"][-1], ToolMessage)][
            -1
        ]
        result = past.values["messages"][-1]
        other = result.model_copy(update={"content": f"{result.content}\nnotes.txt"})
        fork = agent.update_state(past.config, {"messages": [other]}, as_node="tools")
        branch = next(iter(agent.stream(None, {**CONFIG, **fork}, stream_mode="updates")))
    turns = last_turn(ended), last_turn(branch["model"])
    for name, turn in zip(("the end", "the other way"), turns, strict=True):
        print(f"{name}: {turn['prompt_tokens']} prompt tokens, {turn['prefilled_tokens']} computed")
    return turns


if __name__ == "__main__":
    main()
