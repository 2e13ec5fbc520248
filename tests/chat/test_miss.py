from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlite_agent.chat.message_keys import seed_key
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.chat.miss import ADVICE, Miss, explain_miss
from dlite_agent.chat.past_requests import PastRequest, PastRequests
from dlite_agent.chat.renderer import Renderer
from dlite_agent.chat.replay import plan_replay
from dlite_agent.sessions.journal import Journal

READ = ToolSpec("read", "Read a file.")
TALK = (
    Message("system", "Today is Mon, 30 Nov 2026, 12:30:01. Fix bugs."),
    Message("user", "Fix it."),
    Message("assistant", "Looking.", reasoning="Hm.", tool_calls=(ToolCall("read", {"a": 1}),)),
    Message("tool", "line\n" * 20),
    Message("assistant", "Done.", reasoning="Good."),
)
NEXT = Message("user", "Thanks.")


def start_of(renderer: Renderer, messages: tuple[Message, ...], index: int) -> int:
    """Where a message begins."""
    segments = renderer.render(messages, (READ,)).segments
    return next(segment.start for segment in segments if segment.message_index == index)


def miss(renderer: Renderer, messages: tuple[Message, ...], cached: int = 0, **fields: Any) -> Miss:
    """A miss after TALK, with nothing in the journal."""
    past = PastRequest.of(TALK, (READ,))
    request = PastRequest.of(messages, fields.get("tools", (READ,)), fields.get("kwargs"))
    plan = plan_replay(messages, seed_key(request.tools, {}), Journal(), **fields.get("plan", {}))
    prompt = renderer.render(messages, request.tools)
    found = explain_miss(past, request, plan, prompt, cached)
    assert found is not None
    assert found.cause is None or found.advice == ADVICE[found.cause]
    return found


def changed(index: int, **changes: Any) -> tuple[Message, ...]:
    messages = [*TALK, NEXT]
    messages[index] = replace(messages[index], **changes)
    return tuple(messages)


@pytest.mark.parametrize(
    ("index", "content", "cause"),
    [
        (0, "Today is Tue, 1 Dec 2026, 9:05:33. Fix bugs.", "timestamp"),
        (0, "Today is Mon, 30 Nov 2026, 12:30:01. Write tests.", "system_changed"),
        (1, "Fix that.", "message_edited"),
        (3, "(20 lines omitted)", "history_trimmed"),
        (4, "Done!", "message_edited"),
    ],
)
def test_the_first_message_that_differs_has_a_cause_and_both_texts(
    byte_renderer: Renderer, index: int, content: str, cause: str
) -> None:
    messages = changed(index, content=content)
    found = miss(byte_renderer, messages, start_of(byte_renderer, messages, index))
    assert (found.cause, found.message_index) == (cause, index)
    assert found.was != found.now
    assert found.now[:20] in content
    assert found.was[:20] in TALK[index].content
    assert max(len(found.was), len(found.now)) <= 120


def test_tokens_count_what_stood_in_the_last_turn_and_was_computed_again(
    byte_renderer: Renderer,
) -> None:
    messages = changed(1, content="Fix that.")
    prompt = byte_renderer.render(messages, (READ,))
    spans = {s.message_index: s.stop - s.start for s in prompt.segments}
    found = miss(byte_renderer, messages)
    assert found.tokens == spans[0] + spans[2] + spans[3] + spans[4]
    assert miss(byte_renderer, messages, cached=spans[0]).tokens == found.tokens - spans[0]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"tools": (ToolSpec("read", "Read."),)}, "tools_changed"),
        ({"kwargs": {"style": "short"}}, "settings_changed"),
        ({"plan": {"mode": "template"}}, "thoughts_stripped"),
        ({"plan": {"mode": "as_generated"}}, "rendered_again"),
    ],
)
def test_what_is_no_message_is_named_too(
    byte_renderer: Renderer, fields: dict[str, Any], cause: str
) -> None:
    assert miss(byte_renderer, (*TALK, NEXT), **fields).cause == cause


def test_a_dropped_thought_of_a_forgotten_turn_is_named(byte_renderer: Renderer) -> None:
    found = miss(byte_renderer, changed(2, reasoning=None), plan={"mode": "as_generated"})
    assert (found.cause, found.message_index) == ("reasoning_dropped", 2)
    assert "<think>" in found.was


def test_a_history_that_lost_its_start_is_named(byte_renderer: Renderer) -> None:
    messages = (*TALK[:2], *TALK[4:], NEXT)
    found = miss(byte_renderer, messages, start_of(byte_renderer, messages, 2))
    assert (found.cause, found.message_index) == ("history_trimmed", 2)
    summary = (TALK[0], Message("assistant", "So far: all is well."), TALK[1], NEXT)
    start = start_of(byte_renderer, summary, 1)
    assert miss(byte_renderer, summary, start).cause == "history_trimmed"


def test_kv_that_is_gone_is_named(byte_renderer: Renderer) -> None:
    found = miss(byte_renderer, TALK[:2])
    assert (found.cause, found.message_index) == ("evicted", None)


def test_nothing_computed_twice_is_no_miss(byte_renderer: Renderer) -> None:
    messages = (*TALK, NEXT, NEXT)
    prompt = byte_renderer.render(messages)
    start = next(s.start for s in prompt.segments if s.message_index == 5)
    request = PastRequest.of(messages)
    plan = plan_replay(messages, b"", Journal())
    assert explain_miss(PastRequest.of(TALK), request, plan, prompt, start - 2) is None


def test_the_past_that_shares_most_is_compared_and_old_ones_are_forgotten() -> None:
    past = PastRequests(max_bytes=3000)
    first, second = PastRequest.of(TALK[:2]), PastRequest.of(TALK[:3])
    past.remember("a", first)
    past.remember("b", second)
    assert past.closest(PastRequest.of((*TALK, NEXT))) is second
    assert past.closest(PastRequest.of([NEXT])) is None
    past.remember("b", first.with_answer(TALK[2]))
    assert len(past) == 2
    past.remember("c", PastRequest.of(TALK))
    assert len(past) == 1
