"""Random schemas against uniformly drawn tokens: every finished answer fits."""

from __future__ import annotations

import json
import random

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules
from dlite_agent.decoding.constraint import GrammarCompiler, TokenTable
from tests.decoding.test_constraint import IDS, STOP, TOKENIZER, VOCAB, random_schema, random_turn

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_SCHEMAS = 10_000


def test_random_answers_fit_ten_thousand_schemas() -> None:
    texts = [TOKENIZER.token_bytes(i) for i in range(265)]
    table = TokenTable(
        texts, list(IDS.values()), [STOP], TOKENIZER.encode_untrusted, IDS["<tool_call>"]
    )
    compiler = GrammarCompiler(table, VOCAB)
    num_finished = 0
    for seed in range(NUM_SCHEMAS):
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = turn_grammar(
            OutputRules(answer=AnswerFormat(schema)), (), TurnForm(IDS, "json", "none")
        )
        assert grammar is not None
        turn = random_turn(compiler.compile(grammar, closing="answers"), rng, 300)
        if turn[-1] == STOP:
            num_finished += 1
            text = b"".join(map(TOKENIZER.token_bytes, turn[:-1])).decode()
            jsonschema.validate(json.loads(text), schema)
    assert num_finished > 0.9 * NUM_SCHEMAS
