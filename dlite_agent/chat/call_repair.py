"""Python's spelling of JSON, rewritten while it is generated.

Models that are not held to a grammar write `True`, `None`, single quotes and a comma before a
closing bracket. Each of these has one meaning and is certain at once, so that what is streamed is
what the call holds in the end. Anything else that is wrong stays wrong: a quote or a bracket that
is missing could stand in more than one place, and a call must not be guessed (decision 0011).
"""

from __future__ import annotations

__all__ = ["PythonSpelling"]

_WORDS = {"True": "true", "False": "false", "None": "null"}


class PythonSpelling:
    """Rewrites one value, character by character.

    Attributes:
        was_repaired: Whether anything was rewritten.
    """

    def __init__(self) -> None:
        self.was_repaired = False
        self._quote = ""  # what ends the string that is open
        self._is_escaped = False
        self._word = ""
        self._comma = ""  # a comma and the space behind it

    def feed(self, char: str) -> str:
        """Read one character; return what is certain now, which may be nothing."""
        if self._quote:
            return self._string_char(char)
        if char.isalpha():
            self._word += char
            return ""
        if self._comma and not self._word and char in " \t\n\r":
            self._comma += char
            return ""
        before = self.flush() if char not in "]}" else self._close()
        if char in "'\"":
            self._quote = char
            self.was_repaired |= char == "'"
            return before + '"'
        if char == ",":
            self._comma = char
            return before
        return before + char

    def flush(self) -> str:
        """What is held back, at the end of the text or of a value."""
        word = _WORDS.get(self._word, self._word)
        self.was_repaired |= word != self._word
        held = self._comma + word + "\\" * self._is_escaped
        self._word = self._comma = ""
        self._is_escaped = False
        return held

    def _close(self) -> str:
        if self._comma and not self._word:
            self.was_repaired = True
            self._comma = self._comma[1:]
        return self.flush()

    def _string_char(self, char: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
            return char if char == "'" == self._quote else "\\" + char
        if char == "\\":
            self._is_escaped = True
            return ""
        if char == self._quote:
            self._quote = ""
            return '"'
        return '\\"' if char == '"' else char
