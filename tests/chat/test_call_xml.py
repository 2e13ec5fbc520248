"""Calls in the XML form of Qwen3-Coder, read leniently from any split.

Numbers in comments are the cases of the integration notes (X: Coder XML).
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolCallDelta, ToolSpec
from dlite_agent.chat.stream_parser import EndReason, ParsedTurn, StreamParser, merge_deltas
from dlite_agent.chat.template import probe_template
from dlite_agent.testing import ByteTokenizer
from tests.chat.jinja_tokenizer import JinjaTokenizer
from tests.chat.test_stream_parser import CONTROL, Bytes, check_consistent

XML_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments|items %}<parameter={{ k }}>
{{ v if v is string else v|tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if prompt %}<|im_start|>assistant
{% endif %}"""
WRITE = ToolSpec(
    "write",
    "",
    {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
)
TYPED = ToolSpec(
    "typed",
    "",
    {
        "type": "object",
        "$defs": {"Count": {"type": "integer"}},
        "properties": {
            "s": {"type": "string"},
            "i": {"$ref": "#/$defs/Count"},
            "n": {"type": "number"},
            "o": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "b": {"type": "boolean"},
            "a": {"type": ["array", "null"]},
            "d": {"type": "object"},
            "e": {"enum": ["x", 3, None]},
            "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
        },
    },
)
NEEDY = ToolSpec("needy", "", {"type": "object", "properties": {"a": {}}, "required": ["a"]})
TOOLS = (WRITE, TYPED, NEEDY)
WITH_IDS, SPELLED = Bytes(CONTROL), Bytes()
EITHER = pytest.mark.parametrize("vocabulary", [WITH_IDS, SPELLED], ids=["ids", "spelled"])


def read(vocabulary: Bytes, pieces: list[list[int]], reason: EndReason) -> tuple[Any, ParsedTurn]:
    numbers = iter(range(99))
    parser = StreamParser(
        vocabulary, new_call_id=lambda: f"call_{next(numbers)}", calls=XmlCalls(TOOLS)
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    turn = parser.finish(reason)
    return merge_deltas([*deltas, *turn.deltas]), turn


def parse(vocabulary: Bytes, text: str, reason: EndReason = "stop") -> ParsedTurn:
    """Parse whole, id by id, and in five pieces that end at every place once; all must agree."""
    ids = vocabulary.encode(text)
    deltas, turn = read(vocabulary, [ids], reason)
    check_consistent(deltas, turn)
    length = len(ids) // 4 + 1
    splits = [[ids[:first], *batched(ids[first:], length)] for first in range(1, length + 1)]
    for pieces in [[[i] for i in ids], *splits]:
        other_deltas, other = read(vocabulary, pieces, reason)
        assert other_deltas == deltas
        assert (other.message, other.unparsed) == (turn.message, turn.unparsed)
    return turn


def call(name: str, **values: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def batched(ids: list[int], length: int) -> list[list[int]]:
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def arguments(turn: ParsedTurn) -> list[JSON]:
    assert turn.unparsed == ()
    return [call.arguments for call in turn.message.tool_calls]


QUOTED = call("write", path="b", text="c")


@EITHER
@pytest.mark.parametrize(
    "value",
    [
        "a\n</parameter>\nb",  # 28
        "see <parameter=other> here",  # 29: not in the schema
        "x\n<parameter=other>\ny",
        "see <parameter=path> and </parameter> here",  # 29: in the schema
        QUOTED,
        "    def f():\n\n        return 1\n",  # 34
        "\n\nblank lines\n",
        "</function>",
        "é 👋 </tool_call>",  # 38
    ],
)
def test_a_value_may_hold_anything(vocabulary: Bytes, value: str) -> None:
    turn = parse(vocabulary, f"So.\n{call('write', text=value)}")
    assert arguments(turn) == [{"text": value}]
    assert turn.message.content == "So."
    assert turn.finish_reason == "tool_calls"


@EITHER
@pytest.mark.parametrize(
    "text",
    [
        call("write", path="a", text="b").replace("\n</parameter>\n<par", "\n<par"),  # 31
        call("write", path="a", text="b").replace("</parameter>\n</f", "</f"),
        call("write", path="a", text="b").replace("</parameter>\n", ""),
        call("write", path="a", text="b").removesuffix("\n</tool_call>"),  # 11
        call("write", path="a", text="b")[12:],  # 35: no opening tag
        call("write", path="a", text="b")[12:-13],  # 35: neither
    ],
)
def test_a_forgotten_tag_costs_nothing(vocabulary: Bytes, text: str) -> None:
    turn = parse(vocabulary, text)
    assert arguments(turn) == [{"path": "a", "text": "b"}]
    assert turn.message.content == ""


@EITHER
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (call("write", path="a").replace("path>", "path"), "expected <parameter=NAME>"),  # 32
        (call("write", path="a").replace("write>", "write"), "expected <function=NAME>"),
        (call("write", path="a").replace("</function>\n", ""), "does not end"),
        (call("typed", i="2026-01-15"), "'i': '2026-01-15' is not"),  # 33
        (call("typed", n="NaN"), "NaN"),
        (call("typed", i="x" + "9" * 30), "is not JSON"),
        (call("typed", e="y"), "none of the values"),
        (call("typed", i="true"), "not of type integer"),
        ("<tool_call>\n</tool_call>", "empty"),
        ("<tool_call>{}</tool_call>", 'no "name"'),
        ("<tool_call>write</tool_call>", "expected <function=NAME>"),
        ('<tool_call>{"name": "needy"}</tool_call>', "arguments are missing"),
        (call("write", path="a").replace("</f", "<parameter=path>\nb\n</parameter>\n</f"), "two"),
    ],
)
def test_a_broken_call_is_data_and_the_next_one_is_read(
    vocabulary: Bytes, broken: str, error: str
) -> None:
    turn = parse(vocabulary, f"{broken}\n{call('write', path='a')}")
    assert [c.arguments for c in turn.message.tool_calls] == [{"path": "a"}]
    assert len(turn.unparsed) == 1
    assert error in turn.unparsed[0].error


def test_values_have_the_types_of_the_schema() -> None:  # 33
    given = {
        "s": "null",
        "i": "42",
        "n": "12345678901234567890",
        "o": "None",
        "b": "True",
        "a": "[true, {'k': \"it's\", 'q': 'say \"x\"'},]",
        "d": "{'x': None}",
        "e": "3",
        "u": "null",
        "any": "7",
    }
    assert arguments(parse(WITH_IDS, call("typed", **given))) == [
        {
            "s": "null",
            "i": 42,
            "n": 12345678901234567890,
            "o": None,
            "b": True,
            "a": [True, {"k": "it's", "q": 'say "x"'}],
            "d": {"x": None},
            "e": 3,
            "u": "null",
            "any": "7",
        }
    ]
    for key, text, value in [
        *(("s", "true", "true"), ("s", "42", "42"), ("o", "42", 42), ("a", "null", None)),
        ("o", "null", None),
    ]:
        assert arguments(parse(WITH_IDS, call("typed", **{key: text}))) == [{key: value}]
    assert arguments(parse(WITH_IDS, call("unknown", x="42"))) == [{"x": "42"}]
    assert arguments(parse(WITH_IDS, call("write"))) == [{}]  # 17


@EITHER
def test_several_calls_in_any_arrangement(vocabulary: Bytes) -> None:  # 7
    first, second = call("write", path="a"), call("write", path="b")
    for text in (first + second, f"{first}\n{second}", first[:-13] + second[12:]):
        turn = parse(vocabulary, text)
        assert arguments(turn) == [{"path": "a"}, {"path": "b"}]
        assert turn.message.content == ""
    turn = parse(vocabulary, f"{first}\nand\n{second}")
    assert turn.message.content == "and"


@EITHER
@pytest.mark.parametrize(
    "text",
    [
        "The tag <function=write> opens a call.",
        "<function=write>\nis how it begins",
        "<function=foreign>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=\n<function=write",
    ],
)
def test_a_tag_that_opens_no_call_is_text(vocabulary: Bytes, text: str) -> None:
    turn = parse(vocabulary, text)
    assert turn.message.content == text
    assert (turn.message.tool_calls, turn.unparsed) == ((), ())
    followed = parse(vocabulary, f"{text}\n{call('write', path='a')}")
    assert arguments(followed) == [{"path": "a"}]


@EITHER
@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_call_that_was_cut_is_never_a_call(vocabulary: Bytes, reason: EndReason) -> None:  # 12
    ids = vocabulary.encode(call("write", path="build/old"))
    for stop in range(len(ids)):
        for pieces in ([ids[:stop]], [[i] for i in ids[:stop]]):
            _, turn = read(vocabulary, pieces, reason)
            assert turn.message.tool_calls == ()
            assert turn.finish_reason == reason


@EITHER
@pytest.mark.parametrize(
    ("text", "given"),
    [
        # as models write tags that they have seen elsewhere
        (call("write", path="a").replace("write>", " write >").replace("=path", '="path"'), "a"),
        (call("write", path="a").replace("write>", "'write'>").replace("=path", "= path "), "a"),
        (call("write", path="a").replace("\n", "\r\n"), "a"),
        (call("write", path="\r\na\r"), "\r\na\r"),
        (call("write", path="a").replace("\na\n", "a"), "a"),
        # a marker that a value mentions, and never closes
        (call("write", path="the <tool_call> tag"), "the <tool_call> tag"),
        ('<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>', "a"),
    ],
)
def test_a_call_in_sloppy_tags_is_read(vocabulary: Bytes, text: str, given: str) -> None:
    turn = parse(vocabulary, text)
    assert arguments(turn) == [{"path": given}]
    assert (turn.message.tool_calls[0].name, turn.message.content) == ("write", "")
    if "<tool_call> tag" in given:
        assert turn.notes == ("a value of the call 'write' opens a call",)
    two = parse(vocabulary, f"{text}\n{call('write', path='b')}")
    assert arguments(two) == [{"path": given}, {"path": "b"}]


def exactly(text: str) -> ParsedTurn:
    parser = StreamParser(WITH_IDS, calls=XmlCalls(TOOLS, is_exact=True))
    parser.feed(WITH_IDS.encode(text))
    return parser.finish("stop")


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>\n<parameter=text>\nb",
        "a\n<parameter=text>\nb",
        "<function=write>\n</function>",
        "a</parameter>\n</function>",
        "",
        "\n</parameter> ",
    ],
)
def test_under_a_grammar_nothing_is_guessed(value: str) -> None:
    turn = exactly(call("write", path=value))
    assert arguments(turn) == [{"path": value}]
    turn = exactly(call("write", text="b", path=value))
    assert arguments(turn) == [{"text": "b", "path": value}]
    assert arguments(exactly(call("write", path="a").replace("\na\n", "\n"))) == [{"path": ""}]


def test_under_a_grammar_text_that_looks_like_a_call_is_text() -> None:
    text = call("write", path="a")[12:-13]
    turn = exactly(text)
    assert (turn.message.content, turn.message.tool_calls) == (text, ())


def test_arguments_come_in_one_piece_behind_the_name() -> None:  # 37
    ids = WITH_IDS.encode(call("write", path="a") * 2)
    deltas, turn = read(WITH_IDS, [[i] for i in ids], "stop")
    told = [(d.index, d.name, d.arguments) for d in deltas if isinstance(d, ToolCallDelta)]
    given = '{"path": "a"}'
    assert told == [(0, "write", given), (1, "write", given)]
    assert len({c.id for c in turn.message.tool_calls}) == 2


@EITHER
def test_a_call_inside_a_thought(vocabulary: Bytes) -> None:  # 23
    thought = f"I could\n{call('write', path='a')}"
    closed = parse(vocabulary, f"<think>\n{thought}\n</think>\n\n")
    assert (closed.message.reasoning, closed.message.tool_calls) == (thought, ())
    left_open = parse(vocabulary, f"<think>\n{thought}")
    assert left_open.message.reasoning == thought
    assert arguments(left_open) == [{"path": "a"}]
    assert left_open.finish_reason == "tool_calls"
    assert parse(vocabulary, f"<think>\n{thought}", "length").message.tool_calls == ()


def test_any_stream_any_split() -> None:
    rng = random.Random(3)
    pieces = [
        *("<tool_call>", "</tool_call>", "<function=write>", "<function=", "</function>", "\n"),
        *(
            "<parameter=path>",
            "<parameter=x>",
            "</parameter>",
            "</think>",
            "<think>",
            "é",
            "a",
            ">",
        ),
    ]
    for number in range(300):
        vocabulary = (WITH_IDS, SPELLED)[number % 2]
        ids = vocabulary.encode("".join(rng.choice(pieces) for _ in range(rng.randrange(20))))
        whole = read(vocabulary, [ids], "stop")
        check_consistent(*whole)
        cut = rng.randrange(len(ids) + 1)
        for split in ([ids[:cut], ids[cut:]], [[i] for i in ids]):
            deltas, turn = read(vocabulary, split, "stop")
            assert deltas == whole[0]
            assert (turn.message, turn.unparsed) == (whole[1].message, whole[1].unparsed)


def test_the_template_says_which_form_it_writes() -> None:
    assert probe_template(JinjaTokenizer(XML_TEMPLATE)).calls == "xml"
    assert probe_template(ByteTokenizer()).calls == "json"


def test_what_the_template_writes_comes_back() -> None:
    values = {"path": "a", "text": "x\n</parameter>\n\n y"}
    tokenizer = JinjaTokenizer(XML_TEMPLATE)
    function = {"name": "write", "arguments": values}
    message: dict[str, JSON] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],  # type: ignore[dict-item]
    }
    text = tokenizer.apply_template([message], None, False)
    text = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    message_read = parse(WITH_IDS, text).message
    raw = json.dumps(values)
    expected = ToolCall("write", values, "call_0", raw)  # type: ignore[arg-type]
    assert message_read == Message("assistant", tool_calls=(expected,))
