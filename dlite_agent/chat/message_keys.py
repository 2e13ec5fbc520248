"""Chained keys: the same for every way in which a client may send one history back.

Clients send the transcript back changed: reasoning dropped, JSON re-spaced, keys re-ordered, ids
renamed. The key of a message covers everything before it and leaves out what changes by itself:

    key[i] = H(key[i - 1] ‖ role ‖ content ‖ ordinal ‖ calls)
    key[-1] = H(tools ‖ template variables)

- content: of an assistant, without a thought at its start (`chat.inline_thought`) and stripped at
  the ends (templates and clients trim it); of everybody else byte for byte, since what a person or
  a tool said is what the model read.
- calls: name and arguments as canonical JSON: sorted keys, no spaces, string values byte for byte.
  JSON text and the value that it parses to are equal, and so are 1 and 1.0. No ids.
- ordinal: which of the calls before it a tool message answers; its id only says so.
- not covered: reasoning, ids, names of speakers.

Whoever generates a turn records its token ids under the forms that its message may have when it
comes back (`turn_forms`); `dlite_agent.chat.replay` finds them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from dlite_agent.chat.inline_thought import thought_apart
from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec, UnparsedToolCall

__all__ = [
    "TurnForm",
    "canonical_arguments",
    "chain_keys",
    "lone_keys",
    "reasoning_digest",
    "seed_key",
    "turn_forms",
]

_KEY_BYTES = 16
# They shape a turn's generation prompt only, which is part of its record, never the history before.
_TURN_KWARGS = frozenset({"add_generation_prompt", "continue_final_message", "enable_thinking"})
_EXACT_FLOAT = 2.0**53  # whole numbers below it are the same in float64 and in JSON text
_MAX_ENCODINGS = 3  # arguments that are JSON text of JSON text … are unpacked so often
_ANSWERED = ""  # in place of a call's id


def seed_key(tools: Sequence[ToolSpec], template_kwargs: Mapping[str, JSON]) -> bytes:
    """Key of an empty conversation with these tools and template variables.

    The order of tools and of schema keys does not matter (clients shuffle both), nor do variables
    that only shape the generation prompt (`enable_thinking`): clients switch them turn by turn.
    """
    specs = sorted(_canonical_json([t.name, t.description, dict(t.parameters)]) for t in tools)
    kwargs = {name: value for name, value in template_kwargs.items() if name not in _TURN_KWARGS}
    return _chain(b"", *specs, _canonical_json(kwargs))


def chain_keys(messages: Sequence[Message], seed: bytes) -> tuple[bytes, ...]:
    """Chained key of each message; `keys[i]` covers messages 0..i. Linear in the text."""
    keys: list[bytes] = []
    key = seed
    open_calls: list[str | None] = []  # ids of the newest calls, `_ANSWERED` once they are
    for message in messages:
        ordinal = -1
        if message.role == "assistant":
            open_calls = [call.id or None for call in message.tool_calls]
        elif message.role == "tool":
            ordinal = _answer(open_calls, message.tool_call_id or None)
        key = _message_key(key, message, message.tool_calls, ordinal)
        keys.append(key)
    return tuple(keys)


def lone_keys(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Key of each message by itself, whatever stands before it."""
    return tuple(_message_key(b"", message, message.tool_calls, -1) for message in messages)


class TurnForm(NamedTuple):
    """A form in which a generated message may come back.

    Attributes:
        key: Chained key of the message.
        reasoning_digest: `reasoning_digest` of its thought.
    """

    key: bytes
    reasoning_digest: bytes


def turn_forms(
    previous: bytes, message: Message, unparsed: Sequence[UnparsedToolCall] = ()
) -> tuple[TurnForm, ...]:
    """Forms in which a generated message may come back; record the turn under each.

    A client that got a call region which is no call either drops it or replays it as a call with
    raw arguments behind the others. A client that drops the thought of an answer whose text spells
    one out seems to send that one.

    Args:
        previous: `ReplayPlan.key` of the request that was answered.
        message: The answer.
        unparsed: Its call regions that are no call, in order.
    """
    kept, dropped = map(thought_apart, (message, replace(message, reasoning=None)))
    messages = [kept] if dropped == replace(kept, reasoning=None) else [kept, dropped]
    calls = [message.tool_calls]
    if unparsed:
        raw = tuple(ToolCall(region.name or "", region.text) for region in unparsed)
        calls.append((*message.tool_calls, *raw))
    forms = (
        TurnForm(_message_key(previous, m, c, -1), reasoning_digest(m.reasoning))
        for m in messages
        for c in calls
    )
    return tuple(dict.fromkeys(forms))


def reasoning_digest(reasoning: str | None) -> bytes:
    """Digest of a thought, ends stripped as templates do; empty bytes when there is none."""
    text = (reasoning or "").strip()
    return blake2b(_utf8(text), digest_size=_KEY_BYTES).digest() if text else b""


def canonical_arguments(arguments: JSON) -> bytes:
    """Arguments as bytes that are equal exactly when the calls are.

    Text that is JSON counts as its value, blank text and null as no arguments, and any other text
    as itself with its ends stripped.
    """
    value = arguments
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = value.strip()
            break
    return _canonical_json({} if value is None or value == "" else value)


def _canonical_json(value: JSON) -> bytes:
    text = json.dumps(value, default=str)
    value = json.loads(text, parse_float=_number)
    return _utf8(json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")))


def _number(text: str) -> int | float:
    """JSON has one kind of number, and clients in JavaScript write 1 for 1.0."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT_FLOAT else value


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _chain(previous: bytes, *fields: bytes) -> bytes:
    digest = blake2b(previous, digest_size=_KEY_BYTES)
    for field in fields:  # a length before each, so that no two lists of fields look alike
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def _message_key(
    previous: bytes, message: Message, calls: Sequence[ToolCall], ordinal: int
) -> bytes:
    content = message.content
    if message.role == "assistant":
        content = thought_apart(message).content.strip()
    fields = [_utf8(message.role), _utf8(content), b"%d" % ordinal]
    for call in calls:
        fields += [_utf8(call.name), canonical_arguments(call.arguments)]
    return _chain(previous, *fields)


def _answer(open_calls: list[str | None], call_id: str | None) -> int:
    """Close the call that a tool message answers and return its index.

    That is the open call with its id; where the id says nothing, the first open one; where none is
    open, one past the last.
    """
    places = [i for i, open_id in enumerate(open_calls) if open_id != _ANSWERED]
    named = [i for i in places if open_calls[i] == call_id and call_id is not None]
    ordinal = next(iter(named or places), len(open_calls))
    if ordinal < len(open_calls):
        open_calls[ordinal] = _ANSWERED
    return ordinal
