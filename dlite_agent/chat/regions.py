"""Regions of a turn (text, reasoning, call) over decoded text and markers.

Layout newlines, which the chat template writes itself, are dropped here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dlite_agent.chat.call_delta import OpenCall
from dlite_agent.chat.call_json import CallScanner
from dlite_agent.chat.call_xml import XmlCalls, XmlCallScanner
from dlite_agent.chat.delta_merge import merge_deltas
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.markers import CALL, CALL_END, FUNCTION, THINK, THINK_END
from dlite_agent.chat.messages import (
    Delta,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    UnparsedToolCall,
)
from dlite_agent.chat.stop_strings import StopStrings, Stretch

__all__ = ["EndReason", "Region", "TurnRegions"]

EndReason = Literal["stop", "length", "cancelled"]
Region = Literal["text", "reasoning", "call"]


class TurnRegions:
    """Follows one turn.

    Args:
        region: Where it starts.
        new_call_id: Makes the id of the next call.
        first_index: Index of the first call.
        stops: What ends the content. Line breaks that the template writes around thoughts and calls
            are no content, and a match lies inside one stretch of it.
        calls: Reads calls; None: in the JSON form, of unknown tools.

    Attributes:
        region: Where the turn is now.
        stretch: The content between two markers; None without stop strings, or outside.
        calls: Calls so far.
        unparsed: Call regions so far that are no call.
        notes: Repairs, for a person.
    """

    def __init__(
        self,
        region: Region,
        new_call_id: Callable[[], str],
        first_index: int = 0,
        stops: StopStrings | None = None,
        calls: JsonCalls | XmlCalls | None = None,
    ) -> None:
        self.region: Region = region
        self._reader = calls or JsonCalls()
        self._bare_calls = calls if isinstance(calls, XmlCalls) and not calls.is_exact else None
        self._stops = stops
        self.stretch = self._new_stretch()
        self.calls: list[ToolCall] = []
        self.unparsed: list[UnparsedToolCall] = []
        self.notes: list[str] = []
        self._new_call_id = new_call_id
        self._deltas: list[Delta] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._has_thought = region == "reasoning"
        self._held_newlines = ""
        self._is_after_call = False
        self._call = OpenCall(self._reader.scanner(), "")
        self._is_bare = False  # a call without <tool_call>, held back until it is one
        self._after_bare = False
        self._at_line_start = True
        self._num_announced = first_index
        self._calls_in_thought: TurnRegions | None = None

    def take(self) -> list[Delta]:
        """Deltas since the last call, neighbours joined."""
        deltas, self._deltas = merge_deltas(self._deltas), []
        return deltas

    def message(self) -> Message:
        """The assistant's message so far."""
        reasoning = "".join(self._reasoning) if self._has_thought else None
        return Message("assistant", "".join(self._content), reasoning, tuple(self.calls))

    def expected_markers(self) -> tuple[str, ...]:
        """Markers that would mean something now, if they are spelled out."""
        if self.region == "reasoning":
            return (THINK_END, CALL, CALL_END)
        if self.region == "text":
            bare = (FUNCTION,) if self._bare_calls and self._at_line_start else ()
            end = (CALL_END,) if self._after_bare else ()
            return (*bare, *end, CALL) if self._content else (*bare, *end, CALL, THINK)
        return (CALL,) if self._is_bare else self._scanner.expected_markers

    def text(self, text: str) -> None:
        """Read decoded text that holds no marker."""
        if not text or self.stopped_by is not None:
            return
        if self.region == "text":
            self._read_content(text)
            self._at_line_start = text.endswith("\n")
            self._after_bare = self._after_bare and not text.strip("\n")
        elif self.region == "reasoning":
            self._add_reasoning(text)
            inner = self._calls_in_thought
            if inner is not None:
                inner.text(text)
                self._calls_in_thought = None if inner.is_spoilt else inner
        else:
            self._add_call_text(text)

    def marker(self, marker: str) -> None:
        """Read a marker, or another control token that counts as its own text."""
        if self.stopped_by is not None:
            return
        if self.region == "text":
            self._marker_in_text(marker)
        elif self.region == "reasoning":
            self._marker_in_reasoning(marker)
        else:
            self._marker_in_call(marker)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the content; nothing is read after it."""
        return None if self.stretch is None else self.stretch.matcher.matched

    def finish(self, reason: EndReason) -> None:
        """End the turn: close what is open."""
        self._end_stretch()
        if self._is_bare:
            self._release_bare_call()
        if self.region == "call":
            cut = (
                None
                if reason == "stop"
                else f"the call was cut ({reason}); raise max_tokens or ask for less at once"
            )
            self._close_call(cut)
        elif self.region == "text":
            if not self._is_after_call:
                self._emit_content(self._held_newlines)
            self._held_newlines = ""
        elif self._calls_in_thought is not None and reason == "stop":
            self._adopt(self._calls_in_thought)

    # Text: newlines around calls and after a thought belong to the template.

    def _read_content(self, text: str) -> None:
        stretch = self.stretch
        if stretch is None:
            self._add_content(text)
            return
        is_behind_layout = self._is_after_call or (self._has_thought and not self._content)
        shown = stretch.read(text, skips_newlines=is_behind_layout)
        if shown:
            self._add_content(shown)

    def _new_stretch(self) -> Stretch | None:
        return None if self._stops is None else Stretch(self._stops)

    def _end_stretch(self) -> None:
        if self.stretch is not None and self.region == "text":
            held = self.stretch.matcher.flush()
            if held:
                self._add_content(held)

    def _add_content(self, text: str) -> None:
        text, self._held_newlines = self._held_newlines + text, ""
        if not self._content and (self._has_thought or self._is_after_call):
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._is_after_call = False
        if self._is_after_call or not (body or self._content):
            self._held_newlines = text
        elif text.endswith("\n"):
            self._held_newlines = "\n"
            self._emit_content(text[:-1])
        else:
            self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        if text:
            self._content.append(text)
            self._deltas.append(TextDelta(text))

    def _marker_in_text(self, marker: str) -> None:
        if marker in (CALL, THINK, FUNCTION):
            self._end_stretch()
        if marker == FUNCTION:
            self._open_bare_call()
            return
        if marker == CALL_END and self._after_bare:
            self._after_bare = False
            return
        if marker == CALL:
            self._held_newlines = ""
            self._open_call()
        elif marker == THINK:
            if self._content and not self._is_after_call:
                self._emit_content(self._held_newlines)
            self._held_newlines = ""
            self.region = "reasoning"
            self._has_thought = True
        else:
            self.text(marker)

    # Reasoning: newlines at both ends belong to the template.

    def _add_reasoning(self, text: str) -> None:
        text, self._held_newlines = self._held_newlines + text, ""
        if not self._reasoning:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        self._held_newlines = text[len(body) :]
        if body:
            self._reasoning.append(body)
            self._deltas.append(ReasoningDelta(body))

    def _marker_in_reasoning(self, marker: str) -> None:
        if marker == THINK_END:
            self._held_newlines = ""
            self._calls_in_thought = None
            self._to_text()
            return
        if marker == THINK and not self._reasoning:
            return  # the model repeats what the prompt already opened
        self._add_reasoning(marker)
        inner = self._calls_in_thought
        if inner is not None:
            inner.marker(marker)
        if marker == CALL and (inner is None or inner.is_spoilt):
            inner = TurnRegions("text", self._new_call_id, self._num_announced, calls=self._reader)
            inner.marker(marker)
        self._calls_in_thought = inner

    @property
    def is_spoilt(self) -> bool:
        """Whether a thought's end holds more than calls."""
        has_error = self.region == "call" and self._scanner.error is not None
        return bool(has_error or self._content or self._has_thought or self.unparsed)

    def _adopt(self, inner: TurnRegions) -> None:
        inner.finish("stop")
        if inner.calls and not inner.is_spoilt:
            self._deltas += inner.take()
            self.calls += inner.calls
            self.notes += [
                *inner.notes,
                "the model stopped inside its thought after a complete call, which was used",
            ]

    # Calls.

    @property
    def _scanner(self) -> CallScanner | XmlCallScanner:
        return self._call.scanner

    def _open_call(self) -> None:
        self.region = "call"
        self._call = OpenCall(self._reader.scanner(), self._new_call_id())

    def _add_call_text(self, text: str) -> None:
        for char in text:
            if self._scanner.begins_another(char):
                self._close_call()
                self._open_call()
            self._scanner.feed(char)
            if self._is_bare and char in ">\n":
                self._look_at_bare_call()
        if self.region == "call" and not self._is_bare:
            self._emit_call()

    def _emit_call(self) -> None:
        delta = self._call.delta(self._num_announced)
        if delta is not None:
            self._deltas.append(delta)
            self._num_announced = max(self._num_announced, delta.index + 1)

    def _close_call(self, cut: str | None = None) -> None:
        result = self._scanner.close(self._call.call_id, cut)
        self._emit_call()
        if isinstance(result, ToolCall):
            self.calls.append(result)
            self.notes += self._scanner.notes
        else:
            self.unparsed.append(result)
        rest = self._scanner.rest
        if rest.strip():
            self._open_call()
            for char in rest:
                self._scanner.feed(char)
            self._close_call(cut)
        self._to_text()
        self._is_after_call = True

    def _to_text(self) -> None:
        self.region = "text"
        self.stretch = self._new_stretch()
        self._at_line_start = True
        self._is_bare = False

    def _marker_in_call(self, marker: str) -> None:
        is_end = marker in (CALL, CALL_END)
        if self._is_bare and marker == CALL:
            self._release_bare_call()
            self.marker(marker)
            return
        if not is_end or self._is_bare or self._scanner.takes(marker):
            self.text(marker)
            return
        self._close_call()
        if marker == CALL:
            self._open_call()

    # Calls in the XML form without <tool_call> around them.

    def _open_bare_call(self) -> None:
        held = self._held_newlines
        self._open_call()
        self._is_bare = True
        self._held_newlines = held
        self._add_call_text(FUNCTION)

    def _look_at_bare_call(self) -> None:
        """Use the call once it is whole; what names no tool is text."""
        text, xml = self._scanner.text, self._bare_calls
        if xml is None or not xml.has(self._scanner.name):
            self._release_bare_call()
        elif text.endswith("</function>") and xml.is_call(text):
            self._held_newlines = ""
            self._is_bare = False
            self._close_call()
            self._after_bare = True

    def _release_bare_call(self) -> None:
        text = self._scanner.text
        self._to_text()
        self.text(text)
