"""What a tool's schema asks of the tags and texts of a call in the XML form, as rules of a grammar.

Values that are no text are JSON, which llguidance holds to their schemas. Texts are matched by
regular expressions, which are made here. What they cannot say is an error where the tool is strict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from dlite_agent.chat.call_values import choices, resolved
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.patterns import ascii_classes, whole_text
from dlite_agent.errors import RequestError

__all__ = ["has_named_parameters", "parameters", "text_terminal"]

_TAG_NAME = re.compile(r"[^<>\n]+")
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"  # a day that every month has
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_WORD = "[A-Za-z0-9_+-]{1,30}"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_WORD}(\.{_WORD}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
_NOT_OF_TAGS = (
    *("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties"),
    *("enum", "const"),
)


def has_named_parameters(tool: ToolSpec, schema: Mapping[str, JSON]) -> bool:
    """Whether the tags of a call can be held to a schema.

    Raises:
        RequestError: They cannot, and the tool is strict; or the tool's name fits in no tag.
    """
    _check_tag(tool.name, tool.name)
    found = resolved(dict(schema), schema)
    beyond = [key for key in _NOT_OF_TAGS if key in found]
    if found.get("additionalProperties") and not _mapping(found.get("properties")):
        return bool(tool.strict)  # none is within any schema that requires none
    if beyond and tool.strict:
        raise RequestError(
            f"the tool {tool.name!r} has {beyond[0]!r} at the top of its parameters, which this "
            "checkpoint's form of calls cannot enforce; list them in 'properties', or send "
            "strict=false"
        )
    return not beyond


def parameters(tool: ToolSpec, schema: Mapping[str, JSON]) -> Iterator[tuple[str, JSON, bool]]:
    """Key, schema and whether it is required, of each parameter.

    Raises:
        RequestError: One is required that there may not be, or its name fits in no tag.
    """
    found = resolved(dict(schema), schema)
    known, listed = found.get("properties"), found.get("required")
    properties, required = _mapping(known), listed if isinstance(listed, list) else []
    for key, value in properties.items():
        if value is not False:
            _check_tag(tool.name, key)
            yield key, value, key in required
    others = found.get("additionalProperties", known is None)
    for name in required:
        if isinstance(name, str) and name not in properties:
            if others is False:
                raise RequestError(
                    f"the tool {tool.name!r} requires {name!r}, which is none of its properties; "
                    "describe it, or do not require it"
                )
            _check_tag(tool.name, name)
            yield name, others, True


def text_terminal(schema: Mapping[str, JSON], where: str, *, is_strict: bool) -> str:
    """A terminal's body for the texts of a schema; nothing where that is any text.

    Args:
        schema: One branch, resolved.
        where: The parameter and its tool, for errors.
        is_strict: Whether a keyword that cannot be enforced is an error; else it is left out.

    Raises:
        RequestError: See above.
    """
    known = choices(schema)
    if known is not None:
        return " | ".join(
            json.dumps(text, ensure_ascii=False) for text, value in known if isinstance(value, str)
        )
    parts = []
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if (low, high) != (0, ""):
        parts.append(f"/(?s:.{{{low},{high}}})/")
    pattern, kind = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        try:
            parts.append(_expression(whole_text(pattern)))
        except ValueError as error:
            if is_strict:
                raise RequestError(
                    f"{where}: {error}; simplify it, or send strict=false"
                ) from error
    if kind in _FORMATS:
        parts.append(_expression(ascii_classes(_FORMATS[str(kind)])))
    elif kind is not None and is_strict:
        raise RequestError(
            f"{where}: the format {kind!r} is not enforced in this checkpoint's form of calls "
            f"(these are: {', '.join(_FORMATS)}); leave it out, or send strict=false"
        )
    if "allOf" in schema and is_strict:
        raise RequestError(
            f"{where}: an 'allOf' of texts is not enforced in this checkpoint's form of calls; "
            "write it as one schema, or send strict=false"
        )
    return " & ".join(parts)


def _expression(pattern: str) -> str:
    return f"/{_SLASH.sub(_escaped_slash, pattern)}/"


def _escaped_slash(found: re.Match[str]) -> str:
    """Part of an expression between slashes."""
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])


def _check_tag(tool: str, name: str) -> None:
    if not _TAG_NAME.fullmatch(name):
        raise RequestError(
            f"the tool {tool!r} has the name {name!r}, which cannot stand in a tag, and this "
            "checkpoint writes calls with tags; rename it"
        )


def _mapping(value: JSON | Mapping[str, JSON]) -> Mapping[str, JSON]:
    return value if isinstance(value, Mapping) else {}
