"""What agents' clients do to a transcript between two calls: the behaviours that benches inject."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec

__all__ = ["CLIENTS", "Sent", "send"]

Sent = tuple[tuple[Message, ...], tuple[ToolSpec, ...]]
"""Messages and tools of one request."""

_KEPT_RESULTS = 2
_ELIDED = "Old environment output: ({count} lines omitted)"


def _as_it_was(messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int) -> Sent:
    del turn
    return messages, tools


def _without_reasoning(
    messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int
) -> Sent:
    del turn
    return tuple(replace(message, reasoning=None, turn=None) for message in messages), tools


def _rewritten_json(messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int) -> Sent:
    """Other spaces, other order of keys, other ids."""
    changed = tuple(
        replace(
            message,
            turn=None,
            tool_calls=tuple(_rewritten(call, turn) for call in message.tool_calls),
            tool_call_id=_renamed(message.tool_call_id, turn),
        )
        for message in messages
    )
    return changed, tools


def _shuffled_tools(messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int) -> Sent:
    if turn % 2 == 0:
        return messages, tools
    shuffled = tuple(
        replace(tool, parameters=dict(reversed(tool.parameters.items()))) for tool in tools[::-1]
    )
    return messages, shuffled


def _timestamp(messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int) -> Sent:
    """At the head of the system prompt."""
    head = f"It is 12:{turn:02d}.\n"
    if not messages or messages[0].role != "system":
        return (Message("system", head), *messages), tools
    return (replace(messages[0], content=head + messages[0].content), *messages[1:]), tools


def _elided(messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int) -> Sent:
    """All but the last results are cut, as SWE-agent's `last_n_observations` does."""
    del turn
    results = [i for i, message in enumerate(messages) if message.role == "tool"]
    old = set(results[:-_KEPT_RESULTS])
    changed = tuple(
        replace(message, content=_ELIDED.format(count=message.content.count("\n") + 1))
        if i in old
        else message
        for i, message in enumerate(messages)
    )
    return changed, tools


CLIENTS: Mapping[str, Callable[[tuple[Message, ...], tuple[ToolSpec, ...], int], Sent]] = {
    "append-only": _as_it_was,
    "reasoning-dropped": _without_reasoning,
    "json-rewritten": _rewritten_json,
    "tools-shuffled": _shuffled_tools,
    "timestamp": _timestamp,
    "elided": _elided,
}
"""Name → what is sent for a history, the tools, and the number of the turn."""


def send(
    client: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int
) -> Sent:
    """What a client sends."""
    return CLIENTS[client](messages, tools, turn)


def _rewritten(call: ToolCall, turn: int) -> ToolCall:
    arguments: JSON = call.arguments
    if isinstance(arguments, dict):
        arguments = json.loads(json.dumps(dict(reversed(arguments.items()))))
    return ToolCall(call.name, arguments, id=_renamed(call.id, turn))


def _renamed(call_id: str | None, turn: int) -> str | None:
    return None if call_id is None else f"toolu_{turn}_{call_id[-8:]}"
