"""Rendered text to token ids, segment by segment.

A control token is a boundary that byte-level BPE never merges across. The text between two of them
is therefore encoded alone and remembered by its text, so that a turn encodes what is new in it and
nothing else.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlite_agent.chat.template import Tokenizer
from dlite_agent.chat.untrusted import Guard, Sentinels

__all__ = ["EncodedText", "SegmentEncoder", "well_formed"]

_ITEM_BYTES = 4  # of a token id, and about those of a character
_ENTRY_BYTES = 256  # of a remembered segment beside its items


@dataclass(slots=True)
class EncodedText:
    """Token ids with the places of control tokens and marks.

    Attributes:
        token_ids: The ids.
        controls: Spelling and offset of every control token that the template wrote, in order.
        marks: Message index, and how many of the controls stand before that message's mark.
    """

    token_ids: list[int] = field(default_factory=list)
    controls: list[tuple[str, int]] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)

    def extend(self, other: EncodedText) -> None:
        """Append what follows."""
        shift, before = len(self.token_ids), len(self.controls)
        self.token_ids.extend(other.token_ids)
        self.controls.extend((spelling, offset + shift) for spelling, offset in other.controls)
        self.marks.extend((index, count + before) for index, count in other.marks)


class SegmentEncoder:
    """Encodes marked text and remembers the segments seen last.

    Not thread-safe; its renderer owns it.

    Args:
        tokenizer: Encodes segments that are not known yet.
        guard: Knows the control tokens.
        max_bytes: Budget of the memory: 4 bytes a token and a character, 256 a segment.

    Attributes:
        num_encoded_chars: Characters encoded since construction: the work that was not saved.
    """

    def __init__(self, tokenizer: Tokenizer, guard: Guard, *, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._control_ids = dict(tokenizer.control_tokens)
        self._spellings = {token_id: text for text, token_id in self._control_ids.items()}
        self._pattern = guard.pattern
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self.num_encoded_chars = 0

    def encode(self, text: str, sentinels: Sentinels) -> EncodedText:
        """Encode text with sentinels; every control token that it spells becomes its id."""
        encoded = EncodedText()
        segment: list[str] = []
        places = re.split(f"({self._pattern}|{sentinels.mark}\\d+{sentinels.mark})", text)
        for number, part in enumerate(places):
            if number % 2 == 0:
                segment.append(part)
            elif part in self._control_ids:
                self._end_segment(segment, sentinels, encoded)
                encoded.controls.append((part, len(encoded.token_ids)))
                encoded.token_ids.append(self._control_ids[part])
            else:
                index = int(part.strip(sentinels.mark))
                encoded.marks.append((index, len(encoded.controls)))
        self._end_segment(segment, sentinels, encoded)
        return encoded

    def encode_whole(self, text: str, sentinels: Sentinels) -> EncodedText:
        """Encode text at once, or segment-wise where that would make other control tokens.

        For vocabularies whose segments do not join.
        """
        encoded = self.encode(text, sentinels)
        stripped = well_formed(sentinels.strip(text))
        ids = self._tokenizer.encode_template(stripped)
        controls = [(self._spellings[i], n) for n, i in enumerate(ids) if i in self._spellings]
        if [spelling for spelling, _ in controls] != [spelling for spelling, _ in encoded.controls]:
            return encoded
        self.num_encoded_chars += len(stripped)
        return EncodedText(ids, controls, encoded.marks)

    def _end_segment(self, segment: list[str], sentinels: Sentinels, encoded: EncodedText) -> None:
        text = "".join(segment).replace(sentinels.mask, "")
        segment.clear()
        if text:
            encoded.token_ids.extend(self._segment_ids(text))

    def _segment_ids(self, text: str) -> Sequence[int]:
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return known
        self.num_encoded_chars += len(text)
        ids = array("i", self._tokenizer.encode_untrusted(well_formed(text)))
        self._known[text] = ids
        self._bytes += _num_bytes(text, ids)
        while self._bytes > self._max_bytes:
            self._bytes -= _num_bytes(*self._known.popitem(last=False))
        return ids


def well_formed(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8, by U+FFFD; pairs become their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _num_bytes(text: str, ids: Sequence[int]) -> int:
    return _ENTRY_BYTES + _ITEM_BYTES * (len(text) + len(ids))
