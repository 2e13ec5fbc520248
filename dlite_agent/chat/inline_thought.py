"""A thought that stands inside the content, spelled out as `<think>…</think>`.

Clients without a field for it send it so. A model may also write the same characters as text; a
client's way back cannot tell the two apart, so both count as a thought, here and in the keys under
which an answer is found again.
"""

from __future__ import annotations

from dataclasses import replace

from dlite_agent.chat.messages import Message

__all__ = ["thought_apart"]

_THINK_START, _THINK_END = "<think>", "</think>"


def thought_apart(message: Message) -> Message:
    """Move the thought at the start of an assistant's content to its reasoning.

    Where the message has a reasoning already, only the same thought once more is taken off. One
    that was cut off is all thought. Applying it again changes nothing.
    """
    if message.role != "assistant":
        return message
    reasoning, content = message.reasoning, message.content
    while True:
        opened, separator, rest = content.partition(_THINK_START)
        thought, _, answer = rest.partition(_THINK_END)
        known = (reasoning or "").strip()
        if opened.strip() or not separator or known not in ("", thought.strip()):
            return replace(message, reasoning=reasoning, content=content)
        reasoning = reasoning if known else thought.strip("\n") or None
        content = answer.lstrip("\n")
