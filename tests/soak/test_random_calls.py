"""Turns in which tools may be called, must not, or several at once, under random weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from dlite_agent.chat.call_xml import XmlCalls
from dlite_agent.chat.json_calls import JsonCalls
from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.output_rules import OutputRules, ToolChoice
from dlite_agent.chat.stream_parser import ParsedTurn, StreamParser
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.constraint import GrammarCompiler
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.testing import NoisyDrafter
from tests.decoding.random_turns import (
    IDS,
    NO_ARGUMENTS,
    PROMPT,
    STOP,
    TOKENIZER,
    VOCAB,
    RandomTurn,
    decode,
    new_compiler,
    new_target,
    random_object,
)

RULES = (
    OutputRules(ToolChoice("required")),
    OutputRules(ToolChoice("auto")),
    OutputRules(ToolChoice("auto"), parallel_tool_calls=False),
    OutputRules(ToolChoice("none")),
    OutputRules(ToolChoice("auto", ("f",))),
)


def random_calls(rng: random.Random) -> RandomTurn:
    """A turn with a strict tool, one that is not, and one without parameters."""
    strict = ToolSpec("f", "", random_object(rng), strict=True)
    loose = ToolSpec("g", "", random_object(rng))
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0, 4.0]), top_k=rng.choice([0, 5]), top_p=1.0
    )
    form = rng.choice(["xml", "json"])
    tools = (strict, NO_ARGUMENTS, loose)
    return RandomTurn(rng.choice(RULES), tools, form, "never", sampling)  # type: ignore[arg-type]  # a form


def check(turn: RandomTurn, ids: Sequence[int]) -> int:
    """How many calls it holds; each is one that was allowed, and fits if it is bound to."""
    reader = XmlCalls(turn.tools, is_exact=True) if turn.form == "xml" else JsonCalls(turn.tools)
    parser = StreamParser(TOKENIZER, calls=reader)
    for token_id in ids:
        parser.feed([token_id])
    is_over = ids[-1] == STOP
    parsed = parser.finish("stop" if is_over else "length")
    rules, names = turn.rules, {call.name for call in parsed.message.tool_calls}
    allowed = set(rules.tool_choice.names) or {tool.name for tool in turn.tools}
    assert names <= (allowed if rules.tool_choice.mode != "none" else set())
    assert rules.parallel_tool_calls or len(parsed.message.tool_calls) <= 1
    check_unparsed(parsed, is_over=is_over)
    broken = [call for call in parsed.unparsed if "cut" not in call.error]
    assert len(parsed.message.tool_calls) + len(broken) == list(ids).count(IDS["</tool_call>"])
    for call in parsed.message.tool_calls:
        if call.name != "g" or rules.tool_choice.mode == "required":
            tool = next(tool for tool in turn.tools if tool.name == call.name)
            jsonschema.validate(call.arguments, tool.parameters)
    return len(parsed.message.tool_calls)


def check_unparsed(parsed: ParsedTurn, *, is_over: bool) -> None:
    """Only a tool that is not strict is called wrongly, and only the last call is cut."""
    *before, last = parsed.unparsed or (None,)
    assert all(call is not None and call.name == "g" for call in before)
    assert last is None or last.name == "g" or not is_over


def check_seed(seed: int, compiler: GrammarCompiler) -> int:
    """The same turn with drafts and without; how many calls it holds."""
    turn, target = random_calls(random.Random(seed)), new_target(seed)
    ids = decode(turn, target, compiler, NullDrafter())
    drafter = NoisyDrafter([*PROMPT, *ids], vocab_size=VOCAB)
    assert decode(turn, target, compiler, drafter) == ids, seed
    target.close()
    return check(turn, ids)


@pytest.mark.parametrize(
    "num_turns",
    [
        pytest.param(12, id="sample"),
        pytest.param(2_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_calls_are_those_that_were_allowed_and_fit(num_turns: int) -> None:
    compiler = new_compiler()
    assert sum(check_seed(seed, compiler) for seed in range(num_turns)) > num_turns / 8
