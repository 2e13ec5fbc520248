"""What a schema's `pattern` and `format` ask of a text: a regular expression, and an example.

A grammar needs both. Text that is no JSON (the values of XML calls) is matched by a regular
expression of the whole text, without anchors. And a text that has to end soon can be led to an end
that an example shows; no engine says which way is the shortest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dlite_agent.chat.messages import JSON

__all__ = ["ascii_classes", "example", "examples", "whole_text"]

_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}
_ANYTHING = r"(?s:.*)"
# Characters that are tried for a class, common ones first.
_CHARACTERS = "a0A_-./@: " + "".join(map(chr, range(0x21, 0x7F))) + "é\t\n"
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(?:,\d*)?\}")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)|\((?!\?)")
_ATOM = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]"  # a class
    r"|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}|\\[dDwWsSnrtfv]|\\[^A-Za-z0-9]|[^\\^$*+?()[\]{}|]"
)
# Short texts of the formats that llguidance knows and whose end is not near from anywhere.
_FORMATS = {
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "a@b.co",
    "hostname": "a.co",
    "time": "00:00:00Z",
    "uri": "a:b",
}


class _Part(NamedTuple):
    """One alternative of an expression."""

    source: str
    example: str
    is_first: bool  # it matches at the start of a text only
    is_last: bool


def whole_text(pattern: str) -> str:
    """A regular expression for the whole of each text that a pattern is found in.

    Raises:
        ValueError: The pattern looks around, refers back, sets flags, or has anchors elsewhere
            than at an end.
    """
    parts = [
        ("" if part.is_first else _ANYTHING) + part.source + ("" if part.is_last else _ANYTHING)
        for part in _Reader(pattern).parts()
    ]
    return ascii_classes("|".join(parts))


def ascii_classes(pattern: str) -> str:
    r"""A pattern with the `\d` and `\w` of JSON Schema: ASCII's, while llguidance has Unicode's."""
    return re.sub(r"\\(.)", lambda found: _ASCII.get(found[1], found[0]), pattern, flags=re.DOTALL)


def example(pattern: str) -> str | None:
    """A short text that a pattern is found in; None where it cannot be read."""
    try:
        texts = [part.example for part in _Reader(pattern).parts()]
        return next((text for text in sorted(texts, key=len) if re.search(pattern, text)), None)
    except (ValueError, re.error):
        return None


def examples(schema: JSON | Mapping[str, JSON]) -> Iterator[str]:
    """Examples of the patterns and formats anywhere in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from examples(item)
    if not isinstance(schema, Mapping):
        return
    pattern, kind = schema.get("pattern"), schema.get("format")
    text = example(pattern) if isinstance(pattern, str) else None
    if text is None and isinstance(kind, str):
        text = _FORMATS.get(kind)
    if text:
        yield text
    for value in schema.values():
        yield from examples(value)


class _Reader:
    """Reads a pattern from left to right; structure is its own, atoms are tried with `re`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def parts(self) -> list[_Part]:
        """The alternatives of the whole pattern.

        Raises:
            ValueError: It holds something that is not read here.
        """
        parts = self._alternatives()
        if self._at < len(self._pattern):
            raise ValueError(f"the pattern {self._pattern!r} has a ')' too many")
        return parts

    def _alternatives(self) -> list[_Part]:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return parts

    def _sequence(self) -> _Part:
        is_first = self._take("^")
        start, texts = self._at, list[str]()
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$":
            texts.append(self._repeated())
        source = self._pattern[start : self._at]
        return _Part(source, "".join(texts), is_first, self._take("$"))

    def _repeated(self) -> str:
        group = _GROUP.match(self._pattern, self._at)
        text = self._atom() if group is None else self._group(group.end())
        quantifier = _QUANTIFIER.match(self._pattern, self._at)
        if quantifier is None:
            return text
        self._at = quantifier.end()
        self._take("?")  # lazy: the texts are the same
        return text * (int(quantifier[1]) if quantifier[1] else int(quantifier[0] == "+"))

    def _group(self, start: int) -> str:
        self._at = start
        parts = self._alternatives()
        if any(part.is_first or part.is_last for part in parts) or not self._take(")"):
            raise self._unreadable()
        return min((part.example for part in parts), key=len)

    def _atom(self) -> str:
        atom = _ATOM.match(self._pattern, self._at)
        if atom is None:
            raise self._unreadable()
        self._at = atom.end()
        if len(atom[0]) == 1 and atom[0] != ".":
            return atom[0]
        fits = re.compile(atom[0]).fullmatch
        return next((char for char in _CHARACTERS if fits(char)), "")

    def _take(self, char: str) -> bool:
        is_next = self._pattern.startswith(char, self._at)
        self._at += is_next
        return is_next

    def _unreadable(self) -> ValueError:
        rest = self._pattern[self._at :]
        return ValueError(f"the pattern {self._pattern!r} cannot be read at {rest!r}")
