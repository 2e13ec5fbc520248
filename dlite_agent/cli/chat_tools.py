"""What a tool of the chat is, and whom it asks before it writes or runs anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dlite_agent.chat.messages import JSON, ToolSpec

__all__ = ["Answer", "Arguments", "ChatTool", "Consent", "OnOutput", "ToolStopped", "misfit"]

Arguments = Mapping[str, JSON]
OnOutput = Callable[[str], None]
Answer = Literal["yes", "no", "always"]


class ToolStopped(KeyboardInterrupt):
    """Ctrl-C while a tool ran, which has ended.

    Attributes:
        output: What it had printed.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


@dataclass(frozen=True, slots=True)
class ChatTool:
    """A tool that the model may call in the chat.

    Attributes:
        spec: For the model.
        run: Takes arguments, and what to tell of the output so far; every mistake of the model
            comes back as text that begins with `Error:`.
        is_reading: It changes nothing and runs nothing, so that nobody is asked.
        is_asked_each: "Always" holds for the same arguments only.
        preview: What a call would change, in lines for the user.
        preview_lexer: Pygments' name for what colours them.
    """

    spec: ToolSpec
    run: Callable[[Arguments, OnOutput], str]
    is_reading: bool = False
    is_asked_each: bool = False
    preview: Callable[[Arguments], list[str]] | None = None
    preview_lexer: str = "diff"


@dataclass(slots=True)
class Consent:
    """Whether a call that writes or runs something may go on.

    Attributes:
        is_given: To everything, from the start.
        ask: Asks the user; None where nobody can be asked.
    """

    is_given: bool = False
    ask: Callable[[], Answer] | None = None
    _always: set[str] = field(default_factory=set)

    def refusal(self, tool: ChatTool, arguments: Arguments) -> str | None:
        """Why a call may not run, for the model; None: it may."""
        if tool.is_reading or self.is_given:
            return None
        kind = tool.spec.name
        if tool.is_asked_each:
            kind += json.dumps(dict(arguments), sort_keys=True)
        if kind in self._always:
            return None
        if self.ask is None:
            return (
                f"Error: {tool.spec.name} was refused: it needs the user's consent, and nobody can "
                "be asked. Go on without it, and say what you would have done."
            )
        answer = self.ask()
        if answer == "always":
            self._always.add(kind)
        return "Error: the user declined this call." if answer == "no" else None


def misfit(spec: ToolSpec, arguments: JSON) -> str | None:
    """What is wrong with the arguments of a call, for the model; None where they fit."""
    if not isinstance(arguments, dict):
        return f"Error: the arguments of {spec.name} are no JSON object"
    properties = spec.parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    required = spec.parameters.get("required")
    needed = required if isinstance(required, list) else []
    if set(arguments) - set(known) or not all(name in arguments for name in needed):
        takes, got = ", ".join(known) or "no arguments", ", ".join(arguments) or "none"
        return f"Error: {spec.name} takes {takes}; got {got}"
    for name, value in arguments.items():
        schema = known[name]
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        if is_text and not isinstance(value, str):
            return f"Error: {name} of {spec.name} must be a text"
    return None
