from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, TextDelta, ToolCallDelta
from dlite_agent.config import HistoryMode, ReusePolicy, SamplingParams
from dlite_agent.engine.service import ModelService
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
    ContextLengthExceededError,
    RequestError,
    UnsupportedParameterError,
)
from dlite_agent.outputs import Generation, GenerationChunk
from tests.conversations import READ_FILE, Agent, respaced, sampled
from tests.tiny_checkpoint import VOCAB_SIZE

Load = Callable[..., ModelService]


def never() -> bool:
    return False


def after(count: int) -> Callable[[], bool]:
    """Let `count` steps pass, then stop."""
    left = [count]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    return should_stop


def chunks(
    service: ModelService, request: ChatRequest, should_stop: Callable[[], bool] = never
) -> list[GenerationChunk]:
    events = list(service.run(request, time.perf_counter(), should_stop))
    assert all(isinstance(event, GenerationChunk) for event in events)
    for session in service.model.sessions.sessions():
        assert not session.is_busy
        service.model.sessions.get(session.session_id).check_invariants()
    return events  # type: ignore[return-value]


def generate(service: ModelService, request: ChatRequest) -> Generation:
    generation = chunks(service, request)[-1].generation
    assert generation is not None
    return generation


def converse(service: ModelService, agent: Agent, num_turns: int = 6) -> Agent:
    for _ in range(num_turns):
        agent.take(generate(service, agent.request()))
    return agent


@pytest.mark.parametrize("edit", [lambda message: message, respaced], ids=["same", "respaced"])
def test_six_turns_with_reuse_equal_cold_recomputation(
    load: Load, edit: Callable[[Message], Message]
) -> None:
    warm = converse(load(), Agent("fix it", edit=edit))
    cold = converse(load(reuse="none"), Agent("fix it", edit=edit))
    assert sum(bool(turn.message.tool_calls) for turn in warm.turns) >= 3
    for ours, theirs in zip(warm.turns, cold.turns, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.token_ids == theirs.token_ids
        assert ours.stats.prompt_hash == theirs.stats.prompt_hash
        assert theirs.stats.prefilled_tokens == theirs.stats.prompt_tokens
        assert ours.stats.new_tokens == theirs.stats.new_tokens


@pytest.mark.parametrize("edit", [lambda message: message, respaced], ids=["same", "respaced"])
def test_a_turn_prefills_what_is_new_and_the_pending_token(
    load: Load, edit: Callable[[Message], Message]
) -> None:
    service = load()
    agent = converse(service, Agent("fix it", edit=edit))
    for before, turn in zip(agent.turns, agent.turns[1:], strict=False):
        stats = turn.stats
        assert stats.prefilled_tokens == stats.new_tokens + 1
        assert stats.cached_tokens + stats.prefilled_tokens == stats.prompt_tokens
        assert stats.rewound_tokens == 0
        assert stats.replayed[-1] == "generated"
        shared = len(before.prompt_token_ids) + len(before.token_ids)
        assert stats.new_tokens == stats.prompt_tokens - shared
        assert turn.prompt_token_ids[:shared] == before.prompt_token_ids + before.token_ids


def test_rows_of_all_forwards_are_accounted_for(load: Load) -> None:
    service = load(drafter="lookup")
    agent = converse(service, Agent("fix it"))
    stats = [turn.stats for turn in agent.turns]
    in_rounds = sum(s.rounds + s.drafted_tokens for s in stats)
    prefilled = sum(s.prefilled_tokens for s in stats)
    assert service.model.target.rows_computed == prefilled + in_rounds
    for s in stats:
        # one bonus token a round, but none behind an accepted stop token
        assert s.completion_tokens in (s.rounds + s.accepted_tokens + n for n in (0, 1))
        assert sum(s.drafted_by.values()) == s.drafted_tokens
        assert sum(s.accepted_by.values()) == s.accepted_tokens
        assert set(s.drafted_by) == set(s.accepted_by) <= {"lookup"}


def test_two_interleaved_agents_prefill_nothing_twice(load: Load) -> None:
    service = load()
    agents = [Agent("fix alpha"), Agent("fix beta")]
    for _ in range(4):
        for agent in agents:
            agent.take(generate(service, agent.request()))
    for agent in agents:
        for turn in agent.turns[1:]:
            assert turn.stats.prefilled_tokens == turn.stats.new_tokens + 1
    assert agents[1].turns[0].stats.cached_tokens > 0  # the system prompt of the other one
    alone = converse(load(), Agent("fix beta"), 4)
    assert [t.token_ids for t in alone.turns] == [t.token_ids for t in agents[1].turns]


def test_the_prefix_baseline_renders_what_it_receives(load: Load) -> None:
    prefix = converse(load(reuse="prefix"), Agent("fix it"))
    session = converse(load(), Agent("fix it"), 2)
    assert prefix.turns[0].token_ids == session.turns[0].token_ids
    assert set(prefix.turns[-1].stats.replayed) == {"rendered"}
    amplified = [t.stats.prefilled_tokens - t.stats.new_tokens for t in prefix.turns[1:]]
    assert max(amplified) > 1  # its tokens for a call are not those that were sampled
    assert prefix.turns[1].stats.new_tokens == session.turns[1].stats.new_tokens


@pytest.mark.parametrize("history", ["template", "as_generated", "auto"])
def test_history_mode_decides_what_a_new_user_query_sees(load: Load, history: HistoryMode) -> None:
    service = load(history=history)
    agent = converse(service, Agent("fix it"), 2)
    agent.messages.append(Message("user", "and now?"))
    generation = generate(service, agent.request())
    expected = "generated" if history == "as_generated" else "rendered"
    assert set(generation.stats.replayed) == {expected}
    override = replace(agent.request(), history="as_generated")
    assert set(generate(service, override).stats.replayed) == {"generated"}


def test_cancel_at_every_step_leaves_the_session_usable(load: Load) -> None:
    expected = converse(load(reuse="none"), Agent("fix it"), 3)
    service = load(prefill_chunk=16)
    agent = Agent("fix it")
    for turn in range(3):
        for step in range(200):
            got = chunks(service, agent.request(), after(step))
            if got and got[-1].finish_reason is not None:
                break
            tokens = [token for chunk in got for token in chunk.token_ids]
            assert tuple(tokens) == expected.turns[turn].token_ids[: len(tokens)]
        else:
            pytest.fail("the turn never ended")
        generation = generate(service, agent.request())
        assert generation.token_ids == expected.turns[turn].token_ids
        agent.take(generation)


def test_a_cancelled_prefill_is_resumed(load: Load) -> None:
    service = load(prefill_chunk=16)
    request = Agent("fix it").request()
    assert chunks(service, request, after(5)) == []
    generation = generate(service, request)
    assert 0 < generation.stats.cached_tokens < generation.stats.prompt_tokens
    assert generation.stats.cached_tokens % 16 == 0


def test_what_was_sampled_before_a_cancel_can_be_continued(load: Load) -> None:
    service = load()
    agent = converse(service, Agent("fix it"), 1)
    got = chunks(service, agent.request(), after(5))
    ids = tuple(token for chunk in got for token in chunk.token_ids)
    text = "".join(d.text for c in got for d in c.deltas if isinstance(d, TextDelta))
    assert ids
    answer = [Message("assistant", text), Message("tool", "stopped by the user")]
    request = replace(agent.request(), messages=(*agent.messages, *answer))
    generation = generate(service, request)
    assert generation.stats.replayed[-1] == "generated"
    assert generation.stats.prefilled_tokens == generation.stats.new_tokens + 1


def test_a_closed_iterator_releases_its_session(load: Load) -> None:
    service = load()
    agent = Agent("fix it")
    events = service.run(agent.request(), time.perf_counter(), never)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert [session.is_busy for session in service.model.sessions.sessions()] == [False]
    assert generate(service, agent.request()).stats.prefilled_tokens == 1


@pytest.mark.parametrize("step", [0, 1, 3, 6, 9])
def test_a_failure_in_a_forward_leaves_the_session_usable(
    load: Load, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    expected = generate(load(), Agent("fix it").request())
    service = load()
    target = service.model.target
    forward, calls = target.forward, [0]

    def failing(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)  # type: ignore[arg-type]
        calls[0] += 1
        if calls[0] == step + 1:
            raise RuntimeError("the device fell off the bus")
        return output

    monkeypatch.setattr(target, "forward", failing)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        chunks(service, Agent("fix it").request())
    generation = generate(service, Agent("fix it").request())
    assert generation.token_ids == expected.token_ids
    assert generation.prompt_token_ids == expected.prompt_token_ids


@pytest.mark.parametrize(
    ("raised", "expected", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), CapacityError, "max_kv_bytes"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), CapacityError, "max_kv_bytes"),
        (MemoryError(), CapacityError, "max_kv_bytes"),
        (FloatingPointError("the largest logit is nan"), ConfigurationError, "get the checkpoint"),
    ],
)
def test_errors_of_the_device_become_ours(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception,
    expected: type[Exception],
    advice: str,
) -> None:
    service = load()

    def failing(*args: object, **kwargs: object) -> object:
        raise raised

    monkeypatch.setattr(service.model.target, "forward", failing)
    with pytest.raises(expected, match=advice):
        chunks(service, Agent("fix it").request())


def test_a_full_pool_evicts_idle_sessions_and_then_refuses(load: Load) -> None:
    service = load(max_kv_bytes=4 * 256 * 2 * 2 * 2 * 16 * 8)  # four pages
    for number in range(6):
        generate(service, Agent(f"fix {number} " + "x" * 300).request(max_tokens=4))
    assert 1 <= len(service.model.sessions) <= 4
    assert service.info.max_context == 4 * 256
    with pytest.raises(ContextLengthExceededError, match="or raise max_kv_bytes"):
        generate(service, Agent("y" * 900).request(max_tokens=100))


def test_a_context_that_the_config_limits_can_be_raised_there(load: Load) -> None:
    with pytest.raises(ContextLengthExceededError, match="or raise max_context"):
        generate(load(max_context=64), Agent("y" * 100).request(max_tokens=1))
    generate(load(max_context=512), Agent("y" * 100).request(max_tokens=1))


def test_growing_over_a_page_evicts_an_idle_session(load: Load) -> None:
    service = load(max_kv_bytes=3 * 256 * 2 * 2 * 2 * 16 * 8)
    generate(service, Agent("a", system="").request(max_tokens=2))
    agent = Agent("b" * 80, system="other")
    prompt = generate(service, agent.request(max_tokens=1)).stats.prompt_tokens
    room = 2 * 256 - prompt + 5
    stop = SamplingParams(temperature=0.0, max_tokens=room)
    long = replace(agent.request(), sampling=stop, tools=(READ_FILE,))
    assert generate(service, long).stats.completion_tokens > 0


def test_deltas_and_ids_of_the_stream_are_the_answer(load: Load) -> None:
    service = load()
    for seed in range(4):
        request = replace(Agent("fix it").request(), sampling=sampled(seed))
        got = chunks(service, request)
        generation = got[-1].generation
        assert generation is not None
        assert [c.finish_reason for c in got[:-1]] == [None] * (len(got) - 1)
        assert tuple(i for c in got for i in c.token_ids) == generation.token_ids
        deltas = [d for c in got for d in c.deltas]
        text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
        assert text == generation.message.content
        names = [d.name for d in deltas if isinstance(d, ToolCallDelta) and d.name]
        assert names == [call.name for call in generation.message.tool_calls]


def test_length_wins_and_is_reported(load: Load) -> None:
    service = load()
    generation = generate(service, Agent("fix it").request(max_tokens=2))
    assert generation.finish_reason == "length"
    assert len(generation.token_ids) == 2


def test_max_tokens_defaults_to_the_rest_of_the_context(load: Load) -> None:
    service = load(max_context=300)
    request = ChatRequest((Message("user", "hi"),), sampling=SamplingParams(temperature=0.0))
    generation = generate(service, request)
    stats = generation.stats
    assert stats.sampling["max_tokens"] == 300 - stats.prompt_tokens
    assert stats.prompt_tokens + stats.completion_tokens <= 300


def test_unset_sampling_comes_from_the_checkpoint_and_the_seed_is_reported(load: Load) -> None:
    service = load()
    request = ChatRequest((Message("user", "hi"),), sampling=SamplingParams(max_tokens=8))
    stats = generate(service, request).stats
    assert stats.sampling["temperature"] == 0.0
    first = generate(service, replace(request, sampling=SamplingParams(1.0, max_tokens=8)))
    assert first.stats.seed != stats.seed
    again = SamplingParams(1.0, max_tokens=8, seed=first.stats.seed)
    assert generate(service, replace(request, sampling=again)).token_ids == first.token_ids


def test_the_same_request_with_another_choice_differs(load: Load) -> None:
    service = load()
    params = [replace(sampled(7), choice_index=index) for index in range(3)]
    request = Agent("fix it").request()
    answers = {generate(service, replace(request, sampling=p)).token_ids for p in params}
    assert len(answers) == 3


def test_a_hint_finds_the_session_of_a_thread(load: Load) -> None:
    service = load()
    agent = converse(service, Agent("fix it", hint="thread-1", edit=respaced), 3)
    assert [turn.stats.origin for turn in agent.turns] == ["cold", "hint", "hint"]
    wrong = Agent("something else", hint="thread-1")
    alone = generate(load(), Agent("something else").request())
    assert generate(service, wrong.request()).token_ids == alone.token_ids


def test_a_tool_call_id_finds_its_session(load: Load) -> None:
    agent = converse(load(), Agent("fix it"), 4)
    with_calls = [
        after.stats.origin
        for before, after in zip(agent.turns, agent.turns[1:], strict=False)
        if before.message.tool_calls
    ]
    assert with_calls
    assert set(with_calls) == {"tool_call"}


def test_the_first_message_that_differs_is_named(load: Load) -> None:
    service = load()
    agent = converse(service, Agent("fix it"), 2)
    edited = replace(agent.messages[3], content="another result")
    messages = (*agent.messages[:3], edited, *agent.messages[4:])
    stats = generate(service, replace(agent.request(), messages=messages)).stats
    assert stats.diverged_message == 3
    assert stats.replayed == ("generated", "rendered")


@pytest.mark.parametrize(
    ("request_", "error", "advice"),
    [
        (ChatRequest(()), RequestError, "at least one message"),
        (
            ChatRequest((Message("user", "hi"),), stop=("END", "")),
            UnsupportedParameterError,
            "at least one character",
        ),
        (ChatRequest((Message("user", "hi"),), num_choices=0), RequestError, "at least 1"),
        (
            ChatRequest(
                (Message("user", "hi"),), sampling=SamplingParams(logit_bias={VOCAB_SIZE: 1})
            ),
            UnsupportedParameterError,
            "logit_bias has 288, but ids are in",
        ),
        (
            ChatRequest(
                (Message("user", "hi"),), sampling=SamplingParams(stop_token_ids=(VOCAB_SIZE,))
            ),
            UnsupportedParameterError,
            "tokenizer",
        ),
        (
            ChatRequest((Message("user", "hi"),), tools=(READ_FILE, READ_FILE)),
            RequestError,
            "its own name",
        ),
        (
            ChatRequest((Message("user", "hi"),), template_kwargs={"messages": []}),
            UnsupportedParameterError,
            "messages",
        ),
        (
            ChatRequest((Message("user", "hi"),), sampling=SamplingParams(max_tokens=10_000)),
            ContextLengthExceededError,
            "or use a checkpoint with a longer context",
        ),
        (ChatRequest((Message("user", "hi" * 3000),)), ContextLengthExceededError, "shorten"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_advice(
    load: Load, request_: ChatRequest, error: type[Exception], advice: str
) -> None:
    service = load()
    with pytest.raises(error, match=advice):
        chunks(service, request_)
    assert service.model.target.rows_computed == 0


def test_stop_token_ids_end_the_turn(load: Load) -> None:
    service = load()
    request = Agent("fix it").request()
    free = generate(service, request)
    stop = free.token_ids[2]
    params = replace(request.sampling, stop_token_ids=(stop,))
    cut = generate(service, replace(request, sampling=params))
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_one_line_per_turn_has_the_figures(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    service = load()
    with caplog.at_level(logging.INFO, logger="dlite_agent.engine.turn"):
        stats = generate(service, Agent("fix it").request()).stats
        chunks(service, Agent("other").request(), after(8))
    done, cancelled = (record.getMessage() for record in caplog.records)
    assert done.startswith(f"turn session={stats.session_id} origin=cold ")
    assert f" prompt={stats.prompt_tokens} cached=0 prefill={stats.prompt_tokens} " in done
    assert cancelled.endswith("finish=cancelled")
    assert "fix it" not in done


def test_times_add_up(load: Load) -> None:
    service = load()
    stats = generate(service, Agent("fix it").request()).stats
    parts = stats.queue_s + stats.render_s + stats.prefill_s + stats.decode_s
    assert 0 < parts <= stats.total_s
    assert stats.queue_s + stats.render_s + stats.prefill_s <= stats.ttft_s <= stats.total_s
    assert stats.model_s == stats.prefill_s + stats.decode_s


@pytest.mark.parametrize("reuse", ["session", "prefix", "none"])
def test_the_drafter_changes_no_token(load: Load, reuse: ReusePolicy) -> None:
    plain = converse(load(drafter="null", reuse=reuse), Agent("fix it"), 3)
    drafted = converse(load(drafter="lookup", reuse=reuse), Agent("fix it"), 3)
    assert [t.token_ids for t in plain.turns] == [t.token_ids for t in drafted.turns]
    assert sum(t.stats.drafted_tokens for t in plain.turns) == 0
