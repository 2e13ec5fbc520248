"""Token ids to plain text, for answers to prompts that no template made."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from dlite_agent.chat.messages import Delta, Message, TextDelta
from dlite_agent.chat.regions import EndReason
from dlite_agent.chat.stop_strings import StopStrings, Stretch
from dlite_agent.chat.stream_parser import ParsedTurn, StopCut, Vocabulary

__all__ = ["RawParser"]


class RawParser:
    """Reads one answer as `StreamParser` does, but all of it is content, markers too.

    Control tokens `<|...|>` are silent, the others are spelled.

    Args:
        vocabulary: Bytes and control tokens of the target's vocabulary.
        stops: What ends the content; None for nothing.
    """

    def __init__(self, vocabulary: Vocabulary, *, stops: StopStrings | None = None) -> None:
        self._vocabulary = vocabulary
        self._silent = {
            token_id
            for text, token_id in vocabulary.control_tokens.items()
            if text.startswith("<|") and text.endswith("|>")
        }
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stretch = Stretch(stops) if stops is not None else None
        self._pieces: list[str] = []
        self._num_tokens = 0

    @property
    def stop_cut(self) -> StopCut | None:
        """Where a stop string ended the answer; what is fed afterwards is not read."""
        stretch = self._stretch
        if stretch is None or stretch.matcher.matched is None:
            return None
        return StopCut(stretch.matcher.matched, self._num_tokens, *stretch.cut())

    def feed(self, token_ids: Iterable[int]) -> list[Delta]:
        """Read sampled ids; return what they made certain."""
        num_before = len(self._pieces)
        for token_id in token_ids:
            if self.stop_cut is not None:
                break
            self._num_tokens += 1
            if token_id not in self._silent:
                self._read(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
            if self._stretch is not None and not self._decoder.getstate()[0]:
                self._stretch.mark(self._num_tokens)
        text = "".join(self._pieces[num_before:])
        return [TextDelta(text)] if text else []

    def finish(self, reason: EndReason) -> ParsedTurn:
        """End the answer; one that was cancelled hands out nothing any more."""
        deltas: tuple[Delta, ...] = ()
        if reason != "cancelled" and self.stop_cut is None:
            num_before = len(self._pieces)
            self._read(self._decoder.decode(b"", final=True))
            if self._stretch is not None:
                self._pieces.append(self._stretch.matcher.flush())
            text = "".join(self._pieces[num_before:])
            deltas = (TextDelta(text),) if text else ()
        message = Message("assistant", "".join(self._pieces))
        return ParsedTurn(deltas, message, (), reason, 0)

    def _read(self, text: str) -> None:
        if self._stretch is not None:
            text = self._stretch.read(text, skips_newlines=False)
        self._pieces.append(text)
