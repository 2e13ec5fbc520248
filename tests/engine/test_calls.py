"""Calls in whole turns: what is cut is none, and what comes back is what was sampled."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.config import SamplingParams
from dlite_agent.engine.service import ModelService
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import Agent
from tests.engine.loader import loader
from tests.tiny_checkpoint import control_id, write_checkpoint

# As Qwen3-Coder's writes calls and results, without its prose about tools.
CODER_TEMPLATE = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- m.content }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SEARCH = ToolSpec(
    "search",
    "",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 9},
            "line": {"type": "integer", "minimum": 0, "maximum": 999},
            "where": {"enum": ["here", "there"]},
        },
        "required": ["text", "line", "where"],
    },
    strict=True,
)
ANSWER: dict[str, JSON] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "tags": {"type": "array", "minItems": 1}},
    "required": ["text", "tags"],
}
FORCED = OutputRules(ToolChoice("required", (SEARCH.name,)))
Load = Callable[..., ModelService]


@pytest.fixture(scope="module", params=["json", "xml"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), max_positions=4096)
    if request.param == "xml":
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**settings, "chat_template": CODER_TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture
def load(folder: Path) -> Iterator[Load]:
    with loader(folder) as load:
        yield load


def generate(
    service: ModelService, request: ChatRequest
) -> tuple[Generation, list[GenerationChunk]]:
    """The turn, and its chunks."""
    chunks = list(service.run(request, time.perf_counter(), lambda: False))
    assert all(isinstance(chunk, GenerationChunk) for chunk in chunks)
    generation = chunks[-1].generation  # type: ignore[union-attr]
    assert generation is not None
    return generation, chunks  # type: ignore[return-value]


class Searcher(Agent):
    """Has to call its tool in every turn."""

    def request(self, *, max_tokens: int = 200) -> ChatRequest:
        # a random model would think for ever
        bias = {control_id("<think>"): -100.0}
        request = super().request(max_tokens=max_tokens)
        sampling = replace(request.sampling, logit_bias=bias)
        return replace(request, tools=(SEARCH,), output=FORCED, sampling=sampling)


def reordered(message: Message) -> Message:
    """What a client makes of a call: parsed arguments, in another order, and no text."""
    calls = [
        replace(
            call,
            arguments=dict(reversed(call.arguments.items())),  # type: ignore[union-attr]
            raw_arguments=None,
        )
        for call in message.tool_calls
    ]
    return replace(message, tool_calls=tuple(calls))


def test_calls_that_a_client_sends_back_are_not_computed_again(load: Load) -> None:
    warm, cold = Searcher("find it", edit=reordered), Searcher("find it", edit=reordered)
    services = load(), load(reuse="none")
    for _ in range(3):
        for agent, service in zip((warm, cold), services, strict=True):
            agent.take(generate(service, agent.request())[0])
        assert warm.turns[-1].prompt_token_ids == cold.turns[-1].prompt_token_ids
        assert warm.turns[-1].token_ids == cold.turns[-1].token_ids
    for before, turn in itertools.pairwise(warm.turns):
        (call,) = before.message.tool_calls
        jsonschema.validate(call.arguments, SEARCH.parameters)
        assert turn.stats.replayed[-1] == "generated"
        assert turn.stats.prefilled_tokens <= turn.stats.new_tokens + 1  # A = 1.00
        assert turn.stats.miss is None or turn.stats.miss.tokens == 0


def test_a_call_is_cut_at_any_token_and_never_handed_out(load: Load) -> None:
    service = load()
    whole, _ = generate(service, Searcher("find it").request())
    length = len(whole.token_ids)
    assert whole.finish_reason == "tool_calls"
    for max_tokens in (1, 2, *range(7, length - 2, 16), length - 2):
        cut, chunks = generate(service, Searcher("find it").request(max_tokens=max_tokens))
        assert cut.token_ids == whole.token_ids[:max_tokens]
        assert cut.message.tool_calls == ()
        assert cut.finish_reason == chunks[-1].finish_reason == "length"
        assert len(cut.unparsed) == 1
    last, _ = generate(service, Searcher("find it").request(max_tokens=length - 1))
    assert last.finish_reason == "length", "the call is whole, and its turn is not"
    assert last.message.tool_calls[0].arguments == whole.message.tool_calls[0].arguments


def test_a_stop_inside_a_call_leaves_no_call(load: Load) -> None:
    service = load()
    request = Searcher("find it").request()
    whole, _ = generate(service, request)
    for stop_id in whole.token_ids[5:-5:20]:
        sampling = replace(request.sampling, stop_token_ids=(stop_id,))
        stopped, _ = generate(service, replace(request, sampling=sampling))
        assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop_id) + 1]
        assert stopped.message.tool_calls == ()
        assert stopped.finish_reason == "stop"
        assert len(stopped.unparsed) == 1


def test_a_cancelled_call_is_handed_to_nobody(load: Load) -> None:
    service = load()
    request = Searcher("find it").request()
    whole, _ = generate(service, request)
    for num_read in (1, 4):
        read: list[GenerationChunk] = []

        def has_read(read: list[GenerationChunk] = read, most: int = num_read) -> bool:
            return len(read) >= most

        for chunk in service.run(request, time.perf_counter(), has_read):
            assert isinstance(chunk, GenerationChunk)
            read.append(chunk)
        assert len(read) == num_read
        assert all(chunk.generation is None for chunk in read)
    assert generate(service, request)[0].token_ids == whole.token_ids


@pytest.mark.parametrize("max_tokens", [40, 70, 120])
def test_an_answer_is_closed_within_its_tokens(load: Load, max_tokens: int) -> None:
    sampling = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=max_tokens,
        max_tokens=max_tokens,
        logit_bias={control_id("<think>"): -100.0},
    )
    rules = OutputRules(answer=AnswerFormat(ANSWER))
    request = ChatRequest((Message("user", "?"),), sampling=sampling, output=rules)
    generation, _ = generate(load(), request)
    assert generation.finish_reason == "stop"
    assert len(generation.token_ids) <= max_tokens
    jsonschema.validate(json.loads(generation.message.content), ANSWER)
