"""Messages, tools and deltas: the vocabulary of the text column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from dlite_agent.chat.field_types import (
    JSON_ADVICE,
    OPTIONAL_TEXT,
    check_fields,
    is_json,
    make_tuple,
)

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
    "is_plain_json",
    "is_too_deep",
]

JSON = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None
Role = Literal["system", "user", "assistant", "tool"]
_ROLES = get_args(Role)


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
        if not containers:
            return False
    return True


def is_plain_json(value: object) -> bool:
    """Whether a value is JSON that templates can write."""
    return is_json(value) and not is_too_deep(cast(JSON, value))


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

    Raises:
        RequestError: A field is of another type.
    """

    name: str
    arguments: JSON
    id: str | None = None
    raw_arguments: str | None = None

    def __post_init__(self) -> None:
        checks = {
            "name": (isinstance(self.name, str), "a text"),
            "arguments": (is_plain_json(self.arguments), JSON_ADVICE),
            "id": (isinstance(self.id, str | None), OPTIONAL_TEXT),
            "raw_arguments": (isinstance(self.raw_arguments, str | None), OPTIONAL_TEXT),
        }
        check_fields(self, checks)


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

    Raises:
        RequestError: A field is of another type; `chat.openai_format.messages_from_openai` reads
            what OpenAI's clients send.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    turn: str | None = None

    def __post_init__(self) -> None:
        checks = {
            "role": (self.role in _ROLES, f"one of {_ROLES!r}"),
            "content": (isinstance(self.content, str), "a text; an empty one for none"),
            "reasoning": (isinstance(self.reasoning, str | None), OPTIONAL_TEXT),
            "tool_call_id": (isinstance(self.tool_call_id, str | None), OPTIONAL_TEXT),
            "name": (isinstance(self.name, str | None), OPTIONAL_TEXT),
            "turn": (isinstance(self.turn, str | None), OPTIONAL_TEXT),
        }
        check_fields(self, checks)
        make_tuple(self, "tool_calls", ToolCall, "a tuple of ToolCall")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call.

    Attributes:
        name: Unique within a request.
        description: For the model.
        parameters: JSON schema of the arguments.
        strict: Whether every call of it must fit the schema, also where the model decides to call;
            no part of the prompt.

    Raises:
        RequestError: A field is of another type.
    """

    name: str
    description: str = ""
    parameters: dict[str, JSON] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        is_schema = isinstance(self.parameters, Mapping) and is_plain_json(self.parameters)
        checks = {
            "name": (isinstance(self.name, str) and bool(self.name), "a text that is not empty"),
            "description": (isinstance(self.description, str), "a text; an empty one for none"),
            "parameters": (is_schema, f"a mapping of {JSON_ADVICE}"),
            "strict": (isinstance(self.strict, bool), "True or False"),
        }
        check_fields(self, checks)


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
