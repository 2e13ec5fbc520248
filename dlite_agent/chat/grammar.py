"""A request's output rules as a grammar in llguidance's dialect of Lark.

A turn is an optional thought, and then text, calls, or JSON. Everything between two control tokens
has exactly the spacing that the chat template writes, so that an answer renders back to its own
tokens. Calls have one of two forms: hermes JSON (Qwen3), or XML with `<function=NAME>` and
`<parameter=KEY>` (Qwen3-Coder).

An object schema that lists `properties` and says nothing of others is closed: a model that invents
parameters is never what a tool wants, and a tool without parameters is then called with exactly
`{}`.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md for the dialect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dlite_agent.chat.call_values import choices, is_text, resolved, text_schemas
from dlite_agent.chat.markers import CALL, CALL_END, THINK, THINK_END
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.output_rules import OutputRules
from dlite_agent.chat.patterns import ascii_classes
from dlite_agent.chat.template import CallForm
from dlite_agent.chat.xml_schema import has_named_parameters, parameters, text_terminal

__all__ = ["TurnForm", "turn_grammar"]

_LINE = "\n"
_VALUE_END = "\n</parameter>\n"
_WITH_VALUE_END = r"/(?s:.*\n)?<\/parameter>\n(?s:.*)/"
_ANY_TEXT = r"/(\n(.|\n)*)?/"  # an empty value has a line of its own, or none
_ANY_PARAMETER = r'"<parameter=" /[^<>\n]+/ ">" any_text'
_SPACING: dict[str, JSON] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_ANY_OBJECT: dict[str, JSON] = {"type": "object"}
_NO_ARGUMENTS: dict[str, JSON] = {"type": "object", "properties": {}}
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\(\?P=|\\[1-9k]")
_BARE_KEYS = {"type", "title", "description", "required", "$schema"}
_SUBSCHEMAS = ("items", "additionalProperties", "contains", "propertyNames")
_SCHEMA_LISTS = ("anyOf", "oneOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True, slots=True)
class TurnForm:
    """How this checkpoint writes a turn.

    Attributes:
        control_tokens: Spellings that are tokens of their own; others are written as text.
        calls: How it writes calls.
        thought: `"open"`: the prompt ends inside a thought; `"optional"`: the turn may begin with
            one; `"none"`: it may not.
    """

    control_tokens: Collection[str]
    calls: CallForm = "json"
    thought: Literal["open", "optional", "none"] = "optional"


def turn_grammar(rules: OutputRules, tools: Sequence[ToolSpec], form: TurnForm) -> str | None:
    """The grammar of a turn; None where anything may be written.

    With `tool_choice="auto"` a turn is free unless some allowed tool is strict, calls are limited
    to one or to some tools, or the text has a format. Where `<tool_call>` is no token of the
    vocabulary, it cannot be told from text that mentions it, and such a turn is free as well.

    Raises:
        RequestError: See `OutputRules.allowed`; or a parameter of a call in the XML form cannot be
            written as its schema says.
    """
    allowed = rules.allowed(tools)
    is_named = rules.tool_choice.mode == "required"
    if not is_named and rules.answer is None and not _limits_text(rules, tools, allowed, form):
        return None
    writer = _Writer(form)
    bodies = []
    if allowed:
        bodies.append(_calls(writer, rules, allowed))
    if rules.answer is not None and not is_named:
        schema = _ANY_OBJECT if rules.answer.schema is None else rules.answer.schema
        bodies.append(writer.json(schema, is_strict=rules.answer.strict))
    if not bodies:
        bodies.append("text?")
    return writer.grammar(" | ".join(bodies))


def _limits_text(
    rules: OutputRules, tools: Sequence[ToolSpec], allowed: Sequence[ToolSpec], form: TurnForm
) -> bool:
    """Whether a turn of free text with calls has to be watched."""
    if not tools or (CALL not in form.control_tokens and allowed):
        return False
    return (
        len(allowed) < len(tools)
        or not rules.parallel_tool_calls
        or any(tool.strict for tool in allowed)
    )


def _calls(writer: _Writer, rules: OutputRules, allowed: Sequence[ToolSpec]) -> str:
    is_forced = rules.tool_choice.mode == "required"
    has_one = not rules.parallel_tool_calls or (is_forced and len(rules.tool_choice.names) == 1)
    call = writer.call(allowed, is_forced=is_forced)
    if is_forced or rules.answer is not None:
        return call if has_one else f'{call} ("\\n" {call})*'
    return f"text? {call}?" if has_one else f"text? ({call} text?)*"


class _Writer:
    """Collects rules."""

    def __init__(self, form: TurnForm) -> None:
        self._form = form
        self._rules: list[str] = []

    def grammar(self, body: str) -> str:
        """The whole grammar around a turn's body."""
        thought = self._thought()
        self._rules += [f"start: {thought}body", f"body: {body}", "text: TEXT"]
        if CALL in self._form.control_tokens:
            self._rules.append(r"TEXT: /(.|\n)+/")
        else:
            self._rules.append(rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{CALL}(.|\n)*/")
        return "\n".join(["%llguidance {}", *self._rules]) + "\n"

    def json(self, schema: Mapping[str, JSON], *, is_strict: bool) -> str:
        """A JSON value that fits a schema, in the template's spacing."""
        guidance: dict[str, JSON] = {**_SPACING, "lenient": not is_strict}
        closed = _closed(schema, keeps_all=is_strict)
        return f"%json {json.dumps({**closed, 'x-guidance': guidance})}"

    def call(self, allowed: Sequence[ToolSpec], *, is_forced: bool) -> str:
        """The name of a rule: one call of one of the tools."""
        write = self._json_call if self._form.calls == "json" else self._xml_call
        for number, tool in enumerate(allowed):
            schema = _NO_ARGUMENTS if tool.parameters.keys() <= _BARE_KEYS else tool.parameters
            if not (is_forced or tool.strict or schema is _NO_ARGUMENTS):
                schema = _ANY_OBJECT
            write(f"tool_{number}", tool, schema)
        names = " | ".join(f"tool_{number}" for number in range(len(allowed)))
        opening, closing = self._marker(CALL), self._marker(CALL_END)
        self._rules.append(f'call: {opening} "\\n" tool "\\n" {closing}')
        self._rules.append(f"tool: {names}")
        return "call"

    def _json_call(self, rule: str, tool: ToolSpec, schema: Mapping[str, JSON]) -> None:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        arguments = self.json(schema, is_strict=bool(tool.strict))
        self._rules.append(f'{rule}: {_literal(head)} {arguments} "}}"')

    def _xml_call(self, rule: str, tool: ToolSpec, schema: Mapping[str, JSON]) -> None:
        parts = [_literal(f"<function={tool.name}>\n")]
        is_free = not has_named_parameters(tool, schema) or schema is _ANY_OBJECT
        if is_free:
            parts.append("any_parameter*")
            self._need("any_parameter", _ANY_PARAMETER)
            self._need(f"any_text[suffix={_literal(_VALUE_END)}]", _ANY_TEXT)
        named = () if is_free else parameters(tool, schema)
        for number, (key, value, is_required) in enumerate(named):
            name = f"{rule}_{number}"
            where = f"parameter {key!r} of the tool {tool.name!r}"
            value = resolved(value, schema)
            if choices(value) is None and is_text(value, schema):
                texts = [
                    text_terminal(branch, where, is_strict=tool.strict)
                    for branch in text_schemas(value, schema)
                ]
                body = self._xml_text(name, texts)
            else:
                body = self._xml_value(value, schema, is_strict=tool.strict)
            self._rules.append(f"{name}: {_literal(f'<parameter={key}>')} {body}")
            parts.append(name if is_required else f"{name}?")
        parts.append(_literal("</function>"))
        self._rules.append(f"{rule}: {' '.join(parts)}")

    def _xml_value(
        self, schema: Mapping[str, JSON], root: Mapping[str, JSON], *, is_strict: bool
    ) -> str:
        """A value that is no text and its closing tag, as `value_from_text` reads it."""
        known = choices(schema)
        if known is not None:
            texts = " | ".join(_literal(_LINE + text) for text, _ in known)
            return f"({texts}) {_literal(_VALUE_END)}"
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        value = self.json({**schema, **definitions}, is_strict=is_strict)
        return f"{_literal(_LINE)} {value} {_literal(_VALUE_END)}"

    def _xml_text(self, rule: str, texts: Sequence[str]) -> str:
        """A text that one of some terminals matches, and the first closing tag behind it."""
        body = _ANY_TEXT
        if all(texts):
            body = f"{rule.upper()}_TEXT"
            rule_body = f"({' | '.join(texts)}) & ~{_WITH_VALUE_END}"
            self._rules.append(f"{body}: {_literal(_LINE)} ({rule_body})")
        self._rules.append(f"{rule}_text[suffix={_literal(_VALUE_END)}]: {body}")
        return f"{rule}_text"

    def _need(self, name: str, body: str) -> None:
        """A rule that several calls share."""
        rule = f"{name}: {body}"
        if rule not in self._rules:
            self._rules.append(rule)

    def _thought(self) -> str:
        form = self._form
        if form.thought == "none" or THINK_END not in form.control_tokens:
            return ""
        opening = "" if form.thought == "open" else f"{self._marker(THINK)} "
        closing = f'{self._marker(THINK_END)} ("\\n" "\\n"?)?'
        self._rules.append(f"thought: {opening}text? {closing}")
        return "thought " if form.thought == "open" else "thought? "

    def _marker(self, marker: str) -> str:
        return marker if marker in self._form.control_tokens else _literal(marker)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _closed(schema: Mapping[str, JSON], *, keeps_all: bool) -> dict[str, JSON]:
    """The schema with every object closed that lists its properties and says nothing of others.

    Branches of `allOf` stay as they are: closed ones would exclude each other. Unless all is kept,
    patterns that look around or refer back are left out.
    """
    closed: dict[str, JSON] = dict(schema)
    pattern = closed.get("pattern")
    if isinstance(pattern, str) and not keeps_all and _LOOKS_AROUND.search(pattern):
        del closed["pattern"]
    elif isinstance(pattern, str):
        closed["pattern"] = ascii_classes(pattern)
    for key in _SUBSCHEMAS:
        value = closed.get(key)
        if isinstance(value, dict):
            closed[key] = _closed(value, keeps_all=keeps_all)
    for key in _SCHEMA_LISTS:
        values = closed.get(key)
        if isinstance(values, list):
            closed[key] = [
                _closed(value, keeps_all=keeps_all) if isinstance(value, dict) else value
                for value in values
            ]
    for key in _SCHEMA_MAPS:
        named = closed.get(key)
        if isinstance(named, dict):
            closed[key] = {
                name: _closed(value, keeps_all=keeps_all) if isinstance(value, dict) else value
                for name, value in named.items()
            }
    is_open = "allOf" in closed or "additionalProperties" in closed or "$ref" in closed
    if "properties" in closed and not is_open:
        closed["additionalProperties"] = False
    return closed
