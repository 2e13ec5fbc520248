"""The parser gives the same deltas for every split, and never more than the model said.

Numbers in comments are the cases of the integration notes (J: hermes JSON, S: streaming).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.chat.call_json import finite
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.messages import (
    Delta,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolSpec,
)
from dlite_agent.chat.stream_parser import EndReason, ParsedTurn, StreamParser, merge_deltas

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROL = (*MARKERS, "<|im_end|>", "<tool_response>")


class Bytes:
    """One token a byte, and control tokens from 256 on."""

    def __init__(self, control: Iterable[str] = ()) -> None:
        self.control_tokens: Mapping[str, int] = {text: 256 + i for i, text in enumerate(control)}

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str) -> list[int]:
        """Control tokens active, as the model would sample them."""
        ids: list[int] = []
        pattern = "|".join(map(re.escape, self.control_tokens)) or "(?!)"
        for part in re.split(f"({pattern})", text):
            ids += [self.control_tokens[part]] if part in self.control_tokens else part.encode()
        return ids


NEEDY = ToolSpec(
    "needy",
    "",
    {
        "$ref": "#/$defs/A",
        "$defs": {"A": {"properties": {"a": {"type": "string"}}, "required": ["a"]}},
    },
)
WITH_IDS = Bytes(CONTROL)
SPELLED = Bytes()
EITHER = pytest.mark.parametrize("vocabulary", [WITH_IDS, SPELLED], ids=["ids", "spelled"])


def run(
    vocabulary: Bytes, pieces: Iterable[list[int]], reason: EndReason, starts_in: Any
) -> tuple[list[Delta], ParsedTurn]:
    numbers = itertools.count()
    parser = StreamParser(
        vocabulary,
        starts_in=starts_in,
        new_call_id=lambda: f"call_{next(numbers)}",
        calls=JsonCalls([NEEDY]),
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    turn = parser.finish(reason)
    return merge_deltas([*deltas, *turn.deltas]), turn


def check_consistent(deltas: list[Delta], turn: ParsedTurn) -> None:
    """The message is what was streamed."""
    message = turn.message
    assert message.content == "".join(d.text for d in deltas if isinstance(d, TextDelta))
    assert (message.reasoning or "") == "".join(
        d.text for d in deltas if isinstance(d, ReasoningDelta)
    )
    announced: list[ToolCallDelta] = []
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                announced.append(delta)
            assert delta.index == len(announced) - 1
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    assert len({delta.id for delta in announced}) == len(announced)
    by_id = {delta.id: delta for delta in announced}
    for call in message.tool_calls:
        delta = by_id.pop(call.id)
        assert delta.name == call.name
        assert arguments[delta.index] == call.raw_arguments
        assert json.loads(call.raw_arguments or "", parse_float=finite) == call.arguments
    assert set(by_id) <= {unparsed.id for unparsed in turn.unparsed}


def parse(
    vocabulary: Bytes,
    stream: str | list[int],
    reason: EndReason = "stop",
    starts_in: Any = "text",
) -> ParsedTurn:
    """Parse whole, id by id and cut at every place; all must agree."""
    ids = vocabulary.encode(stream) if isinstance(stream, str) else stream
    deltas, turn = run(vocabulary, [ids], reason, starts_in)
    check_consistent(deltas, turn)
    splits = [[ids[:cut], ids[cut:]] for cut in range(1, len(ids))]
    for pieces in [[[i] for i in ids], *splits]:
        other_deltas, other = run(vocabulary, pieces, reason, starts_in)
        assert other_deltas == deltas
        assert other.message == turn.message
        assert other.unparsed == turn.unparsed
        assert other.num_reasoning_tokens == turn.num_reasoning_tokens
    return turn


def calls(turn: ParsedTurn) -> list[tuple[str, str]]:
    return [(call.name, call.raw_arguments or "") for call in turn.message.tool_calls]


def call_text(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


@EITHER
@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        # 1 booleans are not cut
        ('{"name":"f","arguments":{"trigger":true}}', "f", '{"trigger":true}'),
        ('{"name": "f", "arguments": {"a": 1, "b": [1, {"c": null}]}}', "f", None),
        # 2 a brace that only a string opens
        (r'{"name": "sh", "arguments": {"cmd": "mkdir -p test/{a,b"}}', "sh", None),
        # 3 the closing marker inside a string
        ('{"name": "w", "arguments": {"text": "end with </tool_call> please"}}', "w", None),
        ('{"name": "w", "arguments": {"text": "<tool_call> <think> </think>"}}', "w", None),
        # 5 escapes and characters beyond ASCII
        (r'{"name": "g", "arguments": {"p": "grep \"a\\\\b\" x", "u": "\u4f60 你"}}', "g", None),
        # 15 arguments before the name
        ('{"arguments": {"a": "b"}, "name": "f"}', "f", '{"a": "b"}'),
        # 16 extra keys, an alias, nothing
        ('{"id": [1, "{"], "name": "f", "parameters": {"a": 1}, "x": 2}', "f", '{"a": 1}'),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments": null}', "f", "{}"),
        ('{"name": "f", "arguments": ""}', "f", "{}"),
        ('{"name": "needy", "arguments": {}}', "needy", "{}"),
        # 17 empty arguments
        ('{"name": "f", "arguments": {}}', "f", "{}"),
        # 14 an object that was encoded twice
        (r'{"name": "f", "arguments": "{\"a\": \"x\\ny\"}"}', "f", r'{"a": "x\ny"}'),
        (r'{"name": "f", "arguments": "{\"a\": \"x\ny\"}"}', "f", r'{"a": "x\ny"}'),
        # 21 numbers pass untouched
        ('{"name": "f", "arguments": {"n": 12345678901234567890123}}', "f", None),
        ('{"name": "f", "arguments": {"n": 1e400}}', "f", '{"n": 1e400}'),
        ('\n\t {\r\n "name" : "f" ,\n "arguments" :\n{ "a" : [ ] }\n }\n ', "f", '{ "a" : [ ] }'),
        # 20 Python's spelling, and a comma too many
        ("{'name': 'f', 'arguments': {'a': True}}", "f", '{"a": true}'),
        ("{'name': 'f', 'arguments': {'a': [None, False,], },}", "f", '{"a": [null, false] }'),
        (
            r"""{'name': 'f', 'arguments': {'a': 'say "x"', 'b': "it's", 'c': 'it\'s\n'}}""",
            "f",
            r"""{"a": "say \"x\"", "b": "it's", "c": "it's\n"}""",
        ),
        ('{"name": "f", "arguments": {"a": "True, ]"}}', "f", '{"a": "True, ]"}'),
        # raw control characters inside a string are escaped (6)
        ('{"name": "f", "arguments": {"a": "x\ny\tz\x01"}}', "f", r'{"a": "x\ny\tz\u0001"}'),
    ],
)
def test_call_is_read(vocabulary: Bytes, body: str, name: str, arguments: str | None) -> None:
    turn = parse(vocabulary, call_text(body))
    if arguments is None:
        arguments = re.search(r'"arguments": (\{.*\})\}', body).group(1)  # type: ignore[union-attr]
    assert calls(turn) == [(name, arguments)]
    assert turn.unparsed == ()
    assert turn.message.content == ""
    assert turn.finish_reason == "tool_calls"


@EITHER
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "empty"),
        ("no json", "expected a JSON object"),
        ('{"name": "f", "arguments": {"a": "b"}', "does not end"),
        ('{"name": "f", "arguments": {"a": "b}}', "does not end"),
        ('{"name": "f", "arguments": {"a": 1}}}', "text after the call"),
        ('{"name": "f", "arguments": {"a": 1}} and more', "text after the call"),
        ('{"name": "f", "arguments": {"a": [1}}', "expected ']'"),
        ("{name: 'f'}", "double quotes"),
        ('{"name": "f", "arguments": {"a": 1,, }}', "not JSON"),
        ('{"name" "f"}', "expected ':'"),
        ('{"name": , "arguments": {}}', "expected a value"),
        ('{"name": "f" "arguments": {}}', "expected ','"),
        ('{"name": "f", "arguments": {"a": Truth}}', "not JSON"),
        (r"{'name': 'f', 'arguments': {'a': '\x1b'}}", "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not a JSON value"),
        ('{"name": "f", "arguments": {"a": "\\d"}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud83d"}}', "surrogates not allowed"),
        ('{"name": "\\ud83d", "arguments": {}}', "surrogates not allowed"),
        ('{"name": "\\d", "arguments": {}}', "not JSON"),
        ('{"\\d": "f", "arguments": {}}', "not JSON"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON"),
        ('{"name": 7, "arguments": {}}', '"name" is not a string'),
        ('{"name": "", "arguments": {}}', '"name" is not a string'),
        ('{"name": nope, "arguments": {}}', "not JSON"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": "f", "name": "g"}', "two names"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "two values"),
        # 14 a string is no object
        ('{"name": "f", "arguments": "hello"}', "not an object"),
        ('{"name": "f", "arguments": "[1]"}', "not an object"),
        ('{"name": "f", "arguments": "\\d"}', "not JSON"),
        ('{"name": "f", "arguments": "{\\"a\\": 1e400, \\"b\\": \\"\\n\\"}"}', "not an object"),
        ('{"name": "f", "arguments": [1]}', "not an object"),
        ('{"name": "f", "arguments": 3}', "not an object"),
        # 16 nothing, for a tool that requires something
        ('{"name": "needy"}', "arguments are missing, and 'needy' requires some"),
        ('{"arguments": null, "name": "needy"}', "arguments are missing"),
        ('{"name": "needy", "parameters": ""}', "arguments are missing"),
        ('{"name": "f", "arguments": null, "arguments": {}}', "two values"),
        ("</think>{}", "expected a JSON object"),
        ("<tool_response>{}", "expected a JSON object"),
    ],
)
def test_what_is_no_call_is_data(vocabulary: Bytes, body: str, error: str) -> None:
    if len(body) > 1000:
        stream = vocabulary.encode(call_text(body))
        _, turn = run(vocabulary, [stream], "stop", "text")
    else:
        turn = parse(vocabulary, call_text(body) + "\n" + call_text('{"name": "next"}'))
        assert calls(turn)[0] == ("next", "{}")
    assert len(turn.unparsed) == 1
    assert error in turn.unparsed[0].error
    assert turn.unparsed[0].text == body
    assert turn.unparsed[0].id


def test_deep_nesting_is_no_crash() -> None:
    stream = WITH_IDS.encode(call_text('{"name": "f", "arguments": {"a": ' + "[" * 5_000))
    _, turn = run(WITH_IDS, [stream], "length", "text")
    assert turn.unparsed[0].name == "f"
    for depth, is_call in ((99, True), (100, False), (3_000, False)):
        deep = '{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
        _, turn = run(WITH_IDS, [WITH_IDS.encode(call_text(deep))], "stop", "text")
        assert bool(turn.message.tool_calls) is is_call
        assert is_call or "deep" in turn.unparsed[0].error or "JSON" in turn.unparsed[0].error


@EITHER
@pytest.mark.parametrize(
    ("between", "content"),
    [("\n", ""), ("", ""), ("\n\n", ""), ("\nand then\n", "and then"), (" also ", " also ")],
)
def test_two_calls_whatever_stands_between(
    vocabulary: Bytes, between: str, content: str
) -> None:  # 7
    first, second = call_text('{"name": "a"}'), call_text('{"name": "b"}')
    turn = parse(vocabulary, first + between + second)
    assert calls(turn) == [("a", "{}"), ("b", "{}")]
    assert turn.message.content == content


@EITHER
def test_prose_around_calls_is_kept(vocabulary: Bytes) -> None:
    a, b = call_text('{"name": "a"}'), call_text('{"name": "b"}')
    turn = parse(vocabulary, f"First.\n{a}\nSecond.\n\n{b}\nThird.\n")
    assert turn.message.content == "First.\nSecond.\n\nThird.\n"
    turn = parse(vocabulary, f"First.\n{a}\n")
    assert turn.message.content == "First."


@EITHER
def test_calls_that_share_a_region_or_miss_an_end(vocabulary: Bytes) -> None:
    turn = parse(vocabulary, call_text('{"name": "a"}\n{"name": "b"}'))
    assert calls(turn) == [("a", "{}"), ("b", "{}")]
    turn = parse(vocabulary, '<tool_call>\n{"name": "a"}\n' + call_text('{"name": "b"}'))
    assert calls(turn) == [("a", "{}"), ("b", "{}")]
    turn = parse(vocabulary, '<tool_call>\n{"name": "a", ' + call_text('{"name": "b"}'))
    assert calls(turn) == [("b", "{}")]
    assert turn.unparsed[0].name == "a"


@EITHER
def test_thought_call_and_text_are_told_apart(vocabulary: Bytes) -> None:  # 9
    stream = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
    turn = parse(vocabulary, stream)
    assert turn.message.reasoning == "hm"
    assert calls(turn) == [("f", '{"a": 1}')]  # 11: no end, and the JSON is complete
    assert turn.finish_reason == "tool_calls"


@EITHER
@pytest.mark.parametrize("cut", [1, 2, 12, 40, 60])
@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_call_that_was_cut_is_never_a_call(
    vocabulary: Bytes, cut: int, reason: EndReason
) -> None:  # 12
    text = '<tool_call>\n{"name": "rm", "arguments": {"command": "rm -rf build/old"}}\n</tool_call>'
    ids = vocabulary.encode(text)
    turn = parse(vocabulary, ids[: len(ids) - cut], reason)
    assert turn.message.tool_calls == ()
    assert turn.finish_reason == reason
    assert len(turn.unparsed) == (0 if turn.message.content else 1)


@pytest.mark.parametrize(
    ("vocabulary", "sampled", "content", "reasoning"),
    [
        (WITH_IDS, "Yes é", "Yes ", None),
        (WITH_IDS, "Yes.\n", "Yes.", None),
        (SPELLED, "Yes <tool_ca", "Yes ", None),
        (SPELLED, "<think>hm 👋", "", "hm "),
        (SPELLED, "<think>hm </thin", "", "hm "),
    ],
)
def test_a_cancelled_turn_is_what_its_reader_got(
    vocabulary: Bytes, sampled: str, content: str, reasoning: str | None
) -> None:
    ids = vocabulary.encode(sampled)
    if not sampled.isascii():
        ids = ids[:-1]
    parser = StreamParser(vocabulary)
    deltas = parser.feed(ids)
    turn = parser.finish("cancelled")
    assert turn.deltas == ()
    assert (turn.message.content, (turn.message.reasoning or "").strip()) == (
        content,
        (reasoning or "").strip(),
    )
    check_consistent(deltas, turn)


@EITHER
def test_length_wins_over_calls(vocabulary: Bytes) -> None:
    turn = parse(vocabulary, call_text('{"name": "a"}') + "\nand", "length")
    assert calls(turn) == [("a", "{}")]
    assert turn.finish_reason == "length"


def test_spelled_marker_is_text_where_the_vocabulary_has_its_id() -> None:  # 10
    text = 'The tag <tool_call>\n{"name": "f"}\n</tool_call> and <think> are <tool'
    turn = parse(WITH_IDS, list(text.encode()))
    assert turn.message.content == text
    assert turn.message.tool_calls == ()
    inside = list(b'{"name": "f", "arguments": {"a": "</tool_call>"}}')
    ids = WITH_IDS.encode("<tool_call>") + inside + WITH_IDS.encode("</tool_call>")
    assert calls(parse(WITH_IDS, ids)) == [("f", '{"a": "</tool_call>"}')]
    turn = parse(WITH_IDS, WITH_IDS.encode("<think>") + list(b"a </think> b"))
    assert turn.message.reasoning == "a </think> b"


def test_split_marker_is_a_marker_where_the_vocabulary_has_no_id() -> None:  # 10
    turn = parse(SPELLED, 'ok\n<tool_call>{"name": "f"}</tool_call>')
    assert calls(turn) == [("f", "{}")]
    turn = parse(SPELLED, "a <tool is <<tool_call is <think> fine <tool_cal")
    assert turn.message.content == "a <tool is <<tool_call is <think> fine <tool_cal"


@EITHER
def test_without_tools_the_markers_of_calls_are_text(vocabulary: Bytes) -> None:
    text = 'Use:\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = vocabulary.encode(f"<think>\n<tool_call>\n</think>\n\n{text}")
    for size in (1, 3, len(ids)):
        parser = StreamParser(vocabulary, reads_calls=False)
        deltas = [
            delta for at in range(0, len(ids), size) for delta in parser.feed(ids[at : at + size])
        ]
        turn = parser.finish("stop")
        check_consistent([*deltas, *turn.deltas], turn)
        assert turn.message == Message("assistant", text, "<tool_call>")
        assert (turn.finish_reason, turn.unparsed) == ("stop", ())


def test_text_is_held_back_no_longer_than_it_must() -> None:
    parser = StreamParser(SPELLED)
    assert parser.feed(b"a <tool_") == [TextDelta("a ")]
    assert parser.feed(b"b") == [TextDelta("<tool_b")]
    assert parser.feed(b" x\n") == [TextDelta(" x")]
    assert parser.feed(b"\ny") == [TextDelta("\n\ny")]
    parser = StreamParser(WITH_IDS)
    assert parser.feed(b"a <tool_call>") == [TextDelta("a <tool_call>")]
    assert parser.feed("é".encode()[:1]) == []
    assert parser.feed("é".encode()[1:]) == [TextDelta("é")]


def test_arguments_stream_as_they_come() -> None:
    parser = StreamParser(WITH_IDS, new_call_id=lambda: "id")
    assert parser.feed(WITH_IDS.encode('<tool_call>\n{"name": "wri')) == []
    assert parser.region == "call"
    assert parser.feed(b'te"') == [ToolCallDelta(0, "", "id", "write")]
    assert parser.feed(b', "arguments": {"text": "li') == [ToolCallDelta(0, '{"text": "li')]
    assert parser.feed(b'ne"}') == [ToolCallDelta(0, 'ne"}')]
    assert parser.feed(b"}") == []


def test_arguments_wait_for_the_name() -> None:  # 15
    parser = StreamParser(WITH_IDS, new_call_id=lambda: "id")
    assert parser.feed(WITH_IDS.encode('<tool_call>{"arguments": {"a": 1}, "name": ')) == []
    assert parser.feed(b'"f"') == [ToolCallDelta(0, '{"a": 1}', "id", "f")]


def test_indices_and_ids_count_up() -> None:  # 37
    parser = StreamParser(WITH_IDS)
    text = call_text('{"name": "a"}') + call_text("{bad}") + call_text('{"name": "b"}')
    deltas = [*parser.feed(WITH_IDS.encode(text))]
    turn = parser.finish("stop")
    assert [(d.index, d.name) for d in deltas if isinstance(d, ToolCallDelta)] == [
        (0, "a"),
        (1, "b"),
    ]
    ids = [*(call.id for call in turn.message.tool_calls), turn.unparsed[0].id]
    assert len(set(ids)) == 3
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", str(i)) for i in ids)


@EITHER
@pytest.mark.parametrize("text", ["héllo 你好 👋🏽 한국어", "👩‍👩‍👧"])
def test_characters_are_never_torn(vocabulary: Bytes, text: str) -> None:  # 38
    body = json.dumps({"name": "f", "arguments": {"x": text}}, ensure_ascii=False)
    turn = parse(vocabulary, f"<think>\n{text}\n</think>\n\n{text}\n{call_text(body)}")
    assert turn.message.reasoning == text
    assert turn.message.content == text
    assert turn.message.tool_calls[0].arguments == {"x": text}


@EITHER
def test_invalid_bytes_become_replacement_characters(vocabulary: Bytes) -> None:
    turn = parse(vocabulary, [*b"a\xff", *"é".encode()[:1], *vocabulary.encode("<tool_call>{}")])
    assert turn.message.content == "a��"
    turn = parse(vocabulary, list(b"a\xe4\xbd"))
    assert turn.message.content == "a�"


@EITHER
def test_call_inside_a_closed_thought_is_reasoning(vocabulary: Bytes) -> None:  # 23
    call = call_text('{"name": "f"}')
    turn = parse(vocabulary, f"<think>\nI could {call}\n</think>\n\n")
    assert turn.message.reasoning == f"I could {call}"
    assert turn.message.tool_calls == ()
    assert turn.finish_reason == "stop"


@EITHER
@pytest.mark.parametrize(
    ("thought", "names"),
    [
        ('I call <tool_call>\n{"name": "f"}\n</tool_call>', ["f"]),
        ('I call <tool_call>\n{"name": "f"}\n</tool_call>\n', ["f"]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', ["f", "g"]),
        ('<tool_call>{"name": "f"}', ["f"]),
        ('<tool_call>{"name": "f"}</tool_call> or not', []),
        ('<tool_call>{"name": "f"}</tool_call> or <tool_call>{"name": "g"}</tool_call>', ["g"]),
        ('<tool_call>{"name": <tool_call>{"name": "g"}</tool_call>', ["g"]),
        ("<tool_call>maybe", []),
        ('<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>', ["f"]),
        ('<tool_call>{"name": "f"', []),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>', []),
    ],
)
def test_call_that_ends_an_open_thought_is_used(
    vocabulary: Bytes, thought: str, names: list[str]
) -> None:  # 23
    turn = parse(vocabulary, "<think>\n" + thought)
    assert turn.message.reasoning == thought.strip("\n")
    assert [call.name for call in turn.message.tool_calls] == names
    assert turn.finish_reason == ("tool_calls" if names else "stop")
    assert parse(vocabulary, "<think>\n" + thought, "length").message.tool_calls == ()


def test_thought_in_a_thought_spoils_its_calls() -> None:
    turn = parse(WITH_IDS, '<think>a <tool_call>{"name": "f"}</tool_call><think>')
    assert turn.message.tool_calls == ()
    assert turn.message.reasoning == 'a <tool_call>{"name": "f"}</tool_call><think>'


@EITHER
def test_thought_that_never_ends_is_reasoning_only(vocabulary: Bytes) -> None:  # 24
    turn = parse(vocabulary, "<think>\nstill thinking\n", "length")
    assert turn.message.reasoning == "still thinking"
    assert turn.message.content == ""
    assert turn.finish_reason == "length"


@EITHER
def test_answer_after_a_thought_that_the_prompt_closed_is_content(vocabulary: Bytes) -> None:  # 25
    turn = parse(vocabulary, "Hello.")
    assert turn.message.content == "Hello."
    assert turn.message.reasoning is None
    assert turn.num_reasoning_tokens == 0


@pytest.mark.parametrize(
    ("vocabulary", "again"), [(WITH_IDS, ""), (WITH_IDS, "<think>\n"), (SPELLED, "")]
)
def test_thought_that_the_prompt_opened(vocabulary: Bytes, again: str) -> None:  # 26
    turn = parse(vocabulary, again + "hm\n</think>\n\nHello.", starts_in="reasoning")
    assert turn.message.reasoning == "hm"
    assert turn.message.content == "Hello."


@EITHER
def test_bare_json_is_content(vocabulary: Bytes) -> None:  # 19
    bare = '{"name": "f", "arguments": {}}'
    for text in (bare, f"```json\n{bare}\n```"):
        turn = parse(vocabulary, text)
        assert (turn.message.content, turn.message.tool_calls) == (text, ())


def test_tokens_of_a_thought_are_counted_with_their_markers() -> None:
    stop = WITH_IDS.control_tokens["<|im_end|>"]
    turn = parse(WITH_IDS, [*WITH_IDS.encode("<think>\nab\n</think>\n\nHello."), stop])
    assert turn.num_reasoning_tokens == 6
    assert turn.message.content == "Hello."


def test_empty_thought_is_told_from_none() -> None:
    assert parse(WITH_IDS, "<think>\n\n</think>\n\nHello.").message.reasoning == ""


def test_second_thought_joins_the_first() -> None:
    call = call_text('{"name": "f"}')
    turn = parse(
        WITH_IDS, f"<think>\na\n</think>\n\nOne.\n<think>b</think>\nTwo.\n{call}\n<think>c"
    )
    assert turn.message.reasoning == "abc"
    assert turn.message.content == "One.\n\nTwo."
    assert calls(turn) == [("f", "{}")]


def test_stray_markers_are_text_and_special_tokens_silent() -> None:
    turn = parse(WITH_IDS, "a</think>b</tool_call><tool_response>c<|im_end|>")
    assert turn.message.content == "a</think>b</tool_call><tool_response>c"


@EITHER
def test_raw_newline_lets_a_broken_call_end(vocabulary: Bytes) -> None:
    broken = '{"name": "f", "arguments": {"path": "a.py}}'
    turn = parse(vocabulary, call_text(broken) + "\n" + call_text('{"name": "g"}'))
    assert [call.name for call in turn.message.tool_calls] == ["g"]
    assert turn.unparsed[0].name == "f"
    repaired = parse(vocabulary, call_text('{"name": "f", "arguments": {"t": "a\nb"}}'))
    assert repaired.notes == ("raw control characters in the call 'f' were escaped",)
    repaired = parse(vocabulary, call_text("{'name': 'f'}"))
    assert repaired.notes == ("the call 'f' was in Python's spelling and is JSON now",)
    assert parse(vocabulary, call_text("{'name': 'f'}"), "length").notes == repaired.notes
    assert parse(vocabulary, call_text('{"name": "f"}')).notes == ()


TEXTS = st.text(st.characters(codec="utf-8"), max_size=10)
BODIES = TEXTS.map(lambda text: text.strip("\n"))
NAMES = TEXTS.filter(bool)


@settings(max_examples=60, deadline=None)
@given(
    reasoning=st.none() | BODIES,
    content=BODIES,
    arguments=st.lists(
        st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2), max_size=3
    ),
)
def test_canonical_turns_come_back_equal(
    reasoning: str | None, content: str, arguments: list[dict[str, Any]]
) -> None:
    """The official template's own layout, read back."""
    ids: list[int] = []
    if reasoning is not None:
        ids += [*WITH_IDS.encode("<think>"), *f"\n{reasoning}\n".encode()]
        ids += [*WITH_IDS.encode("</think>"), *b"\n\n"]
    ids += content.encode()
    for i, value in enumerate(arguments):
        body = json.dumps({"name": f"f{i}", "arguments": value}, ensure_ascii=False)
        newline = b"\n" if i or content else b""
        ids += [*newline, *WITH_IDS.encode("<tool_call>"), *f"\n{body}\n".encode()]
        ids += WITH_IDS.encode("</tool_call>")
    deltas, turn = run(WITH_IDS, [ids], "stop", "text")
    check_consistent(deltas, turn)
    assert turn.message.reasoning == reasoning
    assert turn.message.content == content
    assert [call.arguments for call in turn.message.tool_calls] == arguments
    assert turn.unparsed == ()


FRAGMENTS = st.sampled_from(
    [
        *MARKERS,
        "<|im_end|>",
        "\n",
        '{"name": "f", "arguments": {"a": "b',
        '"}}',
        '{"name": "g"}',
        '"',
        "\\",
        "{",
        "}",
        "<",
        "text",
        "é",
        "👋",
    ]
).map(str.encode) | st.binary(max_size=3)


@settings(max_examples=120, deadline=None)
@given(
    vocabulary=st.sampled_from([WITH_IDS, SPELLED, Bytes(["<tool_call>", "</tool_call>"])]),
    fragments=st.lists(FRAGMENTS, max_size=25),
    cuts=st.lists(st.integers(0, 300)),
    reason=st.sampled_from(["stop", "length", "cancelled"]),
    starts_in=st.sampled_from(["text", "reasoning"]),
)
def test_any_stream_any_split(
    vocabulary: Bytes, fragments: list[bytes], cuts: list[int], reason: EndReason, starts_in: Any
) -> None:
    ids: list[int] = []
    for fragment in fragments:
        text = fragment.decode("utf-8", "replace")
        ids += vocabulary.encode(text) if text in MARKERS else fragment
    whole = run(vocabulary, [ids], reason, starts_in)
    check_consistent(*whole)
    bounds = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    pieces = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    for split in (pieces, [[i] for i in ids]):
        deltas, turn = run(vocabulary, split, reason, starts_in)
        assert deltas == whole[0]
        assert (turn.message, turn.unparsed) == (whole[1].message, whole[1].unparsed)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=60))
def test_no_byte_of_plain_text_is_lost(data: bytes) -> None:
    turn = parse(WITH_IDS, list(data))
    text = data.decode("utf-8", "replace")
    assert turn.message.content == text
    thought = parse(WITH_IDS, list(data), starts_in="reasoning")
    assert thought.message.reasoning == text.strip("\n")
