"""Run the chat template so that its text shows the messages and the template's own control tokens.

The template runs twice: with the request's strings as they are, and with marks (where a message
begins) and masks (`chat.untrusted`) in them. When both give the same text but for the sentinels,
the marked one is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec
from dlite_agent.chat.template import TemplateTraits, Tokenizer, template_message, template_tools
from dlite_agent.chat.untrusted import Guard, Sentinels, map_json, map_message, map_tool
from dlite_agent.errors import RequestError

__all__ = ["MarkedText", "TemplateCall", "render_marked"]


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """What the template is given.

    Attributes:
        messages: Messages with their index in the request.
        tools: What the model may call.
        variables: Further template variables.
        spliced: Indices of messages of which only the place is needed.
        add_generation_prompt: Whether the assistant's turn is opened at the end.
    """

    messages: Sequence[tuple[int, Message]]
    tools: Sequence[ToolSpec] = ()
    variables: dict[str, JSON] | None = None
    spliced: frozenset[int] = frozenset()
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class MarkedText:
    """Rendered text with sentinels in it.

    Attributes:
        text: What spells a control token in it was written by the template.
        sentinels: Which code points are marks and masks.
        has_marks: Whether all messages are marked, or only the spliced ones.
        is_faithful: Whether the text without sentinels is what the template makes of the strings
            themselves.
    """

    text: str
    sentinels: Sentinels
    has_marks: bool
    is_faithful: bool


def render_marked(
    tokenizer: Tokenizer, guard: Guard, traits: TemplateTraits, call: TemplateCall
) -> MarkedText:
    """Render messages with marks and masks.

    Cost: two runs of the template, up to five where it looks into contents. Where the sentinels
    change what the template does, those at the edges are given up first, if nothing needs them,
    and then the marks. Masks inside a spelled control token never are: the text is then not what
    the template would have made of the strings, and the result says so.

    Raises:
        RequestError: The template refuses the messages.
    """
    sentinels = Sentinels.absent_from(_strings(call))

    def run(change: Callable[[str], str], *, has_marks: bool) -> str:
        return _run(tokenizer, traits, _changed(call, change, sentinels, has_marks))

    def inside(text: str) -> str:
        return guard.mask(text, sentinels.mask)

    def edges(text: str) -> str:
        return guard.mask_edges(text, sentinels.mask)

    def transparent(change: Callable[[str], str]) -> str | None:
        try:
            text = run(change, has_marks=True)
        except RequestError:
            return None  # refuses the sentinels, not the messages
        return text if sentinels.strip(text) == plain else None

    plain = sentinels.strip(run(str, has_marks=False))
    if (marked := transparent(edges)) is not None:
        return MarkedText(marked, sentinels, has_marks=True, is_faithful=True)
    guarded = run(edges, has_marks=False)
    marked = transparent(inside)
    text = run(inside, has_marks=False) if marked is None else marked
    if guard.spelled(text) != guard.spelled(guarded):
        text, marked = guarded, None  # a string and the template together spell a control token
    is_faithful = sentinels.strip(text) == plain
    return MarkedText(text, sentinels, has_marks=marked is not None, is_faithful=is_faithful)


def _run(tokenizer: Tokenizer, traits: TemplateTraits, call: TemplateCall) -> str:
    messages = [template_message(message, traits) for _, message in call.messages]
    tools = template_tools(call.tools)
    return tokenizer.apply_template(
        messages, tools, call.add_generation_prompt, **(call.variables or {})
    )


def _changed(
    call: TemplateCall, change: Callable[[str], str], sentinels: Sentinels, has_marks: bool
) -> TemplateCall:
    messages = []
    for index, message in call.messages:
        mark = sentinels.mark_of(index)
        message = map_message(message, change)
        if index in call.spliced:
            message = _placeholder(message, mark)
        elif has_marks:
            message = _with_mark(message, mark)
        messages.append((index, message))
    variables = {name: map_json(value, change) for name, value in (call.variables or {}).items()}
    tools = [map_tool(tool, change) for tool in call.tools]
    return replace(call, messages=messages, tools=tools, variables=variables)


def _placeholder(message: Message, mark: str) -> Message:
    """Keep what a template may check: that there are calls, and their ids."""
    calls = tuple(ToolCall(mark, {}, id=call.id) for call in message.tool_calls)
    return Message("assistant", content=mark, tool_calls=calls)


def _with_mark(message: Message, mark: str) -> Message:
    """Put a mark before the first visible character that the message surely renders."""
    if message.content.strip() or message.role != "assistant":
        return replace(message, content=_insert(message.content, mark))
    if message.tool_calls:
        first, *rest = message.tool_calls
        return replace(message, tool_calls=(replace(first, name=mark + first.name), *rest))
    return message


def _insert(text: str, mark: str) -> str:
    visible = re.search(r"\S", text)
    place = visible.start() if visible else len(text)
    return text[:place] + mark + text[place:]


def _strings(call: TemplateCall) -> list[str]:
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for _, message in call.messages:
        map_message(message, note)
    for tool in call.tools:
        map_tool(tool, note)
    map_json(call.variables, note)
    return found
