"""A random schema in a random role, under random weights: what every turn of it has to be.

`make test` takes a hundred of these, `make soak` ten thousand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own

from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.chat.patterns import examples
from dlite_agent.chat.stream_parser import ParsedTurn, StreamParser
from dlite_agent.chat.template import CallForm
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.constraint import Closing, GrammarCompiler
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.decoding.token_trie import TokenTable
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import AdversarialDrafter, ByteTokenizer, NoisyDrafter, tiny_qwen3

TOKENIZER = ByteTokenizer()
IDS = TOKENIZER.control_tokens
STOP = IDS["<|im_end|>"]
PROMPT = TOKENIZER.encode_template("<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n")
VOCAB = 288
MAX_TOKENS = 120
NO_ARGUMENTS = ToolSpec("now", "", {"type": "object", "properties": {}}, strict=True)
TEMPERATURES = (0.0, 0.7, 1.0, 4.0)


def new_compiler() -> GrammarCompiler:
    """Of the bytes and the control tokens."""
    texts = [TOKENIZER.token_bytes(i) for i in range(265)]
    table = TokenTable(
        texts, list(IDS.values()), [STOP], TOKENIZER.encode_untrusted, IDS["<tool_call>"]
    )
    return GrammarCompiler(table, VOCAB)


def new_target(seed: int) -> DenseTransformer:
    """Random weights; one layer of 16 channels in float64."""
    config = TargetConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    return tiny_qwen3(dtype="float64", seed=seed, config=config, max_kv_bytes=2**20)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, JSON]:
    """A schema of any kind; nested at most four deep."""
    kinds = ["string", "integer", "boolean", "enum", "number", "null", "pattern", "const"]
    kind = rng.choice(kinds if depth > 2 else [*kinds, "object", "array", "anyOf", "object", "ref"])
    if kind == "object":
        return random_object(rng, depth)
    if kind == "array":
        low = rng.randrange(3)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "ref":
        return {"type": rng.choice([["integer", "null"], ["string", "null"], ["array", "boolean"]])}
    if kind in ("enum", "const"):
        values: list[JSON] = ["x", 3, None, "y z", "é\n", True, 1.5, '"q"']
        rng.shuffle(values)
        return {"const": values[0]} if kind == "const" else {"enum": values[: rng.randrange(1, 5)]}
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(1, 9)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^a|b$", r"^\d{4}-\d\d$"])}
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": rng.randrange(200)}
    return {"type": kind}


def random_object(rng: random.Random, depth: int = 0) -> dict[str, JSON]:
    """The schema of an object, which the arguments of a tool are."""
    names = rng.sample(["a", "b\u00e9", "c d", 'e"f', "path"], rng.randrange(4))
    properties: dict[str, JSON] = {name: random_schema(rng, depth + 1) for name in names}
    required: list[JSON] = [name for name in names if rng.random() < 0.5]
    schema: dict[str, JSON] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.2:
        schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
    return schema


@dataclass(frozen=True, slots=True)
class RandomTurn:
    """What is asked for.

    Attributes:
        rules: Of the request.
        tools: Of the request.
        form: How calls are written.
        closing: What is closed before its tokens run out.
        sampling: How it is sampled.
    """

    rules: OutputRules
    tools: tuple[ToolSpec, ...]
    form: CallForm
    closing: Closing
    sampling: SamplingParams


def random_turn(rng: random.Random) -> RandomTurn:
    """An answer, a call of a tool that has parameters or none, or a choice between them."""
    role = rng.choice(["answer", "call", "call", "choice", "nothing"])
    form: CallForm = rng.choice(["json", "xml"])
    sampling = SamplingParams(
        temperature=rng.choice(TEMPERATURES), top_k=rng.choice([0, 5, 40]), top_p=1.0
    )
    tool = ToolSpec("f", "", random_object(rng), strict=True)
    answer = AnswerFormat(random_schema(rng))
    if role == "answer":
        return RandomTurn(OutputRules(answer=answer), (), form, "answers", sampling)
    if role == "choice":
        return RandomTurn(OutputRules(answer=answer), (tool,), form, "answers", sampling)
    named = NO_ARGUMENTS if role == "nothing" else tool
    rules = OutputRules(ToolChoice("required", (named.name,)))
    closing: Closing = rng.choice(["never", "all"])
    return RandomTurn(rules, (tool, NO_ARGUMENTS), form, closing, sampling)


def decode(
    turn: RandomTurn,
    target: DenseTransformer,
    compiler: GrammarCompiler,
    drafter: Drafter,
    *,
    is_bare: bool = False,
) -> list[int]:
    """The ids of a turn; in a bare one nothing is drafted at all, not even what is forced."""
    grammar = turn_grammar(turn.rules, turn.tools, TurnForm(IDS, turn.form, "none"))
    assert grammar is not None
    sampler = Sampler(turn.sampling, KeyedNoise.derive(7, 0, PROMPT))
    schemas = (turn.rules.answer and turn.rules.answer.schema, *(t.parameters for t in turn.tools))
    texts = [text for schema in schemas for text in examples(schema)]
    limits = StopRules(
        frozenset([STOP]),
        MAX_TOKENS,
        fixed_rows=1 if is_bare else None,
        constraint=compiler.compile(grammar, "", turn.closing, texts),
    )
    session = Session(target, drafter, session_id="test")
    session.sync(PROMPT)
    ids = [token for round_ in session.decode(sampler, limits) for token in round_.token_ids]
    session.close()
    return ids


def check_turn(turn: RandomTurn, ids: Sequence[int]) -> bool:
    """Whether it is over; what is over fits, and a call that is not over is none."""
    is_xml = turn.form == "xml"
    parser = StreamParser(
        TOKENIZER, calls=XmlCalls(turn.tools, is_exact=True) if is_xml else JsonCalls(turn.tools)
    )
    parser.feed(ids)
    is_over = ids[-1] == STOP
    parsed = parser.finish("stop" if is_over else "length")
    if not is_over:
        assert len(ids) == MAX_TOKENS
        assert turn.closing == "never" or IDS["<tool_call>"] in ids, "answers are closed in time"
        assert len(parsed.message.tool_calls) == list(ids).count(IDS["</tool_call>"])
        assert parsed.finish_reason == "length"
        return False
    _check_whole(turn, parsed)
    if turn.rules.tool_choice.names == (NO_ARGUMENTS.name,):
        assert len(ids) <= 40
    return True


def _check_whole(turn: RandomTurn, parsed: ParsedTurn) -> None:
    assert parsed.unparsed == ()
    if not parsed.message.tool_calls:
        assert turn.rules.answer is not None
        assert turn.rules.answer.schema is not None
        jsonschema.validate(json.loads(parsed.message.content), turn.rules.answer.schema)
        return
    assert parsed.message.content == ""
    for call in parsed.message.tool_calls:
        tool = next(tool for tool in turn.tools if tool.name == call.name)
        assert call.name in (turn.rules.tool_choice.names or (call.name,))
        jsonschema.validate(call.arguments, tool.parameters)
        if tool is NO_ARGUMENTS:
            assert call.raw_arguments == "{}"


def check_random_turn(seed: int, target: DenseTransformer, compiler: GrammarCompiler) -> bool:
    """Decode with and without drafts; returns whether the turn is over within its tokens."""
    rng = random.Random(seed)
    turn = random_turn(rng)
    plain = decode(turn, target, compiler, NullDrafter(), is_bare=seed % 5 == 0)
    drafter: Drafter = (
        LookupDrafter(sizes=(1,)),
        NoisyDrafter([*PROMPT, *plain], vocab_size=VOCAB),
        AdversarialDrafter(vocab_size=VOCAB, favourites=(STOP, ord('"'), IDS["</tool_call>"])),
    )[seed % 3]
    assert decode(turn, target, compiler, drafter) == plain, seed
    return check_turn(turn, plain)
