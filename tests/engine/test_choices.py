"""Several answers to one request: each as if it ran alone, over one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent import Engine
from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.choices import split_choices
from dlite_agent.errors import CapacityError, RequestError
from tests.tiny_checkpoint import write_checkpoint

SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=7, max_tokens=24)
REQUEST = ChatRequest((Message("user", "Look at it closely. " * 12),), sampling=SAMPLING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture(params=[1, 16], ids=["one after the other", "together"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    config = EngineConfig(
        str(folder),
        dtype="float64",
        max_kv_bytes=64 * 2**20,
        prefill_chunk=64,
        max_batch=request.param,
        max_queue=6,
    )
    with Engine(config) as engine:
        yield engine


def test_each_choice_is_what_it_would_be_alone(engine: Engine) -> None:
    choices = engine.generate_choices(replace(REQUEST, num_choices=4))
    assert len({choice.token_ids for choice in choices}) == 4
    for index, choice in enumerate(choices):
        alone = replace(REQUEST, sampling=replace(SAMPLING, choice_index=index))
        assert engine.generate(alone).token_ids == choice.token_ids
    assert {choice.stats.seed for choice in choices} == {7}


def test_the_prompt_is_prefilled_once_and_every_answer_keeps_its_session(engine: Engine) -> None:
    engine.load()
    choices = engine.generate_choices(replace(REQUEST, num_choices=4))
    num_prompt = choices[0].stats.prompt_tokens
    assert num_prompt > 200
    # a fork computes the last token of its prompt again
    assert sum(choice.stats.prefilled_tokens for choice in choices) == num_prompt + 3
    assert len({choice.stats.session_id for choice in choices}) == 4
    for choice in choices:
        messages = (*REQUEST.messages, choice.message, Message("user", "Go on."))
        again = replace(REQUEST, messages=messages, history="as_generated")
        stats = engine.generate(again).stats
        assert stats.prefilled_tokens <= stats.new_tokens + 1


def test_chunks_say_which_choice_they_belong_to(engine: Engine) -> None:
    chunks = list(engine.stream(replace(REQUEST, num_choices=3)))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choice_index == index]
        generation = own[-1].generation
        assert generation is not None
        assert [i for chunk in own for i in chunk.token_ids] == list(generation.token_ids)
        assert all(chunk.generation is None for chunk in own[:-1])


async def test_choices_in_asyncio_are_the_same(engine: Engine) -> None:
    request = replace(REQUEST, num_choices=3)
    choices = await engine.agenerate_choices(request)
    expected = engine.generate_choices(request)
    assert [choice.token_ids for choice in choices] == [choice.token_ids for choice in expected]
    assert (await engine.agenerate(request)).token_ids == expected[0].token_ids
    assert engine.generate(request).token_ids == expected[0].token_ids


def test_greedy_choices_are_equal(engine: Engine) -> None:
    greedy = replace(REQUEST, sampling=replace(SAMPLING, temperature=0.0), num_choices=3)
    assert len({choice.token_ids for choice in engine.generate_choices(greedy)}) == 1


def test_choices_without_a_seed_share_a_fresh_one(engine: Engine) -> None:
    request = replace(REQUEST, sampling=replace(SAMPLING, seed=None), num_choices=2)
    seeds = [{c.stats.seed for c in engine.generate_choices(request)} for _ in range(2)]
    assert [len(of_a_call) for of_a_call in seeds] == [1, 1]
    assert seeds[0] != seeds[1]


def test_a_closed_stream_cancels_every_choice(engine: Engine) -> None:
    stream = engine.stream(replace(REQUEST, num_choices=3))
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert engine.generate(REQUEST).token_ids


def test_more_choices_than_the_queue_holds_are_refused_together(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="max_queue"):
        engine.generate_choices(replace(REQUEST, num_choices=60))
    assert engine.generate(REQUEST).token_ids


@pytest.mark.parametrize("count", [0, -1, 129])
def test_a_wrong_number_of_choices_is_refused(count: int) -> None:
    with pytest.raises(RequestError, match=f"num_choices is {count}; ask for 1 to 128"):
        split_choices(replace(REQUEST, num_choices=count))


def test_a_request_that_is_still_growing_has_no_answer(engine: Engine) -> None:
    with pytest.raises(RequestError, match="is_partial=True has no answer"):
        engine.generate(replace(REQUEST, is_partial=True))
