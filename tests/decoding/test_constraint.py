"""Grammars of turns over tokens: what they let through, from whatever is sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest
import torch

from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.chat.patterns import examples
from dlite_agent.chat.stream_parser import StreamParser
from dlite_agent.chat.template import CallForm
from dlite_agent.decoding.constraint import Closing, Constraint, GrammarCompiler
from dlite_agent.decoding.draft_masks import DraftMasks
from dlite_agent.decoding.token_trie import TokenTable
from dlite_agent.errors import RequestError
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import load_tokenizer
from tests.decoding.random_turns import random_schema

NANO = Path(__file__).parents[2] / "dlite_agent" / "nano" / "assets"
TOKENIZER = ByteTokenizer()
IDS = TOKENIZER.control_tokens
STOP = IDS["<|im_end|>"]
VOCAB = 300  # more columns than tokens
WEATHER = ToolSpec(
    "weather",
    "",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOW = ToolSpec("now", "", {"type": "object", "properties": {}})
REQUIRED = ToolChoice("required")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    texts = [TOKENIZER.token_bytes(i) for i in range(265)]
    table = TokenTable(
        texts, list(IDS.values()), [STOP], TOKENIZER.encode_untrusted, IDS["<tool_call>"]
    )
    return GrammarCompiler(table, VOCAB)


Start = Callable[..., Constraint]


@pytest.fixture
def start(compiler: GrammarCompiler) -> Start:
    def start(
        rules: OutputRules,
        tools: Sequence[ToolSpec] = (WEATHER, NOW),
        calls: CallForm = "json",
        thought: str = "optional",
        closing: Closing = "never",
        examples: Sequence[str] = (),
    ) -> Constraint:
        grammar = turn_grammar(rules, tools, TurnForm(IDS, calls, thought))  # type: ignore[arg-type]
        assert grammar is not None
        return compiler.compile(grammar, closing=closing, examples=examples)

    return start


def allowed(masks: DraftMasks, row: int = 0) -> list[int]:
    return masks.row(row).ids(torch.device("cpu")).tolist()


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a turn may consist of this text."""
    ids = [*TOKENIZER.encode_template(text), STOP]
    return constraint.num_valid(ids) == len(ids)


@pytest.mark.parametrize(
    ("rules", "turn", "is_allowed"),
    [
        (OutputRules(REQUIRED), CALL, True),
        (OutputRules(REQUIRED), f"<think>\nHm.\n</think>\n\n{CALL}", True),
        (OutputRules(REQUIRED), f"{CALL}\n{NOW_CALL}", True),
        (OutputRules(REQUIRED), "No.", False),
        (OutputRules(REQUIRED), "", False),
        (OutputRules(REQUIRED), CALL.replace('"Oslo"', "7"), False),
        (OutputRules(REQUIRED), CALL.replace('": ', '":'), False),
        (OutputRules(REQUIRED), CALL.replace("Oslo", "Os\nlo"), False),
        (OutputRules(REQUIRED), CALL.replace("Oslo", "Os\\nlo </tool_call"), True),
        (OutputRules(REQUIRED), CALL.replace('"', "'"), False),
        (OutputRules(REQUIRED), CALL.replace('"}}', '",}}'), False),
        (OutputRules(REQUIRED), CALL.replace('"}}', '", "days": None}}'), False),
        (OutputRules(REQUIRED), f"[{CALL[12:-13]}]", False),
        (OutputRules(REQUIRED), CALL.replace("}}", ', "more": 1}}'), False),
        (OutputRules(REQUIRED), NOW_CALL.replace("{}", '{"a": 1}'), False),
        (OutputRules(REQUIRED, parallel_tool_calls=False), CALL, True),
        (OutputRules(REQUIRED, parallel_tool_calls=False), f"{CALL}\n{NOW_CALL}", False),
        (OutputRules(ToolChoice("required", ("now",))), NOW_CALL, True),
        (OutputRules(ToolChoice("required", ("now",))), f"{NOW_CALL}\n{NOW_CALL}", False),
        (OutputRules(ToolChoice("required", ("now",))), CALL, False),
        (OutputRules(ToolChoice("auto", ("now",))), f"Let me see.\n{NOW_CALL}", True),
        (OutputRules(ToolChoice("auto", ("now",))), CALL, False),
        (OutputRules(ToolChoice("none")), "The file says <tool_call", True),
        (OutputRules(ToolChoice("none")), CALL, False),
        (OutputRules(parallel_tool_calls=False), f"So:\n{CALL}", True),
        (OutputRules(parallel_tool_calls=False), f"{CALL}\n{CALL}", False),
        (OutputRules(answer=AnswerFormat({"type": "integer"})), "12", True),
        (OutputRules(answer=AnswerFormat({"type": "integer"})), CALL, True),
        (OutputRules(answer=AnswerFormat({"type": "integer"})), "twelve", False),
        (OutputRules(answer=AnswerFormat()), '{"a": [1, null]}', True),
        (OutputRules(answer=AnswerFormat()), "[1]", False),
    ],
)
def test_a_turn_follows_its_rules(
    start: Start, rules: OutputRules, turn: str, is_allowed: bool
) -> None:
    assert accepts(start(rules), turn) is is_allowed


def test_a_strict_tool_fits_its_schema_also_where_the_model_decides(start: Start) -> None:
    strict = ToolSpec(WEATHER.name, "", WEATHER.parameters, strict=True)
    wrong = CALL.replace('"Oslo"', "7")
    assert accepts(start(OutputRules(), [strict, NOW]), f"I look.\n{CALL}")
    assert not accepts(start(OutputRules(), [strict, NOW]), wrong)
    assert accepts(start(OutputRules(parallel_tool_calls=False), [WEATHER]), wrong)


def test_a_turn_without_rules_has_no_grammar() -> None:
    form = TurnForm(IDS)
    assert turn_grammar(OutputRules(), (WEATHER, NOW), form) is None
    assert turn_grammar(OutputRules(parallel_tool_calls=False), (), form) is None
    assert turn_grammar(OutputRules(ToolChoice("none")), (), form) is None


def test_a_turn_that_begins_inside_its_thought_ends_it_first(start: Start) -> None:
    constraint = start(OutputRules(REQUIRED), thought="open")
    assert accepts(constraint, f"Hm.</think>\n\n{CALL}")
    assert not accepts(constraint, CALL)


def test_a_draft_may_hold_the_end_of_a_thought_and_a_call(start: Start) -> None:
    constraint = start(OutputRules(REQUIRED), thought="open")
    draft = [*TOKENIZER.encode_template(f"Hm.</think>\n\n{CALL}"), STOP]
    assert constraint.num_valid(draft) == len(draft)
    masks = constraint.masks(draft)
    held = [allowed(masks, row) for row in range(len(masks))]
    assert len(held) == len(draft)
    assert all(token_id in row for token_id, row in zip(draft, held, strict=True))
    assert set(held[draft.index(IDS["</think>"]) + 3]) == {IDS["<tool_call>"]}


def test_without_thoughts_none_may_begin(start: Start) -> None:
    assert not accepts(start(OutputRules(REQUIRED), thought="none"), f"<think>a</think>{CALL}")


def test_calls_in_the_xml_form(start: Start) -> None:
    def call(*lines: str) -> str:
        body = "\n".join(lines)
        return f"<tool_call>\n<function=weather>\n{body}\n</function>\n</tool_call>"

    city = ("<parameter=city>", "a </parameter> b", "</parameter>")
    days = ("<parameter=days>", "3", "</parameter>")
    constraint = start(OutputRules(REQUIRED), calls="xml")
    assert accepts(constraint, call(*city))
    assert accepts(constraint, call(*city, *days))
    assert accepts(constraint, "<tool_call>\n<function=now>\n</function>\n</tool_call>")
    assert not accepts(constraint, call(*days))
    assert not accepts(constraint, call(*city, days[0], "three", days[2]))
    assert accepts(constraint, call(city[0], "", city[2])), "an empty value as it is rendered"
    assert accepts(constraint, call(city[0], city[2])), "and as models write it"


def test_a_tool_that_is_not_strict_has_any_parameters_in_either_form(start: Start) -> None:
    """Where only how many calls there are, or which, is limited."""
    for rules in (OutputRules(parallel_tool_calls=False), OutputRules(ToolChoice("auto", ("f",)))):
        tools = [ToolSpec("f", "", WEATHER.parameters), NOW]
        constraint = start(rules, tools)
        assert accepts(
            constraint, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        )
        constraint = start(rules, tools, "xml")
        for body in ("", "<parameter=city>\nOslo\n</parameter>\n<parameter=x>\n</parameter>\n"):
            turn = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
            assert accepts(constraint, turn)


def test_a_name_that_no_tag_can_hold_is_refused(start: Start) -> None:
    parameters: dict[str, JSON] = {"type": "object", "properties": {"a>b": {}}}
    with pytest.raises(RequestError, match=r"'f' has the name 'a>b'.*rename"):
        start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters)], "xml")
    start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters)], "json")


@pytest.mark.parametrize(
    ("schema", "value", "is_allowed"),
    [
        ({"type": "string", "pattern": r"^[a-z]+/\w+\.py$"}, "src/a.py", True),
        ({"type": "string", "pattern": r"^[a-z]+/\w+\.py$"}, "src/a", False),
        ({"type": "string", "pattern": "b|^a", "maxLength": 3}, "xxb", True),
        ({"type": "string", "pattern": "b|^a", "maxLength": 3}, "xxxb", False),
        ({"type": "string", "minLength": 30}, "short\n</parameter>\n" + "x" * 20, False),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]}, "null", True),
        ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer"}]}, "7", False),
        ({"anyOf": [{"enum": ["on", "off", None]}, {"pattern": "^x"}]}, "off", True),
        ({"anyOf": [{"enum": ["on", "off", None]}, {"pattern": "^x"}]}, "of", False),
        ({"allOf": [{"$ref": "#/$defs/Mode"}], "description": "how"}, "fast", True),
        ({"allOf": [{"$ref": "#/$defs/Mode"}], "description": "how"}, "slow", False),
        (True, "anything", True),
    ],
)
def test_text_of_a_parameter_fits_its_schema(
    start: Start, schema: JSON, value: str, is_allowed: bool
) -> None:
    parameters: dict[str, JSON] = {
        "$ref": "#/$defs/Arguments",  # as pydantic writes a model that names itself
        "$defs": {
            "Arguments": {"type": "object", "properties": {"a": schema}, "required": ["a"]},
            "Mode": {"enum": ["fast"]},
        },
    }
    rules = OutputRules(ToolChoice("required", ("f",)))
    texts = tuple(examples(parameters))
    constraint = start(rules, [ToolSpec("f", "", parameters)], "xml", "none", "never", texts)
    body = f"<parameter=a>\n{value}\n</parameter>"
    turn = f"<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>"
    assert accepts(constraint, turn) is is_allowed


def test_a_required_parameter_that_may_not_be_is_refused_in_either_form(start: Start) -> None:
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "never": False},
        "required": ["b"],
    }
    tools = [ToolSpec("f", "", parameters)]
    for calls in ("json", "xml"):
        with pytest.raises(RequestError, match="'b'"):
            start(OutputRules(REQUIRED), tools, calls)
    described: dict[str, JSON] = {**parameters, "additionalProperties": {"type": "integer"}}
    constraint = start(OutputRules(REQUIRED), [ToolSpec("f", "", described)], "xml")
    turn = "<tool_call>\n<function=f>\n<parameter=b>\n7\n</parameter>\n</function>\n</tool_call>"
    assert accepts(constraint, turn)


def test_a_pattern_that_looks_around_is_refused_unless_it_may_be_left_out(start: Start) -> None:
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "(?=x)y"}},
    }
    with pytest.raises(RequestError, match=r"\(\?=x\)y.*strict=false"):
        start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters, strict=True)], "xml")
    start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters)], "xml")


def test_markers_that_are_no_tokens_are_spelled(compiler: GrammarCompiler) -> None:
    form = TurnForm(set(), "json", "none")
    grammar = turn_grammar(OutputRules(REQUIRED), (NOW,), form)
    assert grammar is not None
    ids = [*TOKENIZER.encode_untrusted(NOW_CALL), STOP]
    assert compiler.compile(grammar).num_valid(ids) == len(ids)
    grammar = turn_grammar(OutputRules(ToolChoice("none")), (NOW,), form)
    assert grammar is not None
    constraint = compiler.compile(grammar)
    assert constraint.num_valid([*TOKENIZER.encode_untrusted("a < b"), STOP]) == 6
    assert constraint.num_valid(ids) < len(ids)


def test_masks_are_those_of_each_row_of_a_draft(start: Start) -> None:
    constraint = start(OutputRules(REQUIRED))
    constraint.advance([IDS["<tool_call>"]])
    draft = TOKENIZER.encode_untrusted('\n{"name": "now", "arguments": {}}\n')
    masks = constraint.masks(draft)
    rows = [allowed(masks, row) for row in range(len(masks))]
    assert len(rows) == len(draft) + 1
    for row, token_id in enumerate(draft):
        assert rows[row] == allowed(constraint.masks(())), "a draft leaves no trace"
        assert token_id in rows[row]
        constraint.advance([token_id])
    assert rows[-1] == [IDS["</tool_call>"]]
    assert all(max(row) < 265 for row in rows), "ids behind the tokenizer's are never allowed"


@pytest.mark.parametrize("calls", ["json", "xml"])
def test_looking_a_token_up_is_reading_its_mask(calls: CallForm) -> None:
    """Also where bytes are forced: there a mask holds one way to spell them, and no other."""
    nano = load_tokenizer(str(NANO))
    control = nano.control_tokens
    texts = [nano.token_bytes(i) for i in range(nano.vocab_size)]
    stop = control["<|im_end|>"]
    compiler = GrammarCompiler(
        TokenTable(texts, list(control.values()), [stop], nano.encode_untrusted), len(texts)
    )
    grammar = turn_grammar(OutputRules(REQUIRED), (WEATHER, NOW), TurnForm(control, calls))
    assert grammar is not None
    constraint = compiler.compile(grammar)
    rng = random.Random(1)
    turn: list[int] = []
    while len(turn) < 30 and turn[-1:] != [stop]:
        row = allowed(constraint.masks(()))
        draft = list((constraint.ending(99) or ())[:3])
        masks = constraint.masks(draft)
        for number in range(len(masks)):
            held = allowed(masks, number)
            like_first = [i for i, text in enumerate(texts) if text[:1] == texts[held[0]][:1]]
            for token_id in (*like_first, *rng.sample(range(len(texts)), 30)):
                assert masks.allows(number, token_id) is (token_id in held), (turn, number)
        turn.append(draft[0] if draft and rng.random() < 0.7 else rng.choice(row))
        constraint.advance(turn[-1:])
    assert masks.allows(0, len(texts)) is False


def test_an_id_that_is_no_token_is_not_valid(start: Start) -> None:
    constraint = start(OutputRules(ToolChoice("none")))
    assert constraint.num_valid([ord("a"), VOCAB - 1, ord("b")]) == 1
    assert accepts(constraint, "it leaves no trace")


def test_nothing_follows_a_stop_id(start: Start) -> None:
    constraint = start(OutputRules(answer=AnswerFormat({"type": "integer"})), ())
    assert len(constraint.masks([ord("4"), STOP, ord("2")])) == 2


def test_what_must_come_is_drafted(start: Start) -> None:
    constraint = start(OutputRules(ToolChoice("required", ("now",))), thought="none")
    assert TOKENIZER.decode(constraint.forced(100)) == NOW_CALL
    assert len(constraint.forced(11)) == 11


def test_a_token_that_breaks_the_grammar_is_our_own_fault(start: Start) -> None:
    with pytest.raises(ValueError, match="breaks the grammar"):
        start(OutputRules(REQUIRED)).advance([ord("x")])


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "bogus"}, "bogus"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "regex parse error: .*look-around"),
        ({"$ref": "#/$defs/gone"}, "gone"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 9000}, "2048"),
        (
            {
                "$ref": "#/$defs/A",
                "$defs": {
                    "A": {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/$defs/A"}},
                        "required": ["next"],
                    }
                },
            },
            "recursion",
        ),
    ],
)
def test_a_schema_that_cannot_be_met_is_refused(
    start: Start, schema: dict[str, JSON], why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        start(OutputRules(answer=AnswerFormat(schema)), ())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"\.py$"},
        {"type": "string", "pattern": r"^[^/]+/[^/]+$"},
        {"type": "string", "pattern": "[A-Z]"},
        {"type": "string", "format": "email"},
        {"type": "string", "format": "uri"},
        {"type": "string", "format": "duration"},
        {"type": "string", "minLength": 30},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "multipleOf": 7, "minimum": 1000},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "minItems": 1},
    ],
)
def test_an_end_is_found_from_anywhere(start: Start, schema: dict[str, JSON]) -> None:
    rules = OutputRules(answer=AnswerFormat({**schema, "title": "T"}))
    constraint = start(rules, (), thought="none", examples=tuple(examples(schema)))
    rng = random.Random(0)
    turn: list[int] = []
    for _ in range(12):
        ending = constraint.ending(100)
        assert ending is not None
        jsonschema.validate(json.loads(TOKENIZER.decode([*turn, *ending])), schema)
        ids = [i for i in allowed(constraint.masks(())) if i < 127]
        if not ids:
            break
        turn.append(rng.choice(ids))
        constraint.advance(turn[-1:])


def test_a_keyword_that_cannot_be_enforced_is_left_out_unless_strict(start: Start) -> None:
    schema: dict[str, JSON] = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert accepts(start(OutputRules(answer=AnswerFormat(schema, strict=False)), ()), "[1, 1]")


def test_an_answer_is_closed_before_its_budget_ends(start: Start) -> None:
    schema: dict[str, JSON] = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array", "minItems": 2}},
        "required": ["text", "tags"],
    }
    rules = OutputRules(answer=AnswerFormat(schema))
    constraint = start(rules, (), thought="none", closing="answers")
    turn = TOKENIZER.encode_untrusted('{"text": "')
    constraint.advance(turn)
    num_left = 150
    while not (closing := constraint.closing(num_left)):
        constraint.advance([ord("x")])
        turn.append(ord("x"))
        num_left -= 1
    assert num_left > 60, "an ending may grow: it is not waited for to the last"
    assert closing[-1] == STOP
    jsonschema.validate(json.loads(TOKENIZER.decode([*turn, *closing[:-1]])), schema)


def test_drafts_have_room_while_an_answer_can_still_end_in_time(start: Start) -> None:
    """One with few tokens is looked at often; it was at each token, over which none is drafted."""
    rules = OutputRules(answer=AnswerFormat({"type": "string"}))
    constraint = start(rules, (), thought="none", closing="answers")
    constraint.advance([ord('"')])
    num_left, rooms = 150, list[int]()
    while not (closing := constraint.closing(num_left)):
        rooms.append(constraint.num_unwatched(num_left))
        constraint.advance([ord("x")] * rooms[-1])
        num_left -= rooms[-1]
    assert closing == (ord('"'), STOP)
    assert num_left == 64 + 2, "as early as if it had been looked at each token"
    assert rooms[:2] == [21, 15]
    assert len(rooms) < (150 - 66) / 3


def test_a_call_is_not_closed_unless_asked(start: Start) -> None:
    rules = OutputRules(answer=AnswerFormat({"type": "string"}))
    for closing, is_closed in (("answers", False), ("all", True)):
        constraint = start(rules, thought="none", closing=closing)
        constraint.closing(900)
        constraint.advance(TOKENIZER.encode_template(CALL[:-22]))
        assert bool(constraint.closing(70)) is is_closed


def random_turn(constraint: Constraint, rng: random.Random, max_tokens: int) -> list[int]:
    """A turn of uniformly drawn allowed tokens, closed in time."""
    turn: list[int] = []
    while len(turn) < max_tokens:
        closing = constraint.closing(max_tokens - len(turn))
        if closing:
            return [*turn, *closing]
        turn.append(rng.choice(allowed(constraint.masks(()))))
        if turn[-1] == STOP:
            return turn
        constraint.advance(turn[-1:])
    return turn


@pytest.mark.parametrize("seed", range(30))
def test_random_answers_fit_random_schemas(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng)
    rules = OutputRules(answer=AnswerFormat(schema))
    texts = tuple(examples(schema))
    constraint = start(rules, (), thought="none", closing="answers", examples=texts)
    turn = random_turn(constraint, rng, 300)
    if turn[-1] == STOP:
        text = b"".join(map(TOKENIZER.token_bytes, turn[:-1])).decode()
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_fit_random_schemas(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    schema: dict[str, JSON] = {
        "type": "object",
        "properties": {"value": random_schema(rng)},
        "required": ["value"],
    }
    rules = OutputRules(REQUIRED, parallel_tool_calls=False)
    texts = tuple(examples(schema))
    constraint = start(rules, [ToolSpec("f", "", schema)], thought="none", examples=texts)
    turn = random_turn(constraint, rng, 400)
    parser = StreamParser(TOKENIZER)
    parser.feed(turn)
    parsed = parser.finish("stop" if turn[-1] == STOP else "length")
    assert not parsed.unparsed or parsed.finish_reason == "length"
    for call in parsed.message.tool_calls:
        assert call.name == "f"
        jsonschema.validate(call.arguments, schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date"}, "2024-02-28", "2024-02-30"),
        ({"format": "time"}, "23:59:00.5Z", "24:00:00Z"),
        ({"format": "date-time"}, "2024-12-01T00:00:00+02:00", "2024-12-01"),
        ({"format": "email"}, "ann.b+c@mail-1.co", "ann..b@mail.co"),
        ({"format": "hostname"}, "a-b.c", "-a.b"),
        ({"format": "ipv4"}, "127.0.0.1", "256.0.0.1"),
        ({"format": "uuid"}, "0123abcd-0123-4567-89ab-0123456789ab", "0123abcd"),
        ({"type": "string", "enum": ["ab", "b", 3], "pattern": "a"}, "ab", "b"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2}, "xy", "xyz"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "3", "2"),
    ],
)
def test_texts_of_parameters_are_held_to_what_is_known_of_them(
    start: Start, schema: dict[str, JSON], good: str, bad: str
) -> None:
    typed: dict[str, JSON] = {"type": "string", **schema} if "format" in schema else schema
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"a": typed},
        "required": ["a"],
    }
    texts = tuple(examples(parameters))
    tools = [ToolSpec("f", "", parameters, strict=True)]
    constraint = start(OutputRules(REQUIRED), tools, "xml", "none", "never", texts)
    for value, is_allowed in ((good, True), (bad, False)):
        body = f"<parameter=a>\n{value}\n</parameter>"
        turn = f"<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>"
        assert accepts(constraint, turn) is is_allowed


@pytest.mark.parametrize("calls", ["json", "xml"])
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^\d\d$", "12", "1\u0661"),
        (r"^[\w-]+$", "a-b", "a-\u00e9"),
        (r"^[\w.-]\D$", "-x", "-1"),
        (r"^[^\d]\W$", "x-", "1-"),
        (r"^\\d$", "\\d", "1"),
    ],
)
def test_classes_of_a_pattern_are_those_of_json_schema(
    start: Start, calls: CallForm, pattern: str, good: str, bad: str
) -> None:
    parameters: dict[str, JSON] = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }
    tools = [ToolSpec("f", "", parameters, strict=True)]
    constraint = start(OutputRules(REQUIRED), tools, calls, "none", "never", ("ab",))
    for value, is_allowed in ((good, True), (bad, False)):
        body = f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"
        if calls == "json":
            given = json.dumps({"a": value}, ensure_ascii=False)
            body = f'{{"name": "f", "arguments": {given}}}'
        turn = f"<tool_call>\n{body}\n</tool_call>"
        assert accepts(constraint, turn) is is_allowed


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "properties": {"a": {"type": "string", "format": "uri"}}},
        {"type": "object", "properties": {"a": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}},
    ],
)
def test_what_tags_cannot_be_held_to_is_refused_while_strict(
    start: Start, parameters: dict[str, JSON]
) -> None:
    with pytest.raises(RequestError, match=r"'f'.*strict=false"):
        start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters, strict=True)], "xml")
    lenient = start(OutputRules(REQUIRED), [ToolSpec("f", "", parameters)], "xml")
    body = "<parameter=a>\nanything\n</parameter>\n"
    assert accepts(lenient, f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
