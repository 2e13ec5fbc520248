"""Answers to prompts without a template are text, markers too, however they are cut."""

from __future__ import annotations

import pytest

from dlite_agent.chat.messages import Delta, TextDelta
from dlite_agent.chat.raw_parser import RawParser
from dlite_agent.chat.regions import EndReason
from dlite_agent.chat.stop_strings import StopStrings
from dlite_agent.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()
TEXT = "<think>é</think>\n<tool_call>{}</tool_call> 😀"


def read(text: str, size: int, reason: EndReason = "stop", *stops: str) -> tuple[str, RawParser]:
    """What a parser hands out of a text that comes in pieces of so many tokens."""
    parser = RawParser(TOKENIZER, stops=StopStrings(stops) if stops else None)
    ids = TOKENIZER.encode_template(text)
    deltas: list[Delta] = []
    for start in range(0, len(ids), size):
        deltas += parser.feed(ids[start : start + size])
    parsed = parser.finish(reason)
    deltas += parsed.deltas
    told = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert parsed.message.content == told
    assert parsed.finish_reason == reason
    return told, parser


@pytest.mark.parametrize("size", [1, 3, 100])
def test_markers_are_text_and_the_end_of_a_turn_is_silent(size: int) -> None:
    assert read(TEXT + "<|im_end|>", size)[0] == TEXT


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_ends_the_text_wherever_it_is(size: int) -> None:
    told, parser = read(TEXT, size, "stop", "call>{", "nowhere")
    assert told == "<think>é</think>\n<tool_"
    assert parser.stop_cut is not None
    assert parser.stop_cut.stop == "call>{"
    assert parser.feed(TOKENIZER.encode_template("more")) == []


@pytest.mark.parametrize("size", [1, 3])
def test_what_might_have_become_a_stop_string_is_text_at_the_end(size: int) -> None:
    assert read("a sto", size, "length", "stop")[0] == "a sto"
    assert read("a sto", size, "cancelled", "stop")[0] == "a "


def test_half_a_character_is_one_sign_at_the_end() -> None:
    parser = RawParser(TOKENIZER)
    (first, *_) = "é".encode()
    assert parser.feed([first]) == []
    assert parser.finish("length").deltas == (TextDelta("\ufffd"),)
    assert RawParser(TOKENIZER).finish("cancelled").deltas == ()
