"""Stop strings, budgets, log-probabilities and audits, through whole turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ReasoningDelta, TextDelta
from dlite_agent.config import SamplingParams
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.engine.service import ModelService
from dlite_agent.errors import ConfigurationError, UnsupportedParameterError
from dlite_agent.outputs import Generation, GenerationChunk
from dlite_agent.testing import NoisyDrafter, OracleDrafter, cold_forward
from tests.conversations import Agent
from tests.tiny_checkpoint import VOCAB_SIZE, word_id, write_checkpoint
from tests.tiny_checkpoint import control_id as _control_id

WORDS = ("ab STOP cd", "ü€ STOP", "\nObs", "ervation: x", "\n\n", "fine ")
Load = Callable[..., ModelService]


def control_id(spelling: str) -> int:
    return _control_id(spelling, len(WORDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("words"), max_positions=4096, words=WORDS)


def chunks(service: ModelService, request: ChatRequest) -> list[GenerationChunk]:
    events = list(service.run(request, time.perf_counter(), lambda: False))
    for session in service.model.sessions.sessions():
        service.model.sessions.get(session.session_id).check_invariants()
    assert all(isinstance(event, GenerationChunk) for event in events)
    return events  # type: ignore[return-value]


def generate(service: ModelService, request: ChatRequest) -> Generation:
    generation = chunks(service, request)[-1].generation
    assert generation is not None
    return generation


def draft_with(service: ModelService, drafter: Drafter) -> None:
    """From now on, new sessions draft with a drafter of the tests."""
    service.model.sessions._drafter_of = lambda _: drafter


def biased(request: ChatRequest, bias: float, *, stop: tuple[str, ...] = ()) -> ChatRequest:
    biases = {word_id(number): bias for number in range(len(WORDS))}
    return replace(request, stop=stop, sampling=replace(request.sampling, logit_bias=biases))


STOP = ("STOP", "\nObservation:")


def stopping_conversation(service: ModelService, num_turns: int = 6) -> Agent:
    agent = Agent("repair it")
    for _ in range(num_turns):
        agent.take(generate(service, biased(agent.request(), 5.0, stop=STOP)))
    return agent


def test_stopped_turns_with_reuse_equal_cold_recomputation(load: Load) -> None:
    cold = stopping_conversation(load(reuse="none"))
    warm = stopping_conversation(load())
    assert [t.token_ids for t in warm.turns] == [t.token_ids for t in cold.turns]
    assert [t.prompt_token_ids for t in warm.turns] == [t.prompt_token_ids for t in cold.turns]
    assert [t.message.content for t in warm.turns] == [t.message.content for t in cold.turns]
    stopped = [turn for turn in warm.turns if turn.matched_stop is not None]
    assert len(stopped) >= 3
    assert {turn.matched_stop for turn in stopped} <= set(STOP)
    for turn in stopped:
        assert turn.finish_reason in ("stop", "tool_calls")
        assert all(string not in turn.message.content for string in STOP)
    for before, turn in itertools.pairwise(warm.turns):
        # the next prompt holds the turn that was cut, and reuses all of its tokens before the cut
        # (its last token is pending; or a token was cut, and its first bytes are encoded anew)
        num_again = 6 if before.matched_stop is not None else 1
        assert turn.stats.prefilled_tokens <= turn.stats.new_tokens + num_again
        assert turn.stats.replayed[-1] == "generated"


def find_cut(service: ModelService) -> tuple[ChatRequest, Generation]:
    """A request whose answer is cut inside a token, with a few tokens before."""
    for seed in range(50):
        sampling = SamplingParams(
            temperature=1.0, top_k=0, top_p=1.0, seed=seed, max_tokens=40, logprobs=True
        )
        request = biased(ChatRequest((Message("user", "hi"),), sampling=sampling), 2.0, stop=STOP)
        generation = generate(service, request)
        if generation.matched_stop == "STOP" and len(generation.token_ids) > 3:
            return request, generation
    raise AssertionError("no seed gives such an answer")


def test_session_ends_where_the_kept_tokens_end(load: Load) -> None:
    service = load()
    _, generation = find_cut(service)
    session = service.model.sessions.get(generation.stats.session_id)
    sampled = list(generation.token_ids)
    kept = session.token_ids[len(generation.prompt_token_ids) :]
    assert kept == sampled[: len(kept)]
    assert len(kept) < len(sampled)
    text = service.model.tokenizer.decode(sampled)
    assert generation.message.content == text[: text.index("STOP")]
    assert generation.stats.completion_tokens == len(generation.logprobs) == len(sampled)


def test_what_was_drafted_behind_a_stop_string_never_was(load: Load) -> None:
    plain = load()
    request, expected = find_cut(plain)
    free = generate(plain, replace(request, stop=()))
    prompt = expected.prompt_token_ids
    for drafter in (
        OracleDrafter([*prompt, *free.token_ids], max_block=5),
        NoisyDrafter([*prompt, *free.token_ids], vocab_size=VOCAB_SIZE),
    ):
        service = load()
        draft_with(service, drafter)
        events = chunks(service, request)
        generation = events[-1].generation
        assert generation is not None
        assert generation.token_ids == expected.token_ids
        assert generation.message == expected.message
        for entry, wanted in zip(generation.logprobs, expected.logprobs, strict=True):
            assert entry.token_id == wanted.token_id
            assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-9)
        assert [i for event in events for i in event.token_ids] == list(generation.token_ids)
        shown = [d.text for e in events for d in e.deltas if isinstance(d, TextDelta)]
        assert "".join(shown) == generation.message.content


def test_a_control_token_that_a_stop_string_spells_ends_the_turn(load: Load) -> None:
    service = load()
    sampling = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=5,
        max_tokens=60,
        logit_bias={control_id("<tool_call>"): 3.0},
    )
    request = ChatRequest((Message("user", "hi"),), sampling=sampling)
    free = generate(service, request)
    place = free.token_ids.index(control_id("<tool_call>"))
    generation = generate(service, replace(request, stop=("<tool_call>", "<|im_end|>")))
    assert generation.token_ids == free.token_ids[: place + 1]
    assert generation.matched_stop == "<tool_call>"
    assert generation.finish_reason == "stop"
    assert generation.unparsed == ()
    session = service.model.sessions.get(generation.stats.session_id)
    assert session.token_ids == [*generation.prompt_token_ids, *free.token_ids[:place]]


def test_a_stop_string_that_never_comes_changes_nothing(load: Load) -> None:
    service = load()
    request = Agent("repair it").request()
    expected = generate(service, request)
    generation = generate(service, replace(request, stop=("never to come", "\x00" * 500)))
    assert generation.token_ids == expected.token_ids
    assert generation.message.content == expected.message.content
    assert generation.matched_stop is None


def test_logprobs_are_the_models_own(load: Load) -> None:
    service = load(drafter="lookup")
    sampling = SamplingParams(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        seed=1,
        max_tokens=12,
        frequency_penalty=1.0,
        logprobs=True,
        top_logprobs=3,
    )
    events = chunks(service, ChatRequest((Message("user", "hi"),), sampling=sampling))
    generation = events[-1].generation
    assert generation is not None
    assert [entry for event in events for entry in event.logprobs] == list(generation.logprobs)
    ids = list(generation.prompt_token_ids)
    for token_id, entry in zip(generation.token_ids, generation.logprobs, strict=True):
        with cold_forward(service.model.target, ids) as (output, _):
            raw = torch.log_softmax(output.logits[0], dim=0)
        assert entry.token_id == token_id
        assert entry.raw == service.model.tokenizer.token_bytes(token_id)
        assert entry.logprob == pytest.approx(float(raw[token_id]), abs=1e-9)
        assert [other.token_id for other in entry.top] == raw.topk(3).indices.tolist()
        assert [other.logprob for other in entry.top] == pytest.approx(raw.topk(3).values.tolist())
        ids.append(token_id)


def test_logprobs_are_absent_unless_asked_for(load: Load) -> None:
    events = chunks(load(), Agent("repair it").request())
    assert all(event.logprobs == () for event in events)


def thinking_request(budget: int | None, seed: int = 0) -> ChatRequest:
    """The model opens a thought now and then, and never closes one."""
    sampling = SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=seed,
        max_tokens=40,
        logit_bias={
            control_id("<think>"): 6.0,
            control_id("</think>"): -100.0,
            control_id("<|im_end|>"): -100.0,
        },
        thinking_budget=budget,
    )
    return ChatRequest((Message("user", "hi"),), sampling=sampling)


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_thinking_budget_closes_thoughts_and_the_next_turn_reuses_them(
    load: Load, budget: int
) -> None:
    warm, cold = load(drafter="lookup"), load(reuse="none")
    request = thinking_request(budget)
    generation = generate(warm, request)
    assert generate(cold, request).token_ids == generation.token_ids
    ids = generation.token_ids
    opened = ids.index(control_id("<think>"))
    closing = (control_id("</think>"), 10, 10)  # the template writes two line breaks behind it
    assert ids[opened + 1 + budget : opened + 4 + budget] == closing
    assert generation.stats.is_thought_cut
    assert generation.stats.sampling["thinking_budget"] == budget
    free = generate(warm, thinking_request(None))
    assert free.token_ids[: opened + 1 + budget] == ids[: opened + 1 + budget]
    assert not free.stats.is_thought_cut
    messages = (*request.messages, generation.message, Message("tool", "done"))
    again = replace(request, messages=messages, history="as_generated")
    second = generate(warm, again)
    assert second.stats.prefilled_tokens <= second.stats.new_tokens + 1
    assert generate(cold, again).token_ids == second.token_ids


def test_a_thinking_budget_is_streamed_like_any_thought(load: Load) -> None:
    events = chunks(load(), thinking_request(5))
    generation = events[-1].generation
    assert generation is not None
    shown = [d.text for e in events for d in e.deltas if isinstance(d, ReasoningDelta)]
    assert "".join(shown) == (generation.message.reasoning or "")


def test_a_budget_without_a_closing_token_is_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = load()
    known = dict(service.model.tokenizer.control_tokens)
    del known["</think>"]
    monkeypatch.setattr(service.model.tokenizer, "_control_tokens", known)
    with pytest.raises(UnsupportedParameterError, match=r"thinking_budget=3: .* no </think>"):
        generate(service, thinking_request(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damaged_weights_are_named_as_the_cause(load: Load, dtype: str) -> None:
    service = load(dtype=dtype)
    norm = service.model.target._final_norm
    for weight in (norm.weight, norm._weight):  # of the compiled kernels, and of torch's operators
        weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, max_tokens=3)
        with pytest.raises(ConfigurationError, match=r"logit of a row is nan.*get the checkpoint"):
            generate(service, ChatRequest((Message("user", "hi"),), sampling=sampling))


def test_every_parameter_together_is_repeatable_and_reported(load: Load) -> None:
    sampling = SamplingParams(
        temperature=0.9,
        top_k=-1,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=3,
        max_tokens=30,
    )
    request = ChatRequest((Message("user", "hi"),), sampling=sampling)
    first = generate(load(drafter="lookup"), request)
    assert generate(load(reuse="none", drafter="null"), request).token_ids == first.token_ids
    assert first.stats.sampling == {
        "temperature": 0.9,
        "top_k": 0,
        "top_p": 0.95,
        "max_tokens": 30,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }


def test_an_audited_conversation_does_not_depend_on_the_drafter(load: Load) -> None:
    conversations = []
    for drafter in ("null", "lookup"):
        service = load(dtype="bfloat16", audit=True, drafter=drafter)
        agent = Agent("repair it")
        for _ in range(4):
            agent.take(generate(service, agent.request()))
        conversations.append([turn.token_ids for turn in agent.turns])
    assert conversations[0] == conversations[1]
