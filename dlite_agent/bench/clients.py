"""What agents' clients do to a transcript between two calls: the behaviours that benches inject.

They work on OpenAI's form, as clients do, and what they send is read as a server reads it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.chat.openai_format import (
    message_to_openai,
    messages_from_openai,
    parse_arguments,
    tools_from_openai,
)

__all__ = [
    "CLIENTS",
    "HARMLESS",
    "MIXED",
    "SUBAGENT",
    "Sent",
    "aside",
    "behaviour_of_turn",
    "send",
]

Sent = tuple[tuple[Message, ...], tuple[ToolSpec, ...]]
"""Messages and tools of one request."""
_Object = dict[str, Any]
_Request = tuple[list[_Object], list[_Object]]

_KEPT_RESULTS = 2
_ELIDED = "Old environment output: ({count} lines omitted)"
_COMPACTED_TURNS = 4
_SUMMARY = "What was done before is summarised here: {count} messages."
_EDITED_TURN = 2


def _as_it_was(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    del turn
    return messages, tools


def _answers(
    change: Callable[[_Object], object],
) -> Callable[[list[_Object], list[_Object], int], _Request]:
    """Changes each message of the assistant."""

    def rewrite(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
        del turn
        for message in messages:
            if message["role"] == "assistant":
                change(message)
        return messages, tools

    return rewrite


def _without_reasoning(message: _Object) -> None:
    message.pop("reasoning_content", None)


def _renamed_reasoning(message: _Object) -> None:
    message["reasoning"] = message.pop("reasoning_content", None)


def _empty_think(message: _Object) -> None:
    message.pop("reasoning_content", None)
    message["content"] = "<think>\n\n</think>\n\n" + (message["content"] or "")


def _rewritten_json(message: _Object) -> None:
    for call in message.get("tool_calls") or ():
        arguments = parse_arguments(call["function"]["arguments"])
        if isinstance(arguments, dict):
            other = dict(reversed(arguments.items()))
            call["function"]["arguments"] = json.dumps(other, separators=(",", ":"))


def _renamed_ids(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    for message in messages:
        for owner in (message, *(message.get("tool_calls") or ())):
            for name in ("id", "tool_call_id"):
                if owner.get(name):
                    owner[name] = f"toolu_{turn}_{owner[name][-8:]}"
    return messages, tools


def _shuffled_tools(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    """Every other time in another order, with their schemas' keys in another order."""
    if turn % 2 == 0:
        return messages, tools
    for tool in tools:
        function = tool["function"]
        function["parameters"] = dict(reversed(function["parameters"].items()))
    return messages, tools[::-1]


def _timestamp(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    """At the head of the system prompt."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    messages[0]["content"] = f"It is 12:{turn:02d}.\n" + messages[0]["content"]
    return messages, tools


def _elided(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    """All but the last results are cut, as SWE-agent's `last_n_observations` does."""
    del turn
    results = [message for message in messages if message["role"] == "tool"]
    for message in results[:-_KEPT_RESULTS]:
        message["content"] = _ELIDED.format(count=message["content"].count("\n") + 1)
    return messages, tools


def _compacted(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    """At every fourth turn, what came before the last answer becomes one message, a summary."""
    num_turns = turn - turn % _COMPACTED_TURNS
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not num_turns or num_turns > len(starts):
        return messages, tools
    head, stop = starts[0], starts[num_turns - 1]
    summary = {"role": "user", "content": _SUMMARY.format(count=stop - head)}
    return [*messages[:head], summary, *messages[stop:]], tools


def _edited(messages: list[_Object], tools: list[_Object], turn: int) -> _Request:
    """From the third request on the first answer has other words and another indentation."""
    if turn >= _EDITED_TURN:
        answer = next(message for message in messages if message["role"] == "assistant")
        answer["content"] = "    Corrected: " + (answer["content"] or "")
    return messages, tools


CLIENTS: Mapping[str, Callable[[list[_Object], list[_Object], int], _Request]] = {
    "append-only": _as_it_was,
    "reasoning-dropped": _answers(_without_reasoning),
    "reasoning-renamed": _answers(_renamed_reasoning),
    "empty-think": _answers(_empty_think),
    "json-rewritten": _answers(_rewritten_json),
    "ids-renamed": _renamed_ids,
    "tools-shuffled": _shuffled_tools,
    "mixed": _as_it_was,
    "timestamp": _timestamp,
    "elided": _elided,
    "compacted": _compacted,
    "edited": _edited,
    "subagent": _as_it_was,
}
"""Name → what is sent for a history, the tools, and the number of the turn."""
HARMLESS = tuple(CLIENTS)[1:7]
"""Those that change how things are written, and not what was said."""
MIXED = "mixed"
"""Behaves as one of the harmless in some turns, and as append-only in the others."""
SUBAGENT = "subagent"
"""Lets another conversation ask something before each turn but the first."""


def behaviour_of_turn(client: str, rate: float, chance: random.Random) -> str:
    """What a client does in a turn: what it is named after, or what is drawn.

    Args:
        client: Of `CLIENTS`.
        rate: In which share of its turns the mixed one changes anything.
        chance: Draws.
    """
    if client != MIXED:
        return client
    return chance.choice(HARMLESS) if chance.random() < rate else "append-only"


def aside(client: str, messages: tuple[Message, ...], turn: int) -> tuple[Message, ...]:
    """What a sub-agent asks before a turn, behind the same system prompt; nothing for most."""
    if client != SUBAGENT or turn == 0:
        return ()
    head = tuple(message for message in messages[:1] if message.role == "system")
    return (*head, Message("user", f"Give this conversation a title of {turn + 2} words."))


def send(
    client: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], turn: int
) -> Sent:
    """What a client sends, as it is read."""
    wire = [cast(_Object, message_to_openai(message)) for message in messages]
    sent, offered = CLIENTS[client](wire, [_tool(tool) for tool in tools], turn)
    return messages_from_openai(sent), tools_from_openai(offered)


def _tool(tool: ToolSpec) -> _Object:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}
