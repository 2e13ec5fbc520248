"""Turns under a grammar in the decode loop: they fit it, whatever is sampled and whoever drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.messages import JSON, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.constraint import GrammarCompiler
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.decoding.thoughts import ThoughtBudget
from dlite_agent.decoding.token_trie import TokenTable
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import (
    AdversarialDrafter,
    ByteTokenizer,
    OracleDrafter,
    assert_kv_is_of,
    tiny_qwen3,
)

TOKENIZER = ByteTokenizer()
IDS = TOKENIZER.control_tokens
STOP = IDS["<|im_end|>"]
PROMPT = TOKENIZER.encode_template("<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n")
SCHEMA: dict[str, JSON] = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["north", "south"]}, "maxItems": 3},
        "note": {"type": "string"},
    },
    "required": ["place", "tags", "note"],
}
TOOLS = (ToolSpec("find", "", SCHEMA), ToolSpec("stop", "", {"type": "object", "properties": {}}))
DRAFTERS: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "lookup": lambda ids: LookupDrafter(sizes=(1,)),
    "oracle": lambda ids: OracleDrafter(ids, max_block=5),
    "adversarial": lambda ids: AdversarialDrafter(vocab_size=512, favourites=(STOP, ord('"'))),
}


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    texts = [TOKENIZER.token_bytes(i) for i in range(265)]
    call_id = IDS["<tool_call>"]
    table = TokenTable(texts, list(IDS.values()), [STOP], TOKENIZER.encode_untrusted, call_id)
    return GrammarCompiler(table, 512)


Run = Callable[..., tuple[list[int], list[Round]]]


@pytest.fixture
def run(target: DenseTransformer, compiler: GrammarCompiler) -> Run:
    def run(
        rules: OutputRules, drafter: Drafter, *, temperature: float, thoughts: int | None = None
    ) -> tuple[list[int], list[Round]]:
        tools = TOOLS if rules.answer is None else ()
        grammar = turn_grammar(rules, tools, TurnForm(IDS, "json", "optional"))
        assert grammar is not None
        sampler = Sampler(
            SamplingParams(temperature=temperature, top_k=0, top_p=1.0),
            KeyedNoise.derive(7, 0, PROMPT),
        )
        budget = None
        if thoughts is not None:
            budget = ThoughtBudget(thoughts, (IDS["</think>"], 10, 10), IDS["<think>"])
        limits = StopRules(
            frozenset([STOP]), 200, budget, constraint=compiler.compile(grammar, closing="answers")
        )
        session = Session(target, drafter, session_id="test")
        session.sync(PROMPT)
        rounds = list(session.decode(sampler, limits))
        session.check_invariants()
        assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
        turn = [token for round_ in rounds for token in round_.token_ids]
        session.close()
        return turn, rounds

    return run


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize(
    "rules",
    [
        OutputRules(ToolChoice("required"), parallel_tool_calls=False),
        OutputRules(answer=AnswerFormat(SCHEMA)),
        OutputRules(ToolChoice("none")),
    ],
    ids=["call", "answer", "none"],
)
def test_the_tokens_are_those_without_drafts(
    run: Run, rules: OutputRules, temperature: float
) -> None:
    plain, _ = run(rules, NullDrafter(), temperature=temperature)
    for name, make in DRAFTERS.items():
        drafted, _ = run(rules, make(plain), temperature=temperature)
        assert drafted == plain, name


def test_random_weights_answer_in_the_form_that_was_asked_for(run: Run) -> None:
    turn, rounds = run(OutputRules(answer=AnswerFormat(SCHEMA)), NullDrafter(), temperature=1.0)
    assert rounds[-1].finish == "stop", "closed in time"
    text = TOKENIZER.decode(turn[:-1]).rpartition("</think>")[2]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert "forced" in {round_.source for round_ in rounds}


def _rounds_until(rounds: list[Round], place: int) -> int:
    """Rounds that end at or before a place in the turn."""
    ends = list(accumulate(len(round_.token_ids) for round_ in rounds))
    return sum(end <= place for end in ends)


def test_forced_bytes_are_nearly_free(run: Run) -> None:
    rules = OutputRules(ToolChoice("required", ("stop",)))
    turn, rounds = run(rules, NullDrafter(), temperature=0.0)
    assert TOKENIZER.decode(turn).endswith(
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>'
    )
    call = turn.index(IDS["<tool_call>"])
    assert len(turn) - call > 37
    num_rounds = len(rounds) - _rounds_until(rounds, call)
    assert num_rounds <= 4


def test_a_thought_is_cut_and_then_the_call_comes(run: Run) -> None:
    rules = OutputRules(ToolChoice("required", ("stop",)))
    for name, make in {"null": lambda ids: NullDrafter(), **DRAFTERS}.items():
        turn, _ = run(rules, make(PROMPT), temperature=3.0, thoughts=5)
        assert TOKENIZER.decode(turn).endswith("</tool_call><|im_end|>"), name
        if IDS["<think>"] in turn:
            assert turn.index(IDS["</think>"]) - turn.index(IDS["<think>"]) <= 6
