"""An agent of the tests: asks, runs the tools that the model calls, sends everything back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.config import SamplingParams
from dlite_agent.outputs import Generation

READ_FILE = ToolSpec(
    "read_file",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}, "line": {"type": "integer"}}},
)


def sampled(seed: int, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed, max_tokens=max_tokens)


@dataclass
class Agent:
    """One conversation.

    Attributes:
        task: The first user message.
        system: The system prompt.
        hint: Sent as session hint.
        edit: What the client does to an answer before it sends it back.
    """

    task: str
    system: str = "You repair programs. Use the tools, then say what you did."
    hint: str | None = None
    edit: Callable[[Message], Message] = lambda message: message
    messages: list[Message] = field(default_factory=list)
    turns: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [Message("system", self.system), Message("user", self.task)]

    def request(self, *, max_tokens: int = 60) -> ChatRequest:
        return ChatRequest(
            tuple(self.messages),
            tools=(READ_FILE,),
            sampling=sampled(len(self.turns), max_tokens),
            session_hint=self.hint,
        )

    def take(self, generation: Generation) -> None:
        """Append the answer, and a tool result for each call (and one if there is none)."""
        self.turns.append(generation)
        message = self.edit(generation.message)
        self.messages.append(message)
        for number, call in enumerate(message.tool_calls):
            content = f"{self.task}: result {len(self.turns)}.{number} of {call.arguments}"
            self.messages.append(Message("tool", content, tool_call_id=call.id))
        if not message.tool_calls:
            self.messages.append(Message("tool", f"{self.task}: nothing was called"))


def respaced(message: Message) -> Message:
    """What clients do to it: thoughts dropped, keys re-ordered, ids renamed, ends cut."""
    calls = tuple(
        replace(
            call,
            id=f"renamed_{number}",
            raw_arguments=None,
            arguments=dict(reversed(call.arguments.items()))
            if isinstance(call.arguments, dict)
            else call.arguments,
        )
        for number, call in enumerate(message.tool_calls)
    )
    return replace(message, reasoning=None, tool_calls=calls, content=message.content.strip())
