"""Keep strings that came with a request from turning into control tokens.

A string that spells a control token gets a private-use code point into the middle of the spelling
before the template sees it, and one at an edge where a template could complete a control token
around it. What still spells a control token in the rendered text was therefore written by the
template. The code points are taken out before encoding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.errors import RequestError

__all__ = ["Guard", "Sentinels", "map_json", "map_message", "map_tool"]

_PRIVATE_USE = range(0xF0000, 0xFFFFD)


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Two code points that occur in no string of a request.

    Attributes:
        mask: Breaks a spelled control token.
        mark: Encloses a message's index: where that message's own text begins.
    """

    mask: str
    mark: str

    @classmethod
    def absent_from(cls, texts: Iterable[str]) -> Sentinels:
        """Choose two that occur in none of these texts.

        Raises:
            RequestError: The texts hold every code point of a private-use plane.
        """
        used: set[str] = set()
        for text in texts:
            if not text.isascii():
                used.update(text)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        mask, mark = next(free, None), next(free, None)
        if mask is None or mark is None:
            raise RequestError(
                "the messages hold all private-use characters from U+F0000 to U+FFFFC, and two are "
                "needed to keep their text apart from the template's; leave some out"
            )
        return cls(mask, mark)

    def mark_of(self, index: int) -> str:
        """The mark of one message."""
        return f"{self.mark}{index}{self.mark}"

    def strip(self, text: str) -> str:
        """Take all sentinels out."""
        return re.sub(f"{self.mark}\\d+{self.mark}|{self.mask}", "", text)


class Guard:
    """Masks strings against one vocabulary's control tokens.

    Args:
        spellings: Of all control tokens; each has two characters or more.
        is_on: Whether it masks anything.

    Attributes:
        pattern: Regular expression, without groups, of a spelled control token.
    """

    def __init__(self, spellings: Iterable[str], *, is_on: bool = True) -> None:
        self._is_on = is_on
        ordered = sorted(spellings, key=len, reverse=True)
        self._max_length = len(ordered[0]) if ordered else 0
        self._all = "\0".join(ordered)
        self._prefixes = {token[:end] for token in ordered for end in range(1, len(token))}
        self._suffixes = {token[start:] for token in ordered for start in range(1, len(token))}
        self.pattern = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._spelled = re.compile(self.pattern)

    def spelled(self, text: str) -> list[str]:
        """All control tokens that a text spells, in order."""
        return self._spelled.findall(text)

    def mask(self, text: str, mask: str) -> str:
        """Break every spelled control token with the code point `mask`."""
        if not self._is_on:
            return text
        while self._spelled.search(text):  # again: breaking one may uncover an overlapping one
            text = self._spelled.sub(lambda match: match[0][0] + mask + match[0][1:], text)
        return text

    def mask_edges(self, text: str, mask: str) -> str:
        """Mask, and also shut off an end around which a template could complete a control token."""
        if not self._is_on:
            return text
        is_inside = 0 < len(text) < self._max_length and text in self._all
        lengths = range(1, min(len(text), self._max_length) + 1)
        is_open_before = is_inside or any(text[:n] in self._suffixes for n in lengths)
        is_open_after = is_inside or any(text[-n:] in self._prefixes for n in lengths)
        return mask * is_open_before + self.mask(text, mask) + mask * is_open_after


def map_json(value: JSON, change: Callable[[str], str]) -> JSON:
    """Change every string of a JSON value, keys included; structure and order stay.

    What Python's JSON writes as if it were one counts too: tuples, and keys that are no strings.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_key(key, change): map_json(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_json(item, change) for item in value]
    return value


def _map_key(key: str, change: Callable[[str], str]) -> str:
    return change(key) if isinstance(key, str) else key


def map_message(message: Message, change: Callable[[str], str]) -> Message:
    """Change every string of a message but its role."""

    def optional(text: str | None) -> str | None:
        return None if text is None else change(text)

    calls = tuple(
        replace(
            call,
            name=change(call.name),
            arguments=map_json(call.arguments, change),
            id=optional(call.id),
        )
        for call in message.tool_calls
    )
    return replace(
        message,
        content=change(message.content),
        reasoning=optional(message.reasoning),
        tool_calls=calls,
        tool_call_id=optional(message.tool_call_id),
        name=optional(message.name),
    )


def map_tool(tool: ToolSpec, change: Callable[[str], str]) -> ToolSpec:
    """Change every string of a tool."""
    return ToolSpec(
        change(tool.name),
        change(tool.description),
        {_map_key(key, change): map_json(item, change) for key, item in tool.parameters.items()},
    )
