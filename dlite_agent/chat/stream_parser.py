"""Token ids to typed deltas: text, reasoning and tool calls, the same for every split.

Where the vocabulary has a marker as a control token, only that id opens or closes a region, and the
same characters spelled out are text. Where it has not, the characters count, and at most a marker's
beginning is held back. Layout newlines that the chat template writes itself are dropped, so that
content and reasoning render back equal.

What is decided here, where models differ:

- `<tool_call>` inside a thought is reasoning. Only if the turn *stops* inside the thought, and it
  ends with nothing but complete calls, are they handed out, beside the reasoning (which keeps their
  text: it was sent already).
- A request without tools has no calls in its answer: `<tool_call>` and `</tool_call>` are text.
- A call that has no `</tool_call>` counts if its JSON is complete and the model stopped. A call
  that was cut by a limit never counts.
- Inside a JSON string `</tool_call>` is text, unless it follows a raw newline, which no JSON string
  can hold.
- `<think>` as an id opens a thought anywhere in the answer, spelled out only before the first text.
- In the XML form (`chat.call_xml`), `<tool_call>` and `</tool_call>` inside a value are text, and
  `<function=NAME>` at the start of a line, where NAME is a tool of the request, opens a call
  without `<tool_call>`: it is held back until it is whole, and is text where it never is.
- Other control tokens: `<|...|>` is silent, the rest is text.
- Stop strings end the content. Thoughts and calls are not searched: a phrase that the model thinks
  of, or writes into a file, ends nothing. The content ends before the string.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.delta_merge import merge_deltas
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.markers import CALL, CALL_END, FUNCTION, THINK, THINK_END
from dlite_agent.chat.messages import Delta, Message, UnparsedToolCall
from dlite_agent.chat.regions import EndReason, Region, TurnRegions
from dlite_agent.chat.stop_strings import StopStrings

__all__ = [
    "EndReason",
    "ParsedTurn",
    "Region",
    "StopCut",
    "StreamParser",
    "Vocabulary",
    "merge_deltas",
]

_MARKERS = (THINK, THINK_END, CALL, CALL_END)


class Vocabulary(Protocol):
    """What the parser needs of a tokenizer."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Added tokens, text to id."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of an ordinary token; may end inside a character. Empty for an id without text."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A whole turn.

    Attributes:
        deltas: What `finish` released; comes after everything that `feed` returned.
        message: The assistant's message. Content and reasoning are exactly the joined deltas.
        unparsed: Call regions that are no call, in order. One whose name was already streamed keeps
            the id that was streamed.
        finish_reason: `length` and `cancelled` win over `tool_calls`.
        num_reasoning_tokens: Tokens of thoughts, `<think>` and `</think>` included where sampled.
        notes: Repairs, for a person.
    """

    deltas: tuple[Delta, ...]
    message: Message
    unparsed: tuple[UnparsedToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls", "cancelled"]
    num_reasoning_tokens: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCut:
    """Where a stop string ended the content.

    Attributes:
        stop: The string that was found; no part of the content.
        num_tokens: Tokens of the turn up to the one that completed the string.
        num_kept: Tokens of the turn that end before the string.
        rest: Text between those and the string; None where the kept tokens could not be told.
    """

    stop: str
    num_tokens: int
    num_kept: int
    rest: str | None


class StreamParser:
    """Parses one turn.

    Args:
        vocabulary: Bytes and control tokens of the target's vocabulary.
        starts_in: `reasoning` if the rendered prompt ends inside an open thought.
        new_call_id: Makes the id of the next call; the default is random.
        stops: What ends the content; None for nothing.
        calls: Reads calls; None: in the JSON form, of unknown tools.
        reads_calls: False where the request has no tools: the markers of calls are text then.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        starts_in: Literal["text", "reasoning"] = "text",
        new_call_id: Callable[[], str] | None = None,
        stops: StopStrings | None = None,
        calls: JsonCalls | XmlCalls | None = None,
        reads_calls: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._control = {token_id: text for text, token_id in vocabulary.control_tokens.items()}
        self._plain: tuple[str, ...] = () if reads_calls else (CALL, CALL_END)
        markers: tuple[str, ...] = _MARKERS if reads_calls else (THINK, THINK_END)
        if reads_calls and isinstance(calls, XmlCalls):
            markers = (*markers, FUNCTION)
        self._spelled = tuple(
            marker for marker in markers if marker not in vocabulary.control_tokens
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # beginning of a spelled-out marker
        self._turn = TurnRegions(
            starts_in, new_call_id or _random_call_id, stops=stops, calls=calls
        )
        self._num_reasoning_tokens = 0
        self._num_tokens = 0
        self._mark()

    @property
    def region(self) -> Region:
        """Where the stream is now."""
        return self._turn.region

    @property
    def stop_cut(self) -> StopCut | None:
        """Where a stop string ended the turn; what is fed afterwards is not read."""
        stretch = self._turn.stretch
        if stretch is None or stretch.matcher.matched is None:
            return None
        return StopCut(stretch.matcher.matched, self._num_tokens, *stretch.cut())

    def feed(self, token_ids: Iterable[int]) -> list[Delta]:
        """Read sampled ids, stop token included if there was one; return what they made certain."""
        for token_id in token_ids:
            if self._turn.stopped_by is not None:
                break
            self._num_tokens += 1
            was_reasoning = self._turn.region == "reasoning"
            control = self._control.get(token_id)
            if control is None:
                self._read(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
            else:
                self._release()
                if control in self._plain:
                    self._turn.text(control)
                elif not (control.startswith("<|") and control.endswith("|>")):
                    self._turn.marker(control)
            if was_reasoning or self._turn.region == "reasoning":
                self._num_reasoning_tokens += 1
            self._mark()
        return self._turn.take()

    def finish(self, reason: EndReason) -> ParsedTurn:
        """End the turn; nothing may be fed afterwards.

        A turn that was cancelled hands nothing out any more, so that its message is what its reader
        got: without the half of a character, and without what might have become a marker.
        """
        turn = self._turn
        handed_out = turn.message()
        self._release()
        turn.finish(reason)
        message, deltas = turn.message(), tuple(turn.take())
        if reason == "cancelled":
            message = replace(message, content=handed_out.content, reasoning=handed_out.reasoning)
            deltas = ()
        finish_reason: Literal["stop", "length", "tool_calls", "cancelled"] = reason
        if reason == "stop" and turn.calls:
            finish_reason = "tool_calls"
        return ParsedTurn(
            deltas=deltas,
            message=message,
            unparsed=tuple(turn.unparsed),
            finish_reason=finish_reason,
            num_reasoning_tokens=self._num_reasoning_tokens,
            notes=tuple(turn.notes),
        )

    def _mark(self) -> None:
        """Note where a token ended, unless it ended inside a character or a marker."""
        stretch = self._turn.stretch
        if stretch is None or self._turn.region != "text" or self._held:
            return
        if not self._decoder.getstate()[0]:
            stretch.mark(self._num_tokens)

    def _read(self, text: str) -> None:
        if not self._spelled:
            self._turn.text(text)
            return
        for char in text:
            self._read_char(char)

    def _read_char(self, char: str) -> None:
        """Look for spelled-out markers; none holds a second `<`, so a failed one restarts here."""
        candidates = [marker for marker in self._turn.expected_markers() if marker in self._spelled]
        held = self._held + char
        if held in candidates:
            self._held = ""
            self._turn.marker(held)
        elif any(marker.startswith(held) for marker in candidates):
            self._held = held
        elif self._held:
            self._turn.text(self._held)
            self._held = ""
            self._read_char(char)
        else:
            self._turn.text(char)

    def _release(self) -> None:
        """What is held back is no character and no marker any more."""
        self._read(self._decoder.decode(b"", final=True))
        if self._held:
            self._turn.text(self._held)
            self._held = ""


def _random_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
