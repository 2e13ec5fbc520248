"""Messages, tools and deltas: the vocabulary of the text column."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "JSON",
    "MAX_DEPTH",
    "Delta",
    "Message",
    "ReasoningDelta",
    "Role",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolSpec",
    "UnparsedToolCall",
    "is_too_deep",
]

JSON = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None
Role = Literal["system", "user", "assistant", "tool"]


MAX_DEPTH = 100
"""Objects and lists inside each other that a call or a schema may have; templates recurse."""


def is_too_deep(value: JSON) -> bool:
    """Whether a value has more than `MAX_DEPTH` objects and lists inside each other."""
    containers = [[value]]
    for _ in range(MAX_DEPTH + 1):
        containers = [
            list(inner.values()) if isinstance(inner, dict) else list(inner)
            for outer in containers
            for inner in outer
            if isinstance(inner, dict | list | tuple)
        ]
    return bool(containers)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that parsed.

    Attributes:
        name: The tool's name.
        arguments: Parsed JSON value; a mapping for everything that our parser produces. A client's
            arguments that are not JSON stay the raw text (never an error).
        id: The id that the client must echo in the tool result; None when the client sent none.
        raw_arguments: The exact text of the arguments where it is known (streamed to clients),
            else None.
    """

    name: str
    arguments: JSON
    id: str | None = None
    raw_arguments: str | None = None


@dataclass(frozen=True, slots=True)
class UnparsedToolCall:
    """What stood in a call region and is no call: data, never an exception.

    Attributes:
        text: The raw text of the region.
        error: Why it is no call, for a person.
        id: An id in the same form as a call's, so that a client can answer it.
        name: The name, where that much could be read.
    """

    text: str
    error: str
    id: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One normalised message.

    Attributes:
        role: Who speaks (`developer` is folded into `system` before).
        content: Text; parts are joined and null is empty.
        reasoning: The thought of an assistant turn; None when the client sent none.
        tool_calls: Calls of an assistant turn, in order.
        tool_call_id: For role `tool`: the call that this answers.
        name: An optional speaker or tool name.
        turn: The handle that came with an assistant turn's metadata; no part of the prompt.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    turn: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call.

    Attributes:
        name: Unique within a request.
        description: For the model.
        parameters: JSON schema of the arguments.
        strict: Whether every call of it must fit the schema, also where the model decides to call;
            no part of the prompt.
    """

    name: str
    description: str = ""
    parameters: dict[str, JSON] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thought."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call.

    The first delta of an index carries id and name; later ones only arguments text.

    Attributes:
        index: Counts calls from 0.
        arguments: JSON text to append (may be empty).
        id: Set in the first delta only.
        name: Set in the first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Delta = TextDelta | ReasoningDelta | ToolCallDelta
