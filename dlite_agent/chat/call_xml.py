"""Calls in the XML form of Qwen3-Coder: `<function=NAME>` around `<parameter=KEY>` and values.

Values are raw text, so that everything may stand in one: closing tags and whole calls that are
quoted, too. What ends a value is decided when the call is over, from all of it, and its arguments
are handed out in one piece:

- `</parameter>` ends a value where the next parameter or the call's end follows; anywhere else it
  is text.
- A `<parameter=KEY>` on a line of its own, where KEY is a parameter that was not given yet and the
  value holds more such lines than `</parameter>`, means that the model forgot to close the value
  (long contexts do that): it ends there. So it does at the call's `</function>`.
- One line break belongs to the tags at each end of a value, all others to the value.
- A `<tool_call>` that a value mentions, and never ends, takes the call's own end for its own. Only
  where no call can be read so does `</function>` in front of `</tool_call>` end a call.
- A call in the JSON form is read as that.

Under a grammar nothing of this is guessed: the first `</parameter>` on a line of its own ends a
value, as it does there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dlite_agent.chat.call_json import arguments_from_json, quoted
from dlite_agent.chat.call_values import resolved, value_from_text
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.markers import CALL, CALL_END, FUNCTION
from dlite_agent.chat.messages import JSON, ToolCall, ToolSpec, UnparsedToolCall

__all__ = ["XmlCallScanner", "XmlCalls"]

_HEADER = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>\s*(?=$|<function=)")
_CALL_END = re.compile(
    r"\s*</function>\s*(?:(?=$|<function=)|</tool_call>\s*(?:$|<tool_call>\s*(?=<function=)))"
)
_EXACT_VALUE = re.compile(r"\n<parameter=([^<>\n]+)>(?:\n(.*?))??\n</parameter>(?=\n)", re.DOTALL)
_EXACT_END = re.compile(r"\n</function>\s*$")
_TAG = re.compile(r"(?P<close></parameter>)|(?P<end></function>)|<parameter=(?P<key>[^<>\n]+)>\n")
_NEXT_FUNCTION = re.compile(r"^\s*<function=", re.MULTILINE)
_ENDS = ("</function>", "</parameter>")
_MAX_HEADER = 512


class XmlCalls:
    """How a request's calls are read.

    Args:
        tools: The request's; their schemas say of what type a value is.
        is_exact: The turn is under a grammar, which has calls between `<tool_call>` and its end
            only, and ends values where it says.

    Attributes:
        is_exact: See above.
    """

    def __init__(self, tools: Sequence[ToolSpec], *, is_exact: bool = False) -> None:
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._in_json = JsonCalls(tools)
        self.is_exact = is_exact

    def scanner(self) -> XmlCallScanner:
        """A scanner of one region."""
        return XmlCallScanner(self._schemas, self._in_json, is_exact=self.is_exact)

    def has(self, name: str | None) -> bool:
        """Whether it is one of the tools."""
        return name in self._schemas

    def is_call(self, text: str) -> bool:
        """Whether a region with this text is a call."""
        scanner = self.scanner()
        for char in text:
            scanner.feed(char)
        return isinstance(scanner.close(""), ToolCall)


class _Value(NamedTuple):
    """Where a value ends, and where the text behind its tag begins."""

    stop: int
    after: int


class XmlCallScanner:
    """Reads one region of calls; what it says of a call is certain at the end only.

    Attributes:
        name: The tool's name as soon as its tag has ended.
        error: None; nothing is certain before the end.
        notes: Repairs, for a person.
        rest: After `close`: the text of further calls in the region.
    """

    error: str | None = None

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, JSON]],
        in_json: JsonCalls,
        *,
        is_exact: bool = False,
    ) -> None:
        self.name: str | None = None
        self._is_exact = is_exact
        self.notes: list[str] = []
        self.rest = ""
        self._schemas = schemas
        self._in_json = in_json
        self._raw = ""
        self._pieces: list[str] = []
        self._arguments = ""
        self._num_quoted = 0  # <tool_call> inside a value

    @property
    def text(self) -> str:
        """Everything that was read."""
        self._raw += "".join(self._pieces)
        self._pieces.clear()
        return self._raw

    @property
    def expected_markers(self) -> tuple[str, ...]:
        """Markers that would mean something now, if they are spelled out."""
        return (CALL_END, CALL)

    def feed(self, char: str) -> None:
        """Read one character."""
        self._pieces.append(char)
        is_early = len(self._raw) + len(self._pieces) < _MAX_HEADER
        if char == ">" and self.name is None and is_early:
            header = _HEADER.match(self.text)
            self.name = _name(header[1]) if header else None

    def begins_another(self, char: str) -> bool:
        """Whether another call begins: never known before the end."""
        del char
        return False

    def takes(self, marker: str) -> bool:
        """Whether a marker is text of a value here: a call that is quoted, from start to end."""
        if self._is_exact and (header := _HEADER.match(self.text)):
            return _read_exactly(self.text, header.end()) is None
        tail = self.text.rstrip()
        is_outside = not tail or tail.endswith(_ENDS) or self.name is None
        if is_outside and not self._num_quoted:
            return False
        if marker == CALL:
            self._num_quoted += 1
        elif self._num_quoted:
            self._num_quoted -= 1
        return True

    def take_arguments(self) -> str:
        """Arguments text that is new since the last call: all of it after `close`."""
        new, self._arguments = self._arguments, ""
        return new

    def close(self, call_id: str, cut: str | None = None) -> ToolCall | UnparsedToolCall:
        """What the text was, up to a second call in the region; see `rest`.

        Args:
            call_id: Id of the result, whichever it is.
            cut: Why the text is not whole, when that is known; then it is never a call.
        """
        text = self.text
        error = cut or ("" if text.strip() else "the call is empty")
        if not error:
            if text.lstrip().startswith("{"):
                return self._json_call(text, call_id)
            try:
                return self._call(text, call_id)
            except ValueError as problem:
                error = str(problem)
                second = _NEXT_FUNCTION.search(text, text.find(FUNCTION) + 1)
                if second:
                    text, self.rest = text[: second.start()], text[second.start() :]
        return UnparsedToolCall(text.strip("\n"), error, call_id, self.name)

    def _call(self, text: str, call_id: str) -> ToolCall:
        """Read the first call.

        Raises:
            ValueError: It is none.
        """
        header = _HEADER.match(text)
        if header is None:
            raise ValueError("expected <function=NAME>")
        schema = dict(self._schemas.get(_name(header[1]), {}))
        properties = resolved(schema, schema).get("properties")
        known = properties if isinstance(properties, dict) else {}
        name = _name(header[1])
        values, after = self._read(text, known, header.end())
        if name != header[1]:
            self.notes.append(f"the call {name!r} had its name in quotes or space")
        pairs = []
        for key, value in values.items():
            try:
                written = value_from_text(value, resolved(known.get(key), schema), schema)
            except ValueError as problem:
                raise ValueError(f"parameter {key!r}: {problem}") from problem
            pairs.append(f"{quoted(key)}: {written}")
        raw = "{" + ", ".join(pairs) + "}"
        call = ToolCall(name, arguments_from_json(raw), call_id, raw)
        self._arguments, self.rest = raw, text[after:]
        return call

    def _read(self, text: str, known: Mapping[str, JSON], start: int) -> tuple[dict[str, str], int]:
        """`_Body.read` with as little repaired as it takes.

        Raises:
            ValueError: As the first reading has it.
        """
        exact = _read_exactly(text, start) if self._is_exact else None
        if exact is not None:
            return exact, len(text)
        first: ValueError | None = None
        for end in (_FUNCTION_END, _CALL_END):
            for may_repair in (True, False):
                try:
                    found = _Body(text, known, end).read(start, may_repair=may_repair)
                except ValueError as problem:
                    first = first or problem
                else:
                    if end is _CALL_END:
                        self.notes.append(f"a value of the call {self.name!r} opens a call")
                    return found
        assert first is not None
        raise first

    def _json_call(self, text: str, call_id: str) -> ToolCall | UnparsedToolCall:
        scanner = self._in_json.scanner()
        for char in text:
            scanner.feed(char)
        result = scanner.close(call_id)
        self.name = scanner.name
        self.notes = [*scanner.notes, f"the call {self.name!r} was in the JSON form"]
        self._arguments = result.raw_arguments or "" if isinstance(result, ToolCall) else ""
        return result


class _Body:
    """The parameters of one call.

    Args:
        text: The region.
        known: The tool's properties.
        end: What ends it.
    """

    def __init__(self, text: str, known: Mapping[str, JSON], end: re.Pattern[str]) -> None:
        self._text = text
        self._known = known
        self._end = end

    def read(self, start: int, *, may_repair: bool) -> tuple[dict[str, str], int]:
        """Values by key, and where the text behind the call begins.

        Args:
            start: Behind the tag with the name.
            may_repair: Whether a parameter's tag may end a value that was not closed.

        Raises:
            ValueError: It is no list of parameters with an end.
        """
        values: dict[str, str] = {}
        at = start
        while not (end := self._end.match(self._text, at)):
            tag = _PARAMETER.match(self._text, at)
            if tag is None:
                seen = self._text[at:].strip()[:40]
                raise ValueError(
                    f"expected <parameter=NAME> or </function>, got {seen!r}"
                    if seen
                    else "the call does not end"
                )
            key = _name(tag[1])
            if key in values:
                raise ValueError(f"there are two values for {key!r}")
            value = self._value(tag.end(), {*values, key}, may_repair=may_repair)
            values[key] = _without_line_breaks(self._text[tag.end() : value.stop])
            at = value.after
        return values, end.end()

    def _value(self, start: int, given: set[str], *, may_repair: bool) -> _Value:
        first_open = None  # where a tag that this call could continue with stands
        num_open = num_nested = 0
        for tag in _TAG.finditer(self._text, start):
            at_line = tag.start() == start or self._text[tag.start() - 1] == "\n"
            may_end = tag["end"] and at_line and self._end.match(self._text, tag.start())
            if may_end or (tag["close"] and self._is_end(tag.end(), given, num_nested)):
                if first_open is not None and num_open > 0 and may_repair:
                    return _Value(first_open, first_open)
                return _Value(tag.start(), tag.end() if tag["close"] else tag.start())
            if tag["close"]:
                num_open, num_nested = num_open - 1, num_nested - 1
            elif tag["key"] and at_line:
                num_nested += 1
                if tag["key"] in self._known and tag["key"] not in given:
                    num_open += 1
                    first_open = tag.start() if first_open is None else first_open
        raise ValueError("the value of a parameter does not end")

    def _is_end(self, at: int, given: set[str], num_nested: int) -> bool:
        """Whether what follows stands between two values, or behind the last."""
        if self._end.match(self._text, at):
            return True
        tag = _PARAMETER.match(self._text, at)
        if tag is None:
            return False
        return num_nested <= 0 or (_name(tag[1]) in self._known and _name(tag[1]) not in given)


def _read_exactly(text: str, start: int) -> dict[str, str] | None:
    """The values of a call that a grammar held, which nothing follows; None where it is none."""
    values: dict[str, str] = {}
    at = start
    while found := _EXACT_VALUE.match(text, at):
        if found[1] in values:
            return None
        values[found[1]] = found[2] or ""
        at = found.end()
    return values if _EXACT_END.match(text, at) else None


def _name(written: str) -> str:
    """A name without the space and the quotes that attributes elsewhere have."""
    name = written.strip()
    return name[1:-1] if len(name) > 2 and name[0] == name[-1] in "\"'" else name


def _without_line_breaks(value: str) -> str:
    line_break = "\r\n" if value.startswith("\r\n") else "\n"
    return value.removeprefix(line_break).removesuffix(line_break)
