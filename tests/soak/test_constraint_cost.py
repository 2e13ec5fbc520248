"""What a grammar costs on a real vocabulary; prints medians of CPU time, in milliseconds."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.grammar import TurnForm, turn_grammar
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.chat.renderer import Renderer
from dlite_agent.chat.template import CallForm
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.constraint import Constraint, GrammarCompiler
from dlite_agent.decoding.token_trie import TokenTable
from dlite_agent.decoding.verification import RowContext, verify
from dlite_agent.drafters.drafter import DraftBlock
from dlite_agent.engine.turn_grammars import TurnGrammars
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.tokenizer import load_tokenizer

pytestmark = pytest.mark.soak

VOCAB_SIZE = 151_936
NUM_DRAFTED = 8
PARAMETERS: dict[str, JSON] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "mode": {"enum": ["r", "w", "a"]},
        "flags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["path"],
}
TOOLS = [ToolSpec(f"tool_{number}", "", PARAMETERS) for number in range(20)]
CALL = (
    '{"name": "tool_7", "arguments": {"path": "src/package/module/file_name.py", "line": 123, '
    '"mode": "w", "flags": ["--verbose", "a b c d e f", "na\u00efve \u4f60\u597d"]}}'
)
FORMS: tuple[CallForm, ...] = ("json", "xml")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
    "top-k 20": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "nucleus": SamplingParams(temperature=0.7, top_k=0, top_p=0.9),
    "whole": SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
}


def test_a_round_costs_a_millisecond_and_a_first_compile_a_hundred(
    qwen3_tokenizer_dir: Path,
) -> None:
    tokenizer = load_tokenizer(str(qwen3_tokenizer_dir))
    control = tokenizer.control_tokens
    stop = control["<|im_end|>"]
    texts = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    table = TokenTable(
        texts, list(control.values()), [stop], tokenizer.encode_untrusted, control["<tool_call>"]
    )
    began_s = time.thread_time()
    compiler = GrammarCompiler(table, VOCAB_SIZE)
    print(f"\nvocabulary {1e3 * (time.thread_time() - began_s):.0f} ms")
    rules = OutputRules(ToolChoice("required"), parallel_tool_calls=False)
    grammar = turn_grammar(rules, TOOLS, TurnForm(control, "json", "none"))
    assert grammar is not None
    compiles = []
    for _ in range(2):
        began_s = time.thread_time()
        compiler.compile(grammar)
        compiles.append(1e3 * (time.thread_time() - began_s))
    print(f"compile {compiles[0]:.1f} ms, again {compiles[1]:.3f} ms")
    turn = [*tokenizer.encode_template(f"<tool_call>\n{CALL}\n</tool_call>"), stop]
    for name, params in SAMPLINGS.items():
        median = statistics.median(
            cost
            for _ in range(3)
            for cost in round_costs(compiler.compile(grammar), turn, Sampler(params, KeyedNoise(5)))
        )
        print(f"{name}: a round with {NUM_DRAFTED} drafted tokens {median:.3f} ms")
        assert median < 1.0
    assert compiles[0] < 100


def test_a_first_request_compiles_and_checks_twenty_tools_in_a_hundred(
    qwen3_tokenizer_dir: Path,
) -> None:
    tokenizer = load_tokenizer(str(qwen3_tokenizer_dir))
    asked = (Message("user", "?"),)
    prompt = Renderer(tokenizer).render(asked)
    request = ChatRequest(asked, tools=tuple(TOOLS), output=OutputRules(ToolChoice("required")))
    held = []
    for calls in FORMS:
        grammars = TurnGrammars(
            tokenizer, VOCAB_SIZE, [tokenizer.control_tokens["<|im_end|>"]], calls
        )
        if not held:
            warm = ChatRequest(asked, output=OutputRules(answer=AnswerFormat({"type": "null"})))
            began_s = time.thread_time()
            grammars.constraint(warm, prompt)
            print(
                f"\nfirst of all, vocabulary included {1e3 * (time.thread_time() - began_s):.0f} ms"
            )
        held.append(grammars)  # which is what keeps the vocabulary
        for number in range(2):
            began_s = time.thread_time()
            grammars.constraint(request, prompt)
            took_ms = 1e3 * (time.thread_time() - began_s)
            print(f"{calls}: {'again' if number else 'first'} {took_ms:.1f} ms")
            assert took_ms < 100


def round_costs(constraint: Constraint, turn: list[int], sampler: Sampler) -> list[float]:
    """Milliseconds that a grammar adds to each round: with it, less without it, in turns.

    Every draft is right, so that all nine rows are evaluated.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(NUM_DRAFTED + 1, VOCAB_SIZE, generator=generator) * 3
    costs = []
    for start in range(len(turn) - NUM_DRAFTED - 1):
        drafted = turn[start : start + NUM_DRAFTED]
        logits = noise.clone()
        for row, token_id in enumerate(turn[start : start + NUM_DRAFTED + 1]):
            logits[row, token_id] = 60.0
        block = DraftBlock(tuple(drafted))
        seconds = {}
        for is_bound in (True, False) if start % 2 else (False, True):
            began_s = time.thread_time()
            masks = None
            if is_bound:
                constraint.num_valid(drafted)
                constraint.forced(NUM_DRAFTED)
                masks = constraint.masks(drafted)
            verified = verify(block, logits, sampler, 100, RowContext(masks=masks))
            seconds[is_bound] = time.thread_time() - began_s
            assert len(verified.token_ids) == NUM_DRAFTED + 1
        costs.append(1e3 * (seconds[True] - seconds[False]))
        constraint.advance(drafted[:1])
    return costs
