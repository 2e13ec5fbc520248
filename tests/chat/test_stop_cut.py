"""Stop strings in a parsed turn: what they end, and which tokens lie before them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.chat.messages import Delta, ReasoningDelta, TextDelta
from dlite_agent.chat.stop_strings import StopStrings
from dlite_agent.chat.stream_parser import ParsedTurn, StopCut, StreamParser, merge_deltas

CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
CALL = ["<tool_call>", '\n{"name": "f", "arguments": {"a": "STOP"}}\n', "</tool_call>"]


class Pieces:
    """A vocabulary of these texts, control tokens first; ids in the order of appearance."""

    def __init__(self, texts: list[str | bytes], *, spelled: bool = False) -> None:
        self.control_tokens: Mapping[str, int] = (
            {} if spelled else {text: i for i, text in enumerate(CONTROL)}
        )
        self._bytes = [t if isinstance(t, bytes) else t.encode() for t in (*CONTROL, *texts)]
        self.ids = [
            CONTROL.index(text) if text in self.control_tokens else len(CONTROL) + i
            for i, text in enumerate(texts)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def text(self, token_ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode()


def run(
    vocabulary: Pieces, stops: list[str], size: int = 1, starts_in: str = "text"
) -> tuple[list[Delta], ParsedTurn, StopCut | None]:
    parser = StreamParser(
        vocabulary,
        starts_in=starts_in,  # type: ignore[arg-type]  # one of two
        stops=StopStrings(stops),
    )
    deltas: list[Delta] = []
    for start in range(0, len(vocabulary.ids), size):
        deltas += parser.feed(vocabulary.ids[start : start + size])
    cut = parser.stop_cut
    turn = parser.finish("stop")
    return merge_deltas([*deltas, *turn.deltas]), turn, cut


@pytest.mark.parametrize("size", [1, 2, 10])
def test_content_ends_before_a_string_that_cuts_inside_a_token(size: int) -> None:
    vocabulary = Pieces(["One", " two", " thSTOPree", " four"])
    deltas, turn, cut = run(vocabulary, ["STOP"], size)
    assert deltas == [TextDelta("One two th")]
    assert turn.message.content == "One two th"
    assert turn.finish_reason == "stop"
    assert cut == StopCut("STOP", num_tokens=3, num_kept=2, rest=" th")


def test_a_string_over_several_tokens_is_never_shown() -> None:
    vocabulary = Pieces(["a", "\nObs", "erv", "ation:", " x"])
    parser = StreamParser(vocabulary, stops=StopStrings(["\nObservation:"]))
    shown = [parser.feed([token_id]) for token_id in vocabulary.ids]
    assert shown == [[TextDelta("a")], [], [], [], []]
    assert parser.stop_cut == StopCut("\nObservation:", num_tokens=4, num_kept=1, rest="")


def test_a_beginning_that_comes_to_nothing_is_shown_as_soon_as_it_is_known() -> None:
    vocabulary = Pieces(["a ST", "O", "X", " ST"])
    parser = StreamParser(vocabulary, stops=StopStrings(["STOP"]))
    shown = [parser.feed([token_id]) for token_id in vocabulary.ids]
    assert shown == [[TextDelta("a ")], [], [TextDelta("STOX")], [TextDelta(" ")]]
    assert parser.finish("length").deltas == (TextDelta("ST"),)
    assert parser.stop_cut is None


def test_tokens_that_end_inside_a_character_are_not_kept() -> None:
    euro = "€".encode()
    vocabulary = Pieces(["a", euro[:1], euro[1:] + b"bSTOP"])
    _, turn, cut = run(vocabulary, ["STOP"])
    assert turn.message.content == "a€b"
    assert cut == StopCut("STOP", num_tokens=3, num_kept=1, rest="€b")


def test_strings_of_several_bytes_are_found_in_any_split() -> None:
    raw = "fine 停止 no".encode()
    vocabulary = Pieces([raw[i : i + 1] for i in range(len(raw))])
    for size in range(1, 8):
        _, turn, cut = run(vocabulary, ["停止"], size)
        assert turn.message.content == "fine "
        assert cut == StopCut("停止", num_tokens=11, num_kept=5, rest="")


def test_thoughts_and_calls_are_not_searched() -> None:
    vocabulary = Pieces(["<think>", "\nSTOP\n", "</think>", "\n\n", "Hi ", *CALL, "<|im_end|>"])
    deltas, turn, cut = run(vocabulary, ["STOP"])
    assert cut is None
    assert turn.finish_reason == "tool_calls"
    assert turn.message.reasoning == "STOP"
    assert turn.message.tool_calls[0].arguments == {"a": "STOP"}
    assert ReasoningDelta("STOP") in deltas


def test_line_breaks_of_the_template_are_no_content() -> None:
    vocabulary = Pieces(["<think>", "\nHm.\n", "</think>", "\n\n", "One\n\nSTOP"])
    _, turn, cut = run(vocabulary, ["\n\n"])
    assert turn.message.content == "One"
    assert cut == StopCut("\n\n", num_tokens=5, num_kept=4, rest="One")
    vocabulary = Pieces(["Hi.", "\n", *CALL, "\n", *CALL, "<|im_end|>"])
    _, turn, cut = run(vocabulary, ["\n\n"])
    assert cut is None
    assert len(turn.message.tool_calls) == 2


def test_layout_and_content_in_one_token_are_cut_inside_the_content() -> None:
    vocabulary = Pieces(["<think>", "Hm.", "</think>", "\n\nOne STOP"])
    _, turn, cut = run(vocabulary, ["STOP"])
    assert turn.message.content == "One "
    assert cut == StopCut("STOP", num_tokens=4, num_kept=3, rest="\n\nOne ")


def test_a_match_lies_in_one_stretch_of_content() -> None:
    _, turn, cut = run(Pieces(["ST", *CALL, "OP", "<|im_end|>"]), ["STOP"])
    assert cut is None
    assert turn.message.content == "STOP"


def test_a_line_break_ends_an_answer_at_once() -> None:
    vocabulary = Pieces(["One", ".\n", "Two"])
    parser = StreamParser(vocabulary, stops=StopStrings(["\n"]))
    assert parser.feed(vocabulary.ids[:2]) == [TextDelta("One.")]
    assert parser.stop_cut == StopCut("\n", num_tokens=2, num_kept=1, rest=".")


def test_a_marker_wins_over_a_string_that_begins_as_it_does() -> None:
    """Also where it is spelled out: what may be a marker is none of the content until it is not."""
    for spelled in (True, False):
        _, turn, cut = run(Pieces(["a", *CALL, "<|im_end|>"], spelled=spelled), ["<tool"])
        assert cut is None
        assert len(turn.message.tool_calls) == 1
    _, turn, cut = run(Pieces(["a", "<to", "ol>"], spelled=True), ["<tool"])
    assert turn.message.content == "a"
    assert cut == StopCut("<tool", num_tokens=3, num_kept=1, rest="")


def test_a_marker_inside_a_token_leaves_the_kept_tokens_unknown() -> None:
    vocabulary = Pieces(["<think>Hm.</think>One STOP"], spelled=True)
    _, turn, cut = run(vocabulary, ["STOP"])
    assert turn.message.content == "One "
    assert turn.message.reasoning == "Hm."
    assert cut == StopCut("STOP", num_tokens=1, num_kept=0, rest=None)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "\n", "\n\n", "é", "aé", *CALL, *CONTROL])),
    st.lists(st.sampled_from(["ab", "aba", "bé", "\n", "\n\n", "é\na", "zz"]), max_size=3),
    st.integers(1, 5),
    st.sampled_from(["text", "reasoning"]),
)
def test_any_split_gives_the_same_turn_and_the_same_cut(
    texts: list[str | bytes], stops: list[str], size: int, starts_in: str
) -> None:
    vocabulary = Pieces(texts)
    deltas, turn, cut = run(vocabulary, stops, 1, starts_in)
    other_deltas, other, other_cut = run(vocabulary, stops, size, starts_in)
    assert (deltas, cut) == (other_deltas, other_cut)
    assert turn.message.content == other.message.content
    shown = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert shown == turn.message.content
    if cut is None:
        return
    # the kept tokens and the rest, parsed alone, are the same turn
    assert cut.rest is not None
    kept = [*texts[: cut.num_kept], *([cut.rest] if cut.rest else [])]
    parser = StreamParser(again := Pieces(kept), starts_in=starts_in)  # type: ignore[arg-type]
    parser.feed(again.ids)
    assert parser.finish("stop").message.content == turn.message.content
