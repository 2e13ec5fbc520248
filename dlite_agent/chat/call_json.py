"""One call in the hermes form, `{"name": N, "arguments": {...}}`, read while it is generated.

The scanner knows as much JSON as it needs to say, after every character, whether a string is open,
what the name is and which characters belong to the arguments. Whether the whole is valid JSON is
decided once, at the end, by `json.loads`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection

from dlite_agent.chat.call_repair import PythonSpelling
from dlite_agent.chat.markers import CALL, CALL_END
from dlite_agent.chat.messages import JSON, MAX_DEPTH, ToolCall, UnparsedToolCall, is_too_deep

__all__ = ["CallScanner", "arguments_from_json", "finite", "quoted", "refuse_constant"]

_WHITESPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENT_KEYS = ("arguments", "parameters")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class CallScanner:
    """Reads one call, character by character.

    Accepted beside the exact form: keys in any order, unknown keys, `parameters` for `arguments`,
    missing or null arguments (`{}`) of a tool that requires none, an object that was encoded twice,
    Python's spelling of JSON (`chat.call_repair`), and raw control characters inside strings, which
    are escaped.

    Args:
        needy: Names of tools that require arguments.

    Attributes:
        name: The tool's name as soon as its string has ended.
        error: Why this is no call, as soon as that is certain before the end.
        in_string: Whether the next character continues a JSON string.
        is_complete: Whether the object has ended.
        rest: Text of further calls after `close`: none.
    """

    rest = ""

    def __init__(self, needy: Collection[str] = ()) -> None:
        self._needy = needy
        self.name: str | None = None
        self.error: str | None = None
        self.in_string = False
        self.is_complete = False
        self._has_controls = False  # unescaped, in a string
        self._spelling = PythonSpelling()
        self._raw: list[str] = []
        self._json: list[str] = []  # the same in JSON's spelling
        self._step: Callable[[str], None] = self._before_object
        self._key = ""
        self._span: list[str] = []  # the key or value that is being read
        self._stack: list[str] = []  # closers that the value still needs
        self._is_escaped = False
        self._arguments: list[str] | None = None  # the span itself while an object is being read
        self._num_taken = 0

    @property
    def text(self) -> str:
        """Everything that was read."""
        return "".join(self._raw)

    @property
    def notes(self) -> list[str]:
        """Repairs, for a person."""
        notes = []
        if self._has_controls:
            notes.append(f"raw control characters in the call {self.name!r} were escaped")
        if self._spelling.was_repaired:
            notes.append(f"the call {self.name!r} was in Python's spelling and is JSON now")
        return notes

    @property
    def expected_markers(self) -> tuple[str, ...]:
        """Markers that would mean something now, if they are spelled out."""
        if not self.in_string:
            return (CALL_END, CALL)
        return (CALL_END,) if self._at_line_start else ()

    def takes(self, marker: str) -> bool:
        """Whether a marker is text of a string here; no string goes on behind a raw newline."""
        return self.in_string and not (marker == CALL_END and self._at_line_start)

    @property
    def _at_line_start(self) -> bool:
        return bool(self._raw) and self._raw[-1] == "\n"

    def begins_another(self, char: str) -> bool:
        """Whether another call begins, in the same region."""
        return char == "{" and self.is_complete and self.error is None

    def feed(self, char: str) -> None:
        """Read one character."""
        self._read(self._spelling.feed(char))
        self._raw.append(char)

    def _read(self, text: str) -> None:
        for char in text:
            self._json.append(char)
            if self.error is None:
                if self.in_string:
                    self._string_char(char)
                else:
                    self._step(char)

    def take_arguments(self) -> str:
        """Arguments text that is new since the last call; empty until the name is known."""
        if self.name is None or self._arguments is None:
            return ""
        new = "".join(self._arguments[self._num_taken :])
        self._num_taken = len(self._arguments)
        return new

    def close(self, call_id: str, cut: str | None = None) -> ToolCall | UnparsedToolCall:
        """What the text was.

        Args:
            call_id: Id of the result, whichever it is.
            cut: Why the text is not whole, when that is known; then it is never a call.
        """
        self._read(self._spelling.flush())
        text = "".join(self._raw)
        error = cut or self.error
        if error is None and not self.is_complete:
            error = "the JSON object does not end" if text.strip() else "the call is empty"
        if error is None and self.name is None:
            error = 'there is no "name"'
        if error is None and not self._arguments:
            error = f"the arguments are missing, and {self.name!r} requires some"
        if error is None:
            raw = "".join(self._arguments or [])
            try:
                _loads("".join(self._json))
                return ToolCall(self.name or "", arguments_from_json(raw), call_id, raw)
            except (ValueError, RecursionError) as problem:
                error = f"not JSON: {problem}"
        return UnparsedToolCall(text.strip("\n"), error, call_id, self.name)

    # One method a state; each reads a character outside strings.

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._step = self._before_key
        elif char not in _WHITESPACE:
            self._fail(f"expected a JSON object, got {char!r}")

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._span = [char]
            self.in_string = True
            self._step = self._before_colon
        elif char == "}":
            self._complete()
        elif char not in _WHITESPACE:
            self._fail(f"expected a key in double quotes, got {char!r}")

    def _before_colon(self, char: str) -> None:
        if char == ":":
            self._key = str(self._decode_span())
            self._step = self._before_value
        elif char not in _WHITESPACE:
            self._fail(f"expected ':' after a key, got {char!r}")

    def _before_value(self, char: str) -> None:
        if char in _WHITESPACE:
            return
        if self._key in _ARGUMENT_KEYS and self._arguments is not None:
            self._fail("there are two values for the arguments")
        elif self._key == "name" and self.name is not None:
            self._fail("there are two names")
        else:
            self._span = [char]
            self._begin_value(char)

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self.in_string = True
            self._step = self._after_value
        elif char in _CLOSERS:
            self._stack.append(_CLOSERS[char])
            self._step = self._in_container
            if char == "{" and self._key in _ARGUMENT_KEYS:
                self._arguments = self._span
        elif char in ",}]:":
            self._fail(f"expected a value, got {char!r}")
        else:
            self._step = self._in_scalar

    def _in_container(self, char: str) -> None:
        if char in "}]":
            if char != self._stack[-1]:
                self._fail(f"expected {self._stack[-1]!r}, got {char!r}")
                return
            self._stack.pop()
        elif char in _CLOSERS:
            self._stack.append(_CLOSERS[char])
        self._span.append(char)
        if char == '"':
            self.in_string = True
        elif not self._stack:
            self._end_value()

    def _in_scalar(self, char: str) -> None:
        if char in ",}" or char in _WHITESPACE:
            self._end_value()
            if self.error is None:
                self._after_value(char)
        else:
            self._span.append(char)

    def _after_value(self, char: str) -> None:
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            self._complete()
        elif char not in _WHITESPACE:
            self._fail(f"expected ',' or '}}', got {char!r}")

    def _after_object(self, char: str) -> None:
        if char not in _WHITESPACE:
            self._fail(f"there is text after the call: {char!r}")

    def _string_char(self, char: str) -> None:
        if char < " " and not self._is_escaped:
            self._has_controls = True
            self._span.append(_ESCAPES.get(char) or f"\\u{ord(char):04x}")
            return
        self._span.append(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self.in_string = False
            if self._step == self._after_value:
                self._end_value()

    def _end_value(self) -> None:
        """Take a value of the outer object: the name, or arguments that are no plain object."""
        self._step = self._after_value
        if self._key == "name":
            name = self._decode_span()
            if isinstance(name, str) and name:
                self.name = name
            else:
                self._fail('"name" is not a string')
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._unwrap_arguments(self._decode_span())

    def _unwrap_arguments(self, value: JSON) -> None:
        if self.error is not None:
            return
        if value is None or value == "":
            self._arguments = []
            return
        inner = _object_text(value) if isinstance(value, str) else None
        if inner is None:
            self._fail("the arguments are not an object")
        else:
            self._arguments = [inner]

    def _decode_span(self) -> JSON:
        """A key, a name, or arguments that are no object; half a surrogate pair is an error."""
        try:
            value = _loads("".join(self._span))
            _check_encodable(value)
        except (ValueError, RecursionError) as problem:
            self._fail(f"not JSON: {problem}")
            return None
        return value

    def _complete(self) -> None:
        self.is_complete = True
        self._step = self._after_object
        if not self._arguments and self.name not in self._needy:
            self._arguments = ["{}"]

    def _fail(self, error: str) -> None:
        if self.error is None:
            self.error = error
        self.in_string = False


def arguments_from_json(text: str) -> JSON:
    """The value of a call's arguments.

    Raises:
        ValueError: It is no JSON, or no file or template could hold it.
        RecursionError: It is nested too deep to be read.
    """
    arguments: JSON = json.loads(
        text, strict=False, parse_constant=refuse_constant, parse_float=finite
    )
    _check_encodable(arguments)
    _check_depth(arguments)
    return arguments


def quoted(text: str) -> str:
    """Text as a JSON string, its characters as they are."""
    return json.dumps(text, ensure_ascii=False)


def _loads(text: str) -> JSON:
    value: JSON = json.loads(text, strict=False, parse_constant=refuse_constant)
    return value


def finite(text: str) -> float:
    """The nearest number to a decimal fraction: 1e400 is the largest there is, not infinity."""
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


def refuse_constant(name: str) -> JSON:
    """Raise ValueError for NaN and Infinity, which `json` reads and JSON has not."""
    raise ValueError(f"{name} is not a JSON value")


def _check_encodable(value: JSON) -> None:
    """Raise ValueError for half of a surrogate pair, which no answer can hold."""
    json.dumps(value, ensure_ascii=False).encode("utf-8")


def _check_depth(value: JSON) -> None:
    """Raise ValueError for what no template could render when the call comes back."""
    if is_too_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _object_text(text: str) -> str | None:
    """JSON of an object that came as a string, raw control characters repaired; or None."""
    try:
        value = _loads(text)
        if not isinstance(value, dict):
            return None
        try:
            json.loads(text)
        except ValueError:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return text
