"""`/v1/completions` in front of an engine: prompts, echo, log-probabilities, and its streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, CompletionChoice

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.client.remote_engine import RemoteEngine
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.engine import Engine
from tests.serving.chunk_rules import events
from tests.serving.live_server import LIMIT_S, LiveServer, live_server
from tests.tiny_checkpoint import write_checkpoint

HI = [{"role": "user", "content": "Hi there."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=1024)
    with Engine(EngineConfig(str(folder), dtype="float64", idle=False)) as engine:
        engine.load()
        with live_server(engine) as running:
            yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=LIMIT_S, verify=False) as client:
        yield client


@pytest.fixture
def ai(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.base_url, api_key="none", _strict_response_validation=True, max_retries=0
    ) as client:
        yield client


def asked(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/completions", json={"seed": 2, "max_tokens": 6, **fields})
    assert answer.is_success, answer.text
    return answer.json()


def texts(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def test_a_completion_of_a_chats_ids_is_the_chats_answer(http: httpx.Client) -> None:
    body = {"messages": HI, "seed": 1, "max_tokens": 8, "return_token_ids": True}
    said = http.post("/chat/completions", json=body).json()
    ids = said["prompt_token_ids"]
    fields = {"seed": 1, "max_tokens": 8, "logprobs": 2, "return_token_ids": True}
    answer = asked(http, prompt=ids, **fields)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == said["choices"][0]["token_ids"]
    assert choice["prompt_token_ids"] == ids
    assert choice["dlite"]["prompt_tokens"] == len(ids)
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


def test_several_prompts_have_their_choices_one_after_the_other(ai: openai.OpenAI) -> None:
    options: Any = {"model": ai.models.list().data[0].id, "seed": 3, "max_tokens": 6, "n": 2}
    alone = [ai.completions.create(prompt=prompt, **options) for prompt in ("Once", "Then")]
    both = ai.completions.create(prompt=["Once", "Then"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    expected = [choice.text for one in alone for choice in one.choices]
    assert [choice.text for choice in both.choices] == expected
    assert both.usage is not None
    figures = [one.usage for one in alone]
    assert both.usage.prompt_tokens == sum(usage.prompt_tokens for usage in figures if usage)
    assert both.usage.completion_tokens == sum(u.completion_tokens for u in figures if u)
    ids = [list(b"Once"), list(b"Then")]
    assert [choice.text for choice in ai.completions.create(prompt=ids, **options).choices] == (
        expected
    )


def test_an_echo_is_the_prompt_in_front_of_each_answer(http: httpx.Client) -> None:
    plain = texts(asked(http, prompt=["Once", "Then"], n=2))
    echoed = texts(asked(http, prompt=["Once", "Then"], n=2, echo=True))
    fronts = ["Once", "Once", "Then", "Then"]
    assert echoed == [front + text for front, text in zip(fronts, plain, strict=True)]
    assert texts(asked(http, prompt=[list(b"Once"), list(b"Then")], n=2, echo=True)) == echoed
    told = streamed(http, prompt=["Once", "Then"], n=2, echo=True)
    assert told[0] == echoed


def streamed(http: httpx.Client, **fields: Any) -> tuple[list[str], Any]:
    """The choices of a stream, put together, and its usage; checks every chunk."""
    body = {"seed": 2, "max_tokens": 6, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    *data, done = events(http.post("/completions", json=body).text)
    assert done == "[DONE]"
    *chunks, last = [json.loads(item) for item in data]
    Completion.model_validate(last, strict=True)
    assert last["choices"] == []
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    told: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        assert chunk["usage"] is None
        (choice,) = chunk.pop("choices")
        Completion.model_validate({**chunk, "choices": []}, strict=True)
        assert choice["index"] not in ended
        if choice["finish_reason"] is None:  # OpenAI sends null as well, which its type forgot
            CompletionChoice.model_validate({**choice, "finish_reason": "stop"}, strict=True)
        else:
            CompletionChoice.model_validate(choice, strict=True)
            ended.add(choice["index"])
        told[choice["index"]] = told.get(choice["index"], "") + choice["text"]
    assert ended == set(told)
    return [told[index] for index in sorted(told)], last["usage"]


def test_a_stream_of_several_prompts_says_the_same(http: httpx.Client) -> None:
    fields: Any = {"prompt": ["Once", "Then", "Now"], "n": 2, "logprobs": 1}
    whole = asked(http, **fields)
    told, usage = streamed(http, **fields)
    assert told == texts(whole)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name]


def test_the_openai_package_reads_a_stream(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="a") as ai:
        options: Any = {"model": server.backend.model_name, "prompt": "Once", "max_tokens": 6}
        options |= {"seed": 2, "n": 2}
        whole = ai.completions.create(**options)
        stream = list(ai.completions.create(**options, stream=True))
    for choice in whole.choices:
        parts = [part for chunk in stream for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts][-1] == choice.finish_reason


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "a", "suffix": "b"}, "suffix is 'b'"),
        ({"prompt": "a", "n": 1, "best_of": 2}, "best_of is 2"),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "logprobs is 0 with echo"),
        ({"prompt": ["a"] * 1025, "n": 2}, "at most 2048 answers"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [1, 100_000]}, "100000"),
        ({"prompt": [[1, -1]]}, "-1"),
        ({"prompt": "a", "max_tokens": 5000}, "is longer than the model's context length"),
        ({"prompt": "a", "logprobs": 21}, "less than or equal to 20"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_that_cannot_be_continued_are_refused(
    http: httpx.Client, body: Any, words: str, stream: bool
) -> None:
    answer = http.post("/completions", json={**body, "stream": stream})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_tokens_are_sixteen_unless_null_asks_for_all(http: httpx.Client) -> None:
    fields = {"prompt": [5] * 1000, "logit_bias": {"7": 100}, "seed": 0}
    for body, count in (({}, 16), ({"max_tokens": None}, 24), ({"max_tokens": 3}, 3)):
        answer = http.post("/completions", json={**fields, **body}).json()
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["Once", tuple(b"Once"), None])
async def test_a_remote_engine_gives_ids_and_log_probabilities_as_the_engine_here(
    server: LiveServer, prompt: str | tuple[int, ...] | None
) -> None:
    assert isinstance(server.backend, Engine)
    sampling = SamplingParams(seed=5, max_tokens=9, logprobs=True, top_logprobs=3, choice_index=2)
    messages = () if prompt else (Message("user", "Hi there."),)
    request = ChatRequest(messages, prompt=prompt, sampling=sampling, num_choices=2)
    here = server.backend.generate_choices(request)
    with RemoteEngine(server.url) as engine:
        there = [engine.generate_choices(request), await engine.agenerate_choices(request)]
        unbounded = replace(request, sampling=replace(sampling, max_tokens=None), num_choices=1)
        unbounded = replace(unbounded, stop=("never",))
        chunks = engine.stream(unbounded)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]  # a generator
    assert all(token.top[0].token_id >= 0 for token in here[0].logprobs)
    for answers in there:
        for mine, yours in zip(here, answers, strict=True):
            assert yours.message.content == mine.message.content
            assert yours.token_ids == mine.token_ids
            assert yours.prompt_token_ids == mine.prompt_token_ids
            assert yours.logprobs == mine.logprobs
            assert yours.finish_reason == mine.finish_reason


def test_a_partial_prompt_is_prefilled_over_http(server: LiveServer) -> None:
    prompt = tuple(b"A prompt that still grows: ") * 4
    request = ChatRequest((), prompt=prompt, tenant="alone", is_partial=True)
    with RemoteEngine(server.url) as engine:
        assert list(engine.stream(request)) == []
        whole = replace(request, prompt=(*prompt, 65), is_partial=False)
        stats = engine.generate(replace(whole, sampling=SamplingParams(max_tokens=2))).stats
    assert stats.cached_tokens >= len(prompt) - 1
