"""Sampling options, several answers, log-probabilities and large batches of ChatDLite."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration

from dlite_agent import (
    ChatDLite,
    ConfigurationError,
    Engine,
    UnsupportedParameterError,
)
from dlite_agent.chat.messages import Message
from dlite_agent.config import SamplingParams
from dlite_agent.testing import ScriptedEngine
from tests.tiny_checkpoint import write_checkpoint


def chat(*turns: str, **options: Any) -> ChatDLite:
    return ChatDLite(engine=ScriptedEngine(turns), **options)


def request_of(model: ChatDLite) -> Any:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine.requests[-1]


def joined(chunks: Iterator[AIMessageChunk]) -> AIMessageChunk:
    first, *others = chunks
    for chunk in others:
        first += chunk
    return first


def test_every_sampling_option_reaches_the_engine_from_model_and_call() -> None:
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "max_tokens": 9,
        "seed": 4,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100},
        "logprobs": True,
        "top_logprobs": 2,
        "thinking_budget": 3,
    }
    wanted = SamplingParams(**{**options, "logit_bias": {7: -100.0}})
    model = chat("a", **options)
    model.invoke("?")
    assert request_of(model).sampling == wanted
    bare = chat("a")
    bare.invoke("?", **options)
    assert request_of(bare).sampling == wanted
    assert request_of(bare).when_full == "wait"


@pytest.mark.parametrize("stop", ["END", ["END"], ["never", "END"]])
def test_stop_strings_end_the_answer_and_are_named(stop: Any) -> None:
    for model in (chat("One END two", "One END two", stop=stop), chat(*["One END two"] * 2)):
        given = {} if model.stop else {"stop": stop}
        answer = model.invoke("?", **given)
        assert answer.content == "One "
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.response_metadata["dlite"]["matched_stop"] == "END"
        streamed = joined(model.stream("?", **given))
        assert streamed.content == "One "
        assert streamed.response_metadata["dlite"]["matched_stop"] == "END"


def test_stop_strings_of_a_call_take_the_place_of_the_models() -> None:
    model = chat("One END two", "One END two", stop=["One"])
    assert model.invoke("?", stop=["END"]).content == "One "
    assert model.invoke("?", stop=[]).content == "One END two"


def test_several_answers_are_several_generations() -> None:
    model = chat("one", "two", "three", n=3)
    result = model.generate([[HumanMessage("?")]])
    assert [generation.text for generation in result.generations[0]] == ["one", "two", "three"]
    for generation in result.generations[0]:
        assert isinstance(generation, ChatGeneration)
        assert isinstance(generation.message, AIMessage)
        assert generation.message.usage_metadata is not None
    assert chat("one", "two").invoke("?", n=2).content == "one"


async def test_several_answers_are_several_generations_in_asyncio() -> None:
    result = await chat("one", "two").agenerate([[HumanMessage("?")]], n=2)
    assert [generation.text for generation in result.generations[0]] == ["one", "two"]


def test_a_stream_of_several_answers_is_refused() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"n=2 cannot be streamed.*use generate"):
        list(chat("one", "two", n=2).stream("?"))
    with pytest.raises(UnsupportedParameterError, match="n=2 cannot be streamed"):
        chat("one", "two", n=2, streaming=True).invoke("?")


def test_a_callback_that_likes_streams_gets_none_of_several_answers() -> None:
    from langchain_core.tracers.log_stream import LogStreamCallbackHandler

    handler: BaseCallbackHandler = LogStreamCallbackHandler()
    answer = chat("one", "two", n=2).invoke("?", config={"callbacks": [handler]})
    assert answer.content == "one"


def test_logprobs_are_in_openais_form_streamed_or_not() -> None:
    model = chat("é.", "é.")
    answer = model.invoke("?", logprobs=True)
    content = answer.response_metadata["logprobs"]["content"]
    assert content[0] == {"token": "\ufffd", "bytes": [0xC3], "logprob": 0.0, "top_logprobs": []}
    assert content[2]["token"] == "."
    streamed = joined(model.stream("?", logprobs=True))
    assert streamed.response_metadata["logprobs"]["content"] == content
    assert streamed.content == "é."
    assert "logprobs" not in chat("a").invoke("?").response_metadata


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"presence_penalty": 3.0}, r"presence_penalty is 3.0; use a number in \[-2, 2\]"),
        ({"top_logprobs": 3}, "top_logprobs is 3; use it with logprobs=True"),
        ({"logit_bias": {7: 200}}, r"logit_bias\[7\] is 200"),
        ({"max_queue": 0}, "max_queue is 0"),
    ],
)
def test_a_wrong_option_is_named_when_the_model_is_made(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChatDLite("nano", **options)


def test_a_wrong_number_of_answers_is_named_when_the_model_is_made() -> None:
    with pytest.raises(UnsupportedParameterError, match="n is 129"):
        ChatDLite("nano", n=129)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    models: list[ChatDLite] = []

    def maker(**options: Any) -> ChatDLite:
        common = {"dtype": "float64", "max_kv_bytes": 64 * 2**20, "max_tokens": 3}
        models.append(ChatDLite(str(folder), **{**common, **options}))
        return models[-1]

    yield maker
    for model in models:
        Engine.shared(model._engine_config(model.model)).close()


async def test_a_batch_larger_than_the_queue_is_no_error(make: Any) -> None:
    model = make(temperature=0, max_batch=2, max_queue=3)
    questions = [f"Number {number}?" for number in range(12)]
    answers = await model.abatch(questions)
    assert len(answers) == 12
    together = await asyncio.gather(*(model.ainvoke(question) for question in questions))
    assert [a.content for a in together] == [a.content for a in answers]
    config = {"max_concurrency": 12}
    threaded = await asyncio.to_thread(model.batch, questions, config)
    assert [a.content for a in threaded] == [a.content for a in answers]


async def test_an_abandoned_stream_holds_up_nobody(make: Any) -> None:
    model = make(temperature=0, max_batch=1, max_queue=1)
    unread = model.astream("Look.")
    await unread.__anext__()
    assert (await asyncio.wait_for(model.ainvoke("Look."), 20)).content
    await unread.aclose()


def test_answers_differ_and_are_those_of_a_seed(make: Any) -> None:
    model: BaseChatModel = make(temperature=1.0, top_k=0, top_p=1.0, seed=5, max_tokens=12)
    result = model.generate([[HumanMessage("Look at it, " * 20)]], n=3)
    texts = [generation.text for generation in result.generations[0]]
    assert len(set(texts)) == 3
    again = model.generate([[HumanMessage("Look at it, " * 20)]], n=3)
    assert [generation.text for generation in again.generations[0]] == texts


@pytest.mark.parametrize(
    "alias",
    [
        {"reasoning": False},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ],
)
def test_other_names_of_thinking_are_understood(alias: dict[str, Any]) -> None:
    for model, options in [
        (ChatDLite("scripted", engine=ScriptedEngine(["a"]), **alias), {}),
        (ChatDLite("scripted", engine=ScriptedEngine(["a"])), alias),
    ]:
        model.invoke("?", **options)
        assert isinstance(model.engine, ScriptedEngine)
        assert model.engine.requests[0].template_kwargs == {"enable_thinking": False}
    assert ChatDLite(max_model_len=512).max_context == 512


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"guided_json": {}}},
        {"extra_body": {"chat_template_kwargs": {"style": 1}}},
        {"reasoning": True, "enable_thinking": False},
    ],
)
def test_other_names_that_say_more_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameterError):
        ChatDLite(**options)


async def test_the_thread_of_a_direct_call_is_its_hint() -> None:
    model = ChatDLite("scripted", engine=ScriptedEngine(["a"] * 5))
    config: Any = {"configurable": {"thread_id": "fix-7"}}
    model.invoke("?", config)
    list(model.stream("?", config))
    await model.ainvoke("?", config)
    _ = [chunk async for chunk in model.astream("?", config)]
    model.invoke("?", config, session_id="mine")
    assert isinstance(model.engine, ScriptedEngine)
    hints = [request.session_hint for request in model.engine.requests]
    assert hints == ["fix-7"] * 4 + ["mine"]


def test_a_session_of_the_model_forks() -> None:
    model = ChatDLite("scripted", engine=ScriptedEngine(["a", "b", "c"]), enable_thinking=False)
    session = model.session("main", tools=[{"name": "f", "description": "", "parameters": {}}])
    assert session.turn(Message("user", "?")).message.content == "a"
    other = session.fork("side")
    assert other.turn(Message("user", "!")).message.content == "b"
    assert len(session.messages) == 2
    assert isinstance(model.engine, ScriptedEngine)
    first, second = model.engine.requests
    assert (first.session_hint, second.session_hint) == ("main", "side")
    assert (first.tools[0].name, dict(first.template_kwargs)) == ("f", {"enable_thinking": False})
