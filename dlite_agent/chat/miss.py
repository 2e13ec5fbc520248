"""Why tokens were prefilled that an earlier turn had computed: which message differs, and how.

What clients change by themselves and exact replay takes back (reasoning dropped, ids renamed, keys
re-ordered) costs nothing and is listed as an oddity. What does cost something has one cause with a
name: the first difference, since everything behind it has to be computed again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dlite_agent.chat.message_keys import canonical_arguments, seed_key
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.chat.past_requests import PastRequest
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.chat.replay import ReplayPlan, TurnReplay

__all__ = ["ADVICE", "Miss", "MissCause", "explain_miss"]

MissCause = Literal[
    "tools_changed",
    "settings_changed",
    "timestamp",
    "system_changed",
    "history_trimmed",
    "message_edited",
    "reasoning_changed",
    "reasoning_dropped",
    "thoughts_stripped",
    "rendered_again",
    "evicted",
]

ADVICE: dict[MissCause, str] = {
    "tools_changed": "keep one list of tools for the whole session; they stand before the history",
    "settings_changed": "keep the template's variables for the whole session",
    "timestamp": "move what changes (time, ids, counters) from the system prompt to the last "
    "message",
    "system_changed": "keep the system prompt, and put what is new into the last message",
    "history_trimmed": "trim rarely and much at once, at the end of the history where possible",
    "message_edited": "send earlier messages back as they were",
    "reasoning_changed": "send the reasoning back as it came, or leave it out",
    "reasoning_dropped": "send the reasoning back: this engine has not seen the turn, or forgot it",
    "thoughts_stripped": "this is the chat template's rule at a new user message; "
    "history='as_generated' keeps the thoughts, and the tokens",
    "rendered_again": "the turn was not generated here, or is forgotten: nothing to change",
    "evicted": "raise max_kv_bytes, or send the next turn sooner",
}
# The last token of the answer, which has no KV yet, and what the template writes behind it: a
# newline, and before it the end of turn, where the answer was cut.
_UNAVOIDABLE = 3
_AROUND = 60  # characters before and behind a difference
_MANY_SHORTER = 2  # a result this many times shorter was cut, not corrected
_VOLATILE = re.compile(
    r"\b[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b|\d+"
    r"|\b(?:mon|tue|wed|thu|fri|sat|sun|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b"
    r"|\b(?:am|pm)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Miss:
    """What differed from the conversation's last turn, and what that cost.

    Attributes:
        cause: Its name; None where nothing was computed twice and only oddities are to report.
        message_index: The first message that diverged; None where none did.
        tokens: Prompt tokens that were prefilled although an earlier turn had their message.
        was: Text around the point, as it was.
        now: The same place, as it came.
        advice: What to do, for a person.
        oddities: What the client changed and replay took back, each kind once.
    """

    cause: MissCause | None
    message_index: int | None = None
    tokens: int = 0
    was: str = ""
    now: str = ""
    advice: str = ""
    oddities: tuple[str, ...] = ()


def explain_miss(
    past: PastRequest, request: PastRequest, plan: ReplayPlan, prompt: RenderedPrompt, cached: int
) -> Miss | None:
    """Compare a request with the conversation's last one.

    Args:
        past: The last one, with its answer.
        request: This one.
        plan: What of it was spliced.
        prompt: Its tokens.
        cached: How many of them had KV.

    Returns:
        None where nothing was computed twice and nothing is odd.
    """
    oddities = tuple(_oddities(past, request, plan))
    tokens = _repeated_tokens(past, request, prompt, cached)
    if not tokens:
        return Miss(None, oddities=oddities) if oddities else None
    cause, index, was, now = _cause(past, request, plan, prompt.message_at(cached) or 0)
    return Miss(cause, index, tokens, *_around(was, now), ADVICE[cause], oddities)


def _repeated_tokens(
    past: PastRequest, request: PastRequest, prompt: RenderedPrompt, cached: int
) -> int:
    known = _repeated_messages(past, request)
    repeated = sum(
        segment.stop - max(segment.start, cached)
        for segment in prompt.segments
        if segment.message_index is not None
        and segment.stop > cached
        and segment.message_index in known
    )
    return repeated if repeated > _UNAVOIDABLE else 0


def _repeated_messages(past: PastRequest, request: PastRequest) -> set[int]:
    """Messages that the last turn had too, and an answer that came back changed.

    Of equal ones, as many as it had.
    """
    left = Counter(past.keys)
    first = _first_difference(past, request)
    is_answer = first is not None and request.messages[first].role == "assistant"
    repeated = {first} if first is not None and is_answer else set()
    for index, key in enumerate(request.keys):
        if left[key]:
            left[key] -= 1
            repeated.add(index)
    return repeated


def _cause(
    past: PastRequest, request: PastRequest, plan: ReplayPlan, place: int
) -> tuple[MissCause, int | None, str, str]:
    """The cause, the message, and the whole text of both; `place` is where the KV ended."""
    if seed_key(past.tools, {}) != seed_key(request.tools, {}):
        return "tools_changed", None, _names(past.tools), _names(request.tools)
    kwargs = [seed_key((), r.template_kwargs) for r in (past, request)]
    if kwargs[0] != kwargs[1]:
        texts = [json.dumps(dict(r.template_kwargs), default=str) for r in (past, request)]
        return "settings_changed", None, texts[0], texts[1]
    index = _first_difference(past, request)
    if index is not None and index <= place:
        was, now = past.messages[index], request.messages[index]
        return _how_it_differs(past, request, index), index, _text(was), _text(now)
    rendered = (t for t in plan.turns if not t.is_spliced and t.message_index >= place)
    turn = next(rendered, None)
    if turn is None or turn.message_index >= len(past.messages):
        return "evicted", None, "", ""
    was, now = past.messages[turn.message_index], request.messages[turn.message_index]
    return _why_rendered(turn, was, now), turn.message_index, _thought(was), _thought(now)


def _first_difference(past: PastRequest, request: PastRequest) -> int | None:
    pairs = enumerate(zip(past.keys, request.keys, strict=False))
    return next((i for i, (was, now) in pairs if was != now), None)


def _how_it_differs(past: PastRequest, request: PastRequest, index: int) -> MissCause:
    was, now = past.messages[index], request.messages[index]
    if request.keys[index] in past.keys[index + 1 :]:
        return "history_trimmed"  # it stood further behind
    if was.role == now.role == "system":
        is_volatile = _VOLATILE.sub("#", was.content) == _VOLATILE.sub("#", now.content)
        return "timestamp" if is_volatile else "system_changed"
    is_cut = was.role in ("tool", "user") and len(was.content) > _MANY_SHORTER * len(now.content)
    is_summary = len(request.messages) < len(past.messages) and was.role != now.role
    return "history_trimmed" if is_cut or is_summary else "message_edited"


def _why_rendered(turn: TurnReplay, was: Message, now: Message) -> MissCause:
    if turn.reason == "template_history":
        return "thoughts_stripped"
    if turn.reason == "reasoning_differs":
        return "reasoning_changed"
    return "reasoning_dropped" if was.reasoning and not now.reasoning else "rendered_again"


def _oddities(past: PastRequest, request: PastRequest, plan: ReplayPlan) -> Iterator[str]:
    """What replay took back, each kind once, with the first message that has it."""
    is_same_list = seed_key(past.tools, {}) == seed_key(request.tools, {})
    if is_same_list and _names(past.tools) != _names(request.tools):
        yield "tools: re-ordered; the first order is kept"
    spliced = {turn.message_index for turn in plan.turns if turn.is_spliced}
    seen: set[str] = set()
    pairs = zip(past.messages, request.messages, past.keys, request.keys, strict=False)
    for index, (was, now, was_key, now_key) in enumerate(pairs):
        if was_key != now_key:
            return
        for kind in _kinds(was, now, index in spliced) if was is not now else ():
            if kind not in seen:
                seen.add(kind)
                yield f"messages[{index}]: {kind}"


def _kinds(was: Message, now: Message, is_spliced: bool) -> Iterator[str]:
    if was.reasoning and not now.reasoning and is_spliced:
        yield "reasoning dropped; the original is used"
    if any(a.id != b.id for a, b in zip(was.tool_calls, now.tool_calls, strict=False)):
        yield "ids of calls renamed; matched by order"
    if is_spliced and any(
        json.dumps(a.arguments) != json.dumps(b.arguments)
        for a, b in zip(was.tool_calls, now.tool_calls, strict=False)
    ):
        yield "arguments written in another way; the original is used"
    if is_spliced and was.content != now.content:
        yield "ends of the content changed; the original is used"


def _names(tools: Sequence[ToolSpec]) -> str:
    return ", ".join(tool.name for tool in tools)


def _text(message: Message) -> str:
    calls = (f"{c.name} {canonical_arguments(c.arguments).decode()}" for c in message.tool_calls)
    return "\n".join([message.content, *calls])


def _thought(message: Message) -> str:
    thought = f"<think>\n{message.reasoning.strip()}\n</think>\n\n" if message.reasoning else ""
    return thought + _text(message)


def _around(was: str, now: str) -> tuple[str, str]:
    """Both texts around the first character that differs."""
    pairs = enumerate(zip(was, now, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(was), len(now)))
    start = max(0, place - _AROUND)
    return was[start : place + _AROUND], now[start : place + _AROUND]
