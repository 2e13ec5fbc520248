"""Random and mutated streams of tokens, and what holds for each of them.

`make test` takes a thousand, `make soak` a hundred thousand.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from dlite_agent.chat.call_json import finite
from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.messages import Delta, ToolCall, ToolSpec
from dlite_agent.chat.stream_parser import EndReason, ParsedTurn, StreamParser, merge_deltas
from tests.chat.test_stream_parser import MARKERS, SPELLED, WITH_IDS, Bytes, check_consistent

TOOLS = (
    ToolSpec("F", "", {"type": "object", "properties": {"A": {"type": "string"}, "B": {}}}),
    ToolSpec(
        "G", "", {"type": "object", "properties": {"N": {"type": "integer"}}, "required": ["N"]}
    ),
)
MIXED = Bytes(["<tool_call>", "</tool_call>"])
# Characters that no marker, tag, key or escape has: none of them may be lost.
PAYLOAD = "QRSTUVWXYZ2345678éß你👋"
FRAGMENTS = (
    *MARKERS,
    *("<|im_end|>", "<tool_response>", "\n", "\n\n", " ", "<", "{", "}", '"', "\\", ",", "]", "'"),
    *('{"name": "F", "arguments": {"A": "', '"}}', '{"name": "G"}', '"arguments": null', "NaN"),
    *(
        "<function=F>",
        "</function>",
        "<parameter=A>",
        "<parameter=N>",
        "</parameter>",
        "<function=",
    ),
    *("\\ud83d", "1e400", "```json", "True", "<tool", "_call>", "</thin"),
)


def payload(rng: random.Random) -> str:
    return "".join(rng.choice(PAYLOAD) for _ in range(rng.randrange(1, 6)))


def call_text(rng: random.Random, *, is_xml: bool) -> str:
    """A call as a template writes it."""
    name, key = rng.choice([("F", "A"), ("F", "B"), ("G", "N"), ("H", "C")])
    value = payload(rng) if key != "N" else str(rng.randrange(99))
    if rng.random() < 0.2:
        value += rng.choice(["</tool_call>", "<tool_call>", "\n</parameter>\n", "</think>", '"{'])
    if is_xml:
        return f"<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>"
    return json.dumps({"name": name, "arguments": {key: value}}, ensure_ascii=rng.random() < 0.1)


def turn_text(rng: random.Random, *, is_xml: bool) -> str:
    """A turn as a template writes it."""
    parts = [f"<think>\n{payload(rng)}\n</think>\n\n"] if rng.random() < 0.4 else []
    parts.append(payload(rng) if rng.random() < 0.6 else "")
    for _ in range(rng.randrange(3)):
        parts.append(f"\n<tool_call>\n{call_text(rng, is_xml=is_xml)}\n</tool_call>")
    return "".join(parts)


def stream_ids(rng: random.Random, vocabulary: Bytes, *, is_xml: bool) -> list[int]:
    """A turn with some mutations, or fragments in any order."""
    if rng.random() < 0.3:
        pieces = [rng.choice([*FRAGMENTS, payload(rng)]) for _ in range(rng.randrange(14))]
        return vocabulary.encode("".join(pieces))
    ids = vocabulary.encode(turn_text(rng, is_xml=is_xml))
    for _ in range(rng.randrange(5)):
        at, length = rng.randrange(len(ids) + 1), rng.randrange(1, 12)
        match rng.randrange(5):
            case 0:
                del ids[at : at + length]
            case 1:
                ids[at:at] = ids[at : at + length]
            case 2:
                ids[at:at] = vocabulary.encode(rng.choice(FRAGMENTS))
            case 3:
                ids[at:at] = rng.randbytes(rng.randrange(1, 3))
            case _:
                del ids[at:]
    return ids


def parse(
    vocabulary: Bytes, pieces: Iterable[Sequence[int]], reason: EndReason, *, is_xml: bool
) -> tuple[list[Delta], ParsedTurn]:
    numbers = iter(range(999))
    parser = StreamParser(
        vocabulary,
        new_call_id=lambda: f"call_{next(numbers)}",
        calls=XmlCalls(TOOLS) if is_xml else JsonCalls(TOOLS),
    )
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    turn = parser.finish(reason)
    return merge_deltas([*deltas, *turn.deltas]), turn


def check_stream(seed: int) -> int:
    """No exception, no lost byte, no invented call, whatever the split; how many calls it holds."""
    rng = random.Random(seed)
    vocabulary, is_xml = rng.choice([WITH_IDS, WITH_IDS, SPELLED, MIXED]), rng.random() < 0.5
    reason: EndReason = rng.choice(["stop", "stop", "length", "cancelled"])
    ids = stream_ids(rng, vocabulary, is_xml=is_xml)
    deltas, turn = parse(vocabulary, [ids], reason, is_xml=is_xml)
    check_consistent(deltas, turn)
    cut = rng.randrange(len(ids) + 1)
    for pieces in ([[i] for i in ids], [ids[:cut], ids[cut:]]):
        if reason != "cancelled":  # what is held back then was handed out in another split
            again, other = parse(vocabulary, pieces, reason, is_xml=is_xml)
            assert again == deltas
            assert (other.message, other.unparsed) == (turn.message, turn.unparsed)
    text = spelled(vocabulary, ids)
    if not any("spelling" in note for note in turn.notes):
        check_calls(text, turn.message.tool_calls, is_xml=is_xml)
    check_bytes(text, turn, is_whole=reason != "cancelled")
    assert turn.finish_reason in (reason, "tool_calls")
    assert turn.finish_reason == "tool_calls" or reason != "stop" or not turn.message.tool_calls
    return len(turn.message.tool_calls)


def spelled(vocabulary: Bytes, ids: Iterable[int]) -> str:
    """The stream as text, markers included; `<|im_end|>` is silent, and ends a torn character."""
    names = {token_id: text for text, token_id in vocabulary.control_tokens.items()}
    names[vocabulary.control_tokens.get("<|im_end|>", -1)] = ""
    texts, raw = list[str](), b""
    for token_id in ids:
        if token_id in names:
            texts += [raw.decode("utf-8", "replace"), names[token_id]]
            raw = b""
        else:
            raw += vocabulary.token_bytes(token_id)
    return "".join([*texts, raw.decode("utf-8", "replace")])


def check_calls(text: str, calls: Sequence[ToolCall], *, is_xml: bool) -> None:
    """Each call stands in the stream, behind what opens calls."""
    for call in calls:
        if is_xml and has_tag(text, "function", call.name):
            assert isinstance(call.arguments, dict)
            for key in call.arguments:
                assert has_tag(text, "parameter", key)
        else:
            behind = text[text.index("<tool_call>") :]
            assert (call.name, call.arguments) in list(objects(behind)), call


def has_tag(text: str, kind: str, name: str) -> bool:
    """Whether a tag stands in a text, with space or quotes around the name."""
    return bool(re.search(rf"<{kind}=\s*([\"']?){re.escape(name)}\1\s*>", text))


def objects(text: str) -> Iterator[tuple[object, object]]:
    """Name and arguments of each JSON object that begins anywhere."""
    decoder = json.JSONDecoder(strict=False, parse_float=finite)
    for at, char in enumerate(text):
        if char == "{":
            try:
                value, _ = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                continue
            arguments = value.get("arguments", value.get("parameters"))
            if isinstance(arguments, str) and arguments:
                try:
                    arguments = decoder.decode(arguments)
                except ValueError:
                    continue
            yield value.get("name"), arguments or {}


def check_bytes(text: str, turn: ParsedTurn, *, is_whole: bool) -> None:
    """What is no call is in the content, the reasoning, or a region that is no call."""
    message = turn.message
    kept = message.content + (message.reasoning or "") + "".join(r.text for r in turn.unparsed)
    found = Counter(char for char in kept if char in PAYLOAD)
    there = Counter(char for char in text if char in PAYLOAD)
    if not message.tool_calls and is_whole:
        assert found == there
    else:
        assert found <= there
