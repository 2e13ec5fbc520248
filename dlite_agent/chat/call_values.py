"""Values of the XML call form: text whose type only the tool's schema says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from dlite_agent.chat.call_json import finite, refuse_constant
from dlite_agent.chat.messages import JSON

__all__ = ["choices", "is_text", "resolved", "text_schemas", "value_from_text"]

_UNIONS = ("anyOf", "oneOf")
_MAX_REFERENCES = 16
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LITERAL = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\b(?:True|False|None)\b|,(?=\s*[}\]])"""
)
_TYPE_OF: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_ESCAPE = re.compile(r'\\.|"')


def resolved(schema: JSON, root: Mapping[str, JSON]) -> dict[str, JSON]:
    """The schema that a local `$ref` names, or an `allOf` of one, with the keywords beside it.

    Anything else is returned as it is.
    """
    found = schema if isinstance(schema, dict) else {}
    for _ in range(_MAX_REFERENCES):
        reference, parts = found.get("$ref"), found.get("allOf")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: JSON = dict(root)
            for part in reference[2:].split("/"):
                target = target.get(part) if isinstance(target, dict) else None
            key = "$ref"
        elif isinstance(parts, list) and len(parts) == 1:
            target, key = parts[0], "allOf"
        else:
            break
        beside = {name: value for name, value in found.items() if name != key}
        found = {**(target if isinstance(target, dict) else {}), **beside}
    return found


def choices(schema: Mapping[str, JSON]) -> list[tuple[str, JSON]] | None:
    """How each value of an `enum` or `const` is written, and the value; None without either."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return [
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), value)
        for value in values
        if _is_allowed(value, schema)
    ]


def _is_allowed(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Whether a value of an `enum` satisfies the keywords beside it that say what texts are."""
    named = schema.get("type")
    types = named if isinstance(named, list) else [named or _TYPE_OF[type(value)]]
    if _TYPE_OF[type(value)] not in types and not (
        isinstance(value, int | float) and "number" in types and not isinstance(value, bool)
    ):
        return False
    low, high = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if not isinstance(value, str) or not isinstance(low, int | float):
        return True
    pattern = schema.get("pattern")
    fits = not isinstance(pattern, str) or re.search(pattern, value) is not None
    return fits and isinstance(high, int | float) and low <= len(value) <= high


def is_text(schema: Mapping[str, JSON], root: Mapping[str, JSON]) -> bool:
    """Whether a value is plain text: a string, anything that may be one, or of unknown type."""
    types = set(_types(dict(schema), root))
    return not types or "string" in types


def text_schemas(schema: JSON, root: Mapping[str, JSON], depth: int = 0) -> list[dict[str, JSON]]:
    """The branches of a schema that a text may satisfy; what is of no type is one."""
    found = resolved(schema, root)
    if "type" not in found and choices(found) is None and depth < _MAX_REFERENCES:
        branches = [found[union] for union in _UNIONS if isinstance(found.get(union), list)]
        if branches:
            listed = [branch for union in branches if isinstance(union, list) for branch in union]
            beside = {key: value for key, value in found.items() if key not in _UNIONS}
            return [
                {**beside, **text}
                for branch in listed
                for text in text_schemas(branch, root, depth + 1)
            ]
    return [found] if is_text(found, root) else []


def value_from_text(text: str, schema: Mapping[str, JSON], root: Mapping[str, JSON]) -> str:
    """A value as JSON, typed by its schema.

    Where a string may stand, the text is one, so that `"42"` and `"null"` stay what they are. Else
    it is JSON, or Python's spelling of it (`True`, `None`, single quotes).

    Raises:
        ValueError: It is no value of any type that the schema has.
    """
    known = choices(schema)
    if known is not None:
        for written, value in known:
            if text in (written, str(value)):
                return json.dumps(value, ensure_ascii=False)
        raise ValueError(f"{text!r} is none of the values of its enum")
    if is_text(schema, root):
        return json.dumps(text, ensure_ascii=False)
    types = set(_types(dict(schema), root))
    written = text.strip()
    try:
        value = _loads(written)
    except (ValueError, RecursionError):
        value, written = _from_python(written)
    kind = _TYPE_OF[type(value)]
    is_whole = isinstance(value, float) and value.is_integer()
    fits = kind in types or (kind == "integer" and "number" in types)
    if not fits and not (is_whole and "integer" in types):
        raise ValueError(f"{text!r} is not of type {' or '.join(sorted(types))}")
    return written


def _from_python(text: str) -> tuple[JSON, str]:
    """Python's spelling of JSON as a value and as JSON; strict about everything else."""
    written = _LITERAL.sub(_as_json, text)
    try:
        return _loads(written), written
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is not JSON") from error


def _loads(text: str) -> JSON:
    value: JSON = json.loads(text, parse_float=finite, parse_constant=refuse_constant)
    return value


def _as_json(found: re.Match[str]) -> str:
    token = found[0]
    if token[0] != "'":
        return _WORDS.get(token, "" if token == "," else token)
    return '"' + _ESCAPE.sub(_escaped, token[1:-1]) + '"'


def _escaped(found: re.Match[str]) -> str:
    return {"\\'": "'", '"': '\\"'}.get(found[0], found[0])


def _types(schema: JSON, root: Mapping[str, JSON], depth: int = 0) -> Iterator[str]:
    found = resolved(schema, root)
    named = found.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (name for name in named if isinstance(name, str))
    elif (known := choices(found)) is not None:
        yield from (_TYPE_OF[type(value)] for _, value in known)
    elif depth < _MAX_REFERENCES:
        for union in (*_UNIONS, "allOf"):
            branches = found.get(union)
            for branch in branches if isinstance(branches, list) else ():
                yield from _types(branch, root, depth + 1)
