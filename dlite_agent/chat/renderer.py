"""Messages to token ids, by the checkpoint's template; only that makes control tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dlite_agent.chat.marked import MarkedText, TemplateCall, render_marked
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.segments import EncodedText, SegmentEncoder
from dlite_agent.chat.template import (
    Tokenizer,
    number_messages,
    probe_template,
    template_messages,
)
from dlite_agent.chat.untrusted import Guard
from dlite_agent.errors import RequestError, UnsupportedCheckpointError

__all__ = ["RenderedPrompt", "Renderer", "Segment", "Tokenizer"]

_THINK_START = "<think>"
_CANNED = (
    Message("user", "Fix  it:\n\n\tdef f(x):\r\n    if x:\n        return 'é≠😀' \n"),
    Message("assistant", " 1. don't\n\n", reasoning="Why?\n"),
    Message("user", "   "),
)
_INSPECTION_NOTE = (
    "a message quotes a control token that the chat template looks for; it was rendered as text, "
    "so the prompt differs from the template's own reading"
)
_WHOLE_NOTE = (
    "this tokenizer's segments do not join to the whole text; every turn encodes the whole history"
)
_SPLICE_NOTE = "message {} was rendered instead of spliced: the chat template hides its turn"


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one message, [start, stop).

    Attributes:
        message_index: Index into the request's messages; None for what belongs to none (a preamble
            of the template, the generation prompt).
        start: First token.
        stop: One past the last token.
    """

    message_index: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt.

    Attributes:
        token_ids: What the target reads.
        segments: Its parts in order, without gaps. Where the template hides where messages begin,
            everything before the generation prompt is one part without a message; none at all
            where it hides that too.
        notes: Oddities, for a person.
        starts_in_reasoning: Whether the generation prompt has opened a thought.
        spliced: Indices of the assistant messages that were spliced.
        generation_suffix: The ids of the generation prompt after the header of the assistant's
            turn: an empty thought where thinking is off, an opened one where the template forces
            it, else none. None without a generation prompt, or where the header cannot be told
            apart; then this turn cannot be spliced later.
    """

    token_ids: tuple[int, ...]
    segments: tuple[Segment, ...] = ()
    notes: tuple[str, ...] = ()
    starts_in_reasoning: bool = False
    spliced: frozenset[int] = frozenset()
    generation_suffix: tuple[int, ...] | None = None

    def message_at(self, token_index: int) -> int | None:
        """Index of the message that a token belongs to; None outside messages and past the end."""
        place = bisect_right(self.segments, token_index, key=lambda segment: segment.start) - 1
        if place < 0 or token_index >= self.segments[place].stop:
            return None
        return self.segments[place].message_index

    def turn_record(self, sampled: Sequence[int]) -> tuple[int, ...] | None:
        """What the journal keeps of the turn that answered this prompt: a splice for later prompts.

        These are all ids after the header of the assistant's turn: the generation suffix as it was
        then, and what was sampled, the stop token included. None where this turn cannot be
        spliced.
        """
        if self.generation_suffix is None:
            return None
        return (*self.generation_suffix, *sampled)


class Renderer:
    """Renders with the checkpoint's template. Not thread-safe; its engine's worker owns it.

    Args:
        tokenizer: The vocabulary and the template.
        is_guarded: Strings of a request that spell a control token stay text. False lets them
            become it, as the template alone does.
        max_cache_bytes: Budget for remembered segments: 4 bytes a token and a character, 256 each.

    Attributes:
        traits: What was found out about the template.
        joins_segments: Whether segments encoded alone join to the ids of the whole text; checked
            once, on a small conversation. Where they do not, every turn encodes the whole text and
            a note says so.

    Raises:
        UnsupportedCheckpointError: The template does not even render a question, an answer and a
            question.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        is_guarded: bool = True,
        max_cache_bytes: int = 64 * 2**20,
    ) -> None:
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer.control_tokens, is_on=is_guarded)
        self._encoder = SegmentEncoder(tokenizer, self._guard, max_bytes=max_cache_bytes)
        self.traits = probe_template(tokenizer)
        self.joins_segments = True
        try:
            whole = tokenizer.apply_template(template_messages(_CANNED, self.traits), None, True)
            ids = self.render(_CANNED).token_ids
        except RequestError as error:
            raise UnsupportedCheckpointError(
                f"the chat template refuses a plain conversation ({error}); "
                "use a checkpoint with a working chat template"
            ) from error
        self.joins_segments = list(ids) == tokenizer.encode_template(whole)

    def sibling(self, *, max_cache_bytes: int = 8 * 2**20) -> Renderer:
        """Another renderer of the same template, which remembers segments of its own."""
        other = object.__new__(Renderer)
        other.traits, other.joins_segments = self.traits, self.joins_segments
        other._tokenizer, other._guard = self._tokenizer, self._guard
        other._encoder = SegmentEncoder(self._tokenizer, self._guard, max_bytes=max_cache_bytes)
        return other

    @property
    def closing_id(self) -> int | None:
        """The token that closes an assistant's message, if the template has one."""
        return self._tokenizer.control_tokens.get(self.traits.closer)

    @property
    def strips_thoughts(self) -> bool:
        """Whether the template drops thoughts of turns before the last user message."""
        return self.traits.strips_thoughts

    @property
    def num_encoded_chars(self) -> int:
        """Characters tokenised since construction; what was remembered does not count."""
        return self._encoder.num_encoded_chars

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        template_kwargs: Mapping[str, JSON] | None = None,
        splices: Mapping[int, Sequence[int]] | None = None,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        """Render messages to the prompt's token ids.

        Without splices these are the ids of `apply_chat_template` of the normalised messages,
        unless a string of the request spells a control token: that stays text.

        Args:
            messages: The history, normalised.
            tools: What the model may call.
            template_kwargs: Further variables of the template.
            splices: By index of an assistant message, all ids after its header, as
                `RenderedPrompt.turn_record` returned them. The closing token is added where it was
                not sampled.
            add_generation_prompt: Whether the assistant's turn is opened at the end.

        Raises:
            RequestError: The template refuses the messages.
            UnsupportedParameterError: A template variable has a reserved name.
        """
        splices = splices or {}
        numbered = number_messages(messages, self.traits)
        wanted = frozenset(i for i, m in numbered if i in splices and m.role == "assistant")
        call = TemplateCall(
            numbered,
            tools,
            dict(template_kwargs or {}),
            wanted if self.traits.header else frozenset(),
            add_generation_prompt,
        )
        marked, regions = self._place(call)
        if len(regions) < len(call.spliced):
            marked, regions = self._place(replace(call, spliced=frozenset(regions)))
        notes = [] if marked.is_faithful else [_INSPECTION_NOTE]
        notes += [] if self.joins_segments else [_WHOLE_NOTE]
        notes += [_SPLICE_NOTE.format(index) for index in sorted(splices.keys() - regions.keys())]
        prompt = self._encode(call, marked, regions, splices)
        return replace(prompt, notes=tuple(notes), spliced=frozenset(regions))

    def _place(self, call: TemplateCall) -> tuple[MarkedText, dict[int, tuple[int, int]]]:
        """Render, and find [start, stop) of every spliced turn that the text shows, in order."""
        marked = render_marked(self._tokenizer, self._guard, self.traits, call)
        regions: dict[int, tuple[int, int]] = {}
        cursor = 0
        for index in sorted(call.spliced):
            place = marked.text.find(marked.sentinels.mark_of(index), cursor)
            header = marked.text.rfind(self.traits.header, cursor, max(place, 0))
            start = header + len(self.traits.header)
            stop = marked.text.find(self.traits.closer, start)
            if min(place, header) >= 0 and stop > place:
                regions[index] = (start, stop)
                cursor = stop
        return marked, regions

    def _encode(
        self,
        call: TemplateCall,
        marked: MarkedText,
        regions: Mapping[int, tuple[int, int]],
        splices: Mapping[int, Sequence[int]],
    ) -> RenderedPrompt:
        encode = self._encoder.encode if self.joins_segments else self._encoder.encode_whole
        encoded = EncodedText()
        cursor = 0
        for index, (start, stop) in regions.items():
            encoded.extend(encode(marked.text[cursor:start], marked.sentinels))
            encoded.marks.append((index, len(encoded.controls)))
            encoded.token_ids.extend(splices[index])
            is_closed = bool(splices[index]) and splices[index][-1] == self.closing_id
            cursor = stop + len(self.traits.closer) * is_closed
        rest = marked.text[cursor:]
        suffix_start = self._suffix_start(rest, marked) if call.add_generation_prompt else None
        encoded.extend(encode(rest[:suffix_start], marked.sentinels))
        suffix = EncodedText()
        generation_start = None
        if suffix_start is not None:
            suffix = encode(rest[suffix_start:], marked.sentinels)
            generation_start = _last_offset(encoded.controls, self.traits.opener)
            encoded.extend(suffix)
        visible_end = marked.sentinels.strip(rest).rstrip()
        return RenderedPrompt(
            token_ids=tuple(encoded.token_ids),
            segments=self._segments(encoded, generation_start, has_marks=marked.has_marks),
            starts_in_reasoning=call.add_generation_prompt and visible_end.endswith(_THINK_START),
            generation_suffix=None if suffix_start is None else tuple(suffix.token_ids),
        )

    def _suffix_start(self, text: str, marked: MarkedText) -> int | None:
        """Where the generation prompt's header ends; None where no segment ends there."""
        header = text.rfind(self.traits.header) if self.traits.header else -1
        start = header + len(self.traits.header)
        suffix = text[start:]
        if header < 0 or self.traits.closer in suffix or marked.sentinels.mark in suffix:
            return None
        is_boundary = not suffix or suffix.startswith(tuple(self._tokenizer.control_tokens))
        return start if is_boundary and (self.joins_segments or not suffix) else None

    def _segments(
        self, encoded: EncodedText, generation_start: int | None, *, has_marks: bool
    ) -> tuple[Segment, ...]:
        """Give every token to a message: one begins at its opening control token."""
        if not has_marks and generation_start is None:
            return ()
        starts: list[tuple[int | None, int]] = [(None, 0)]
        seen = 0
        for index, count in encoded.marks if has_marks else ():
            between = encoded.controls[seen:count]
            start = _last_offset(between, self.traits.opener)
            if start is None:
                start = between[-1][1] if between else starts[-1][1]
            starts.append((index, start))
            seen = count
        if generation_start is not None:
            starts.append((None, generation_start))
        stops = [start for _, start in starts[1:]] + [len(encoded.token_ids)]
        pairs = zip(starts, stops, strict=True)
        return tuple(Segment(i, start, stop) for (i, start), stop in pairs if start < stop)


def _last_offset(controls: Iterable[tuple[str, int]], spelling: str) -> int | None:
    return max((offset for token, offset in controls if token == spelling), default=None)
