# ruff: noqa: ARG002 - the ChatScreen protocol has these arguments
"""What the chat shows: text for a person, or JSON for a script.

An answer is written as it comes, in the model's own characters. Rendered as Markdown it would have
to be drawn again with every token, which a terminal can do for what fits on it only, and what is
copied would not be what was said.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from dlite_agent.chat.messages import JSON, ToolCall, UnparsedToolCall
from dlite_agent.cli.chat_tools import ChatTool
from dlite_agent.cli.console import harmless, has_colours, note, rendered, styled, write
from dlite_agent.errors import DLiteError
from dlite_agent.outputs import Generation, TurnStats

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.text import Text

__all__ = ["ChatScreen", "JSONScreen", "TextScreen", "status_line"]

_NUM_SHOWN = 2  # lines of a result, at its beginning and at its end
_MAX_WIDTH = 160
_MAX_ARGUMENT = 60


class ChatScreen(Protocol):
    """Is told what happens, in order."""

    def text(self, text: str) -> None:
        """More of an answer."""
        ...

    def thought(self, text: str) -> None:
        """More of a thought."""
        ...

    def calling(self, name: str) -> None:
        """A call begins to be written."""
        ...

    def answered(self, generation: Generation) -> None:
        """The model has ended; its calls are run now."""
        ...

    def call(self, call: ToolCall, tool: ChatTool | None) -> None:
        """A call, before anybody is asked about it."""
        ...

    def result(self, call: ToolCall, result: str) -> None:
        """What became of it."""
        ...

    def unparsed(self, region: UnparsedToolCall, result: str) -> None:
        """What stood where a call should be, and what the model is told."""
        ...

    def stopped(self) -> None:
        """Ctrl-C."""
        ...

    def end_turn(self, generation: Generation | None, text: str) -> None:
        """A turn is over, its calls included; None: it was stopped."""
        ...

    def limit(self, max_turns: int) -> None:
        """The line had as many turns as it may."""
        ...

    def stuck(self, name: str) -> None:
        """A call failed over and over."""
        ...

    def error(self, error: DLiteError, *, is_acted: bool) -> None:
        """The line was refused; `is_acted`: after tools had run."""
        ...


class TextScreen:
    """For a person; colours, figures and what is wiped again are for a terminal."""

    def __init__(self) -> None:
        self._is_line_open = False
        self._is_thinking = False
        self._announced = 0  # columns of what stands there until a call is complete

    def text(self, text: str) -> None:
        """Write it as it comes, in a line of its own behind a thought."""
        if self._is_thinking:
            self._end_line()
        self._write(styled(text))

    def thought(self, text: str) -> None:
        """Write it weakly."""
        self._write(styled(text, "dim"))
        self._is_thinking = True

    def calling(self, name: str) -> None:
        """Say that something is written which is shown at its end only."""
        if sys.stdout.isatty():
            self._end_line()
            shown = f"… {name}"
            write(styled(shown, "dim"), end="")
            self._announced = len(harmless(shown))

    def answered(self, generation: Generation) -> None:
        """End the line, and write the figures."""
        self._wipe()
        if not (generation.message.tool_calls or generation.unparsed):
            self._is_line_open = True  # an empty answer has a line, too
        self._end_line()
        if sys.stdout.isatty():
            write(styled(status_line(generation.stats), "dim"))

    def call(self, call: ToolCall, tool: ChatTool | None) -> None:
        """Write it in a line, and what it would change."""
        line, changes = f"* {_call_line(call)}", _changes(call, tool)
        if not has_colours():
            write("\n  ".join([line, *changes]))
            return
        write(rendered(_code(line, "python"), is_whole=True), end="")
        if changes and tool is not None:
            write(rendered(_panel(changes, tool.preview_lexer)), end="")

    def result(self, call: ToolCall, result: str) -> None:
        """Write its first lines and its last ones."""
        style = "red" if result.startswith("Error: ") else "dim"
        lines = [line for line in result.splitlines() if line.strip()]
        if len(lines) > 2 * _NUM_SHOWN:
            left = f"({len(lines) - 2 * _NUM_SHOWN} more lines)"
            lines = [*lines[:_NUM_SHOWN], left, *lines[-_NUM_SHOWN:]]
        for line in lines:
            write(styled(f"  {_cut(line)}", style))

    def unparsed(self, region: UnparsedToolCall, result: str) -> None:
        """Write what was meant as a call."""
        write(f"* {_cut(region.text.strip())}")
        write(styled(f"  {_cut(result)}", "red"))

    def stopped(self) -> None:
        """Say so where the text ends."""
        self._write(" [stopped]" if self._is_line_open else "[stopped]")

    def end_turn(self, generation: Generation | None, text: str) -> None:
        """End the line."""
        self._wipe()
        self._end_line()

    def limit(self, max_turns: int) -> None:
        """Say how to go on."""
        note(f"stopped after {max_turns} turns (--max-turns); say 'go on' for more")

    def stuck(self, name: str) -> None:
        """Say why the work ends."""
        note(f"stopped: {harmless(name)} failed three times in the same way")

    def error(self, error: DLiteError, *, is_acted: bool) -> None:
        """Write it, and what became of the line."""
        self.end_turn(None, "")
        note(str(error))
        if is_acted:
            note("the line and its calls are forgotten; what they changed stays")

    def _write(self, text: str) -> None:
        self._wipe()
        if text:
            write(text, end="")
            self._is_line_open = not text.endswith("\n")

    def _wipe(self) -> None:
        if self._announced:
            write("\r" + " " * self._announced + "\r", end="")
            self._announced = 0

    def _end_line(self) -> None:
        self._wipe()
        if self._is_line_open:
            write()
        self._is_line_open = self._is_thinking = False


class JSONScreen:
    """For a script: one object a turn, or an error."""

    def __init__(self) -> None:
        self._calls: list[JSON] = []
        self._unparsed: list[JSON] = []

    def text(self, text: str) -> None:
        """Wait for the end."""

    def thought(self, text: str) -> None:
        """Leave it out."""

    def calling(self, name: str) -> None:
        """Wait for the end."""

    def answered(self, generation: Generation) -> None:
        """Wait for the results."""

    def call(self, call: ToolCall, tool: ChatTool | None) -> None:
        """Wait for its result."""

    def result(self, call: ToolCall, result: str) -> None:
        """Keep it."""
        given: dict[str, JSON] = {"id": call.id, "name": call.name, "arguments": call.arguments}
        self._calls.append({**given, "result": result})

    def unparsed(self, region: UnparsedToolCall, result: str) -> None:
        """Keep it."""
        self._unparsed.append({"id": region.id, "text": region.text, "result": result})

    def stopped(self) -> None:
        """The results and the finish reason say it."""

    def end_turn(self, generation: Generation | None, text: str) -> None:
        """Write the turn."""
        row = {
            "content": text,
            "finish_reason": generation.finish_reason if generation else "cancelled",
            "tool_calls": self._calls,
            "unparsed": self._unparsed,
            "stats": asdict(generation.stats) if generation else None,
        }
        self._calls, self._unparsed = [], []
        write(json.dumps(row))

    def limit(self, max_turns: int) -> None:
        """Write it as an error."""
        self._error("max_turns", f"the line had {max_turns} turns, its limit; raise --max-turns")

    def stuck(self, name: str) -> None:
        """Write it as an error."""
        self._error("stuck", f"{name} failed three times in the same way")

    def error(self, error: DLiteError, *, is_acted: bool) -> None:
        """Write it."""
        self._error(error.code, str(error))

    def _error(self, code: str, message: str) -> None:
        write(json.dumps({"error": {"code": code, "message": message}}))


def _call_line(call: ToolCall) -> str:
    """A call in a line; signs that a terminal would obey or hide are written as escapes."""
    if not isinstance(call.arguments, dict):
        return f"{harmless(call.name)}({_cut(repr(call.arguments))})"
    shown = [f"{name}={_shortened(value)}" for name, value in call.arguments.items()]
    return f"{harmless(call.name)}({', '.join(shown)})"


def _changes(call: ToolCall, tool: ChatTool | None) -> list[str]:
    if tool is None or tool.preview is None or not isinstance(call.arguments, dict):
        return []
    return [harmless(line) for line in tool.preview(call.arguments)]


def _panel(lines: list[str], lexer: str) -> Panel:
    """Harmless lines between two rules; folded, never cut, since somebody consents to them.

    No border stands beside them, which would be copied with what somebody wants to keep or try.
    """
    from rich.box import HORIZONTALS
    from rich.panel import Panel

    return Panel(_code("\n".join(lines), lexer), box=HORIZONTALS, border_style="dim", expand=False)


def _code(text: str, lexer: str) -> Text:
    from rich.syntax import Syntax

    code = Syntax("", lexer, theme="ansi_dark", word_wrap=True).highlight(text)
    code.remove_suffix("\n")
    return code


def status_line(stats: TurnStats) -> str:
    """Cached share, acceptance length and speed of a turn, in one line."""
    rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} cached, "
        f"{stats.prefilled_tokens} prefilled · "
        f"{stats.completion_tokens} written, τ {stats.acceptance_length:.2f}, {rate:.0f} tok/s"
    )


def _shortened(value: JSON) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_ARGUMENT else f"{text[:_MAX_ARGUMENT]}… ({len(text)})"


def _cut(line: str) -> str:
    line = harmless(line)
    return line if len(line) <= _MAX_WIDTH else f"{line[:_MAX_WIDTH]}…"
