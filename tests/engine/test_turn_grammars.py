"""What a request's schemas are refused for, in either form of calls: which tool, where and why."""

from __future__ import annotations

import gc
import re
from typing import Any, cast

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.chat.renderer import Renderer
from dlite_agent.chat.template import CallForm
from dlite_agent.decoding import token_trie
from dlite_agent.engine.turn_grammars import TurnGrammars
from dlite_agent.errors import RequestError
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import CheckpointTokenizer


class Bytes(ByteTokenizer):
    """As large as what it can spell."""

    vocab_size = 265
    fingerprint = "bytes"


STOP = ByteTokenizer().control_tokens["<|im_end|>"]
ASKED = (Message("user", "?"),)
PROMPT = Renderer(ByteTokenizer()).render(ASKED)


@pytest.fixture(scope="module", params=["json", "xml"])
def grammars(request: pytest.FixtureRequest) -> TurnGrammars:
    form: CallForm = request.param
    return TurnGrammars(cast(CheckpointTokenizer, Bytes()), 300, [STOP], form)


def tool(schema: JSON, *, strict: bool = True) -> ToolSpec:
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {
            "fine": {"type": "integer"},
            "outer": {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            "text": schema,
        },
        "required": ["outer", "text"],
        "$defs": {
            "Self": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/Self"}},
                "required": ["next"],
            }
        },
    }
    return ToolSpec("save", "", parameters, strict=strict)


def refused(grammars: TurnGrammars, **fields: Any) -> str:
    request = ChatRequest(ASKED, **fields)
    with pytest.raises(RequestError) as caught:
        grammars.constraint(request, PROMPT)
    return str(caught.value)


STRICT_ONLY: list[tuple[JSON, str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "keys: uniqueItems;"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "the branches of a oneOf overlap"),
    ({"type": "string", "format": "regex"}, "regex"),
    ({"not": {"type": "string"}}, "keys: not;"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
]
NEVER: list[tuple[JSON, str]] = [
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum"),
    ({"type": "string", "enum": ["x"], "pattern": "^y$"}, "Unsatisfiable"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 9000}, "2048 tokens"),
    ({"type": "string", "minLength": 9000}, "2048 tokens"),
    ({"$ref": "#/$defs/Self"}, "recursion"),
]


@pytest.mark.parametrize(("schema", "why"), [*STRICT_ONLY, *NEVER])
def test_a_refusal_names_the_tool_the_place_and_the_reason(
    grammars: TurnGrammars, schema: JSON, why: str
) -> None:
    said = refused(grammars, tools=(ToolSpec("other"), tool(schema)))
    assert re.match(r"tool 'save': at #/properties/outer/properties/a\b", said), said
    assert why in said
    assert "coerce_one_of" not in said


@pytest.mark.parametrize(("schema", "why"), STRICT_ONLY)
def test_only_what_strict_could_help_is_told_to_send_it(
    grammars: TurnGrammars, schema: JSON, why: str
) -> None:
    assert "strict=false" in refused(grammars, tools=(tool(schema),))
    output = OutputRules(ToolChoice("required"))
    request = ChatRequest(ASKED, tools=(tool(schema, strict=False),), output=output)
    assert grammars.constraint(request, PROMPT) is not None, why


@pytest.mark.parametrize(("schema", "why"), NEVER)
def test_what_nothing_satisfies_is_refused_whenever_it_is_asked_for(
    grammars: TurnGrammars, schema: JSON, why: str
) -> None:
    output = OutputRules(ToolChoice("required"))
    said = refused(grammars, tools=(tool(schema, strict=False),), output=output)
    assert why in said
    assert "strict=false" not in said
    answer = AnswerFormat(dict(tool(schema).parameters))
    said = refused(grammars, output=OutputRules(answer=answer))
    assert said.startswith("response_format: at #/properties/outer/properties/a")
    fine = ToolSpec("fine", "", {"type": "object", "properties": {}})
    tools = (fine, tool(schema, strict=False))
    assert refused(grammars, tools=tools, output=output).startswith("tool 'save'"), "not optional"
    free = ChatRequest(ASKED, tools=(tool(schema, strict=False),))
    assert grammars.constraint(free, PROMPT) is None, "nobody asked for it"


def test_a_schema_at_whose_parts_nothing_is_wrong_is_named_as_a_whole(
    grammars: TurnGrammars,
) -> None:
    many: dict[str, JSON] = {
        "type": "object",
        "properties": {f"p{number:03}": {"type": "string"} for number in range(300)},
        "required": [f"p{number:03}" for number in range(300)],
    }
    said = refused(grammars, tools=(ToolSpec("wide", "", many, strict=True),))
    assert said.startswith("tool 'wide': at #, ")
    assert "2048" in said


def count_reading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the vocabularies that are read from now on."""
    read: list[int] = []

    class Counted(token_trie.TokenTrie):
        __slots__ = ()

        def __init__(self, table: token_trie.TokenTable) -> None:
            read.append(len(table.tokens))
            super().__init__(table)

    monkeypatch.setattr(token_trie, "TokenTrie", Counted)
    return read


class OtherBytes(Bytes):
    """Another tokenizer."""

    fingerprint = "other bytes"


def test_the_first_grammar_reads_the_vocabulary_once_for_all_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = count_reading(monkeypatch)

    def model(stop_ids: tuple[int, ...] = (STOP,)) -> TurnGrammars:
        return TurnGrammars(cast(CheckpointTokenizer, OtherBytes()), 300, stop_ids)

    free = ChatRequest(ASKED)
    bound = ChatRequest(ASKED, output=OutputRules(answer=AnswerFormat({"type": "integer"})))
    first, second = model(), model()
    assert first.constraint(free, PROMPT) is None
    assert read == [], "nobody needed it"
    for grammars in (first, second, first):
        assert grammars.constraint(bound, PROMPT) is not None
    assert read == [265]
    model((STOP, 0)).constraint(bound, PROMPT)
    assert read == [265, 265], "another end of turns"
    del first, second, grammars
    gc.collect()
    model().constraint(bound, PROMPT)
    assert read == [265, 265, 265], "nobody uses it any more"
