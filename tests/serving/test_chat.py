"""Chats with the openai package, which judges every answer, and the form of every event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.config import SamplingParams
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ByteTokenizer, ScriptedEngine
from tests.serving.chunk_rules import checked, events
from tests.serving.live_server import LiveServer, live_server

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("read", "test")
]
NO_USAGE: Any = {"includes_usage": False}
TWO_CALLS = (
    "<think>\nHm.\n</think>\n\nI look: é\u2028."
    '<tool_call>\n{"name": "read", "arguments": {"path": "é.py"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "test", "arguments": {}}\n</tool_call>'
)


def say(request: ChatRequest) -> str:
    """What the last message asks for: itself, or calls behind any question for them."""
    return TWO_CALLS if request.tools and request.messages[-1].role == "user" else "Done."


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine([say] * 100)) as running:
        yield running


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.base_url, api_key="none", _strict_response_validation=True, max_retries=0
    )


def last_request(server: LiveServer) -> ChatRequest:
    assert isinstance(server.backend, ScriptedEngine)
    return server.backend.requests[-1]


def test_a_conversation_with_calls_is_what_the_client_sends_back(server: LiveServer) -> None:
    with client(server) as ai:
        asked = ai.chat.completions.create(model="scripted", messages=HI, tools=TOOLS)
        message = asked.choices[0].message
        assert asked.choices[0].finish_reason == "tool_calls"
        assert message.content == "I look: é\u2028."
        assert message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert message.tool_calls is not None
        names = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert names == [("read", '{"path": "é.py"}'), ("test", "{}")]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.id}
            for call in reversed(message.tool_calls)
        ]
        told = ai.chat.completions.create(
            model="scripted", messages=[*HI, message, *results], tools=TOOLS
        )
    assert told.choices[0].message.content == "Done."
    sent = last_request(server).messages
    assert sent[1].reasoning == "Hm."
    assert [m.tool_call_id for m in sent[2:]] == [call.id for call in message.tool_calls]
    usage = told.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens


def test_a_stream_says_the_same_as_an_answer(server: LiveServer) -> None:
    body = {"model": "scripted", "messages": HI, "tools": TOOLS}
    whole = httpx.post(f"{server.base_url}/chat/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = httpx.post(f"{server.base_url}/chat/completions", json=body | options)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.text.isascii()  # clients split lines at U+2028
    (told,), usage = checked(streamed.text, includes_usage=True)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert told.finish_reason == choice["finish_reason"]
    assert (told.content, told.reasoning) == (message["content"], message["reasoning_content"])
    assert [(c["name"], c["arguments"]) for c in told.calls] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]
    ]
    assert usage is not None
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("includes_usage", [False, True])
def test_choices_stream_beside_each_other(server: LiveServer, includes_usage: bool) -> None:
    body = {
        "messages": HI,
        "n": 2,
        "logprobs": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": includes_usage},
    }
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body).text
    told, _ = checked(answer, includes_usage=includes_usage)
    assert [choice.content for choice in told] == ["Done.", "Done."]
    sent = [json.loads(item) for item in events(answer)[:-1]]
    pieces = [choice for chunk in sent for choice in chunk["choices"]]
    ids = [i for piece in pieces for i in piece.get("token_ids", ()) if piece["index"] == 1]
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] and piece["index"] == 1]
    entries = [entry for item in logprobs for entry in item["content"]]
    assert bytes(ids[:5]) == b"Done."
    assert len(entries) == len(ids)
    assert [entry["bytes"] for entry in entries[:5]] == [[byte] for byte in b"Done."]


def test_choices_that_call_count_their_calls_apart(server: LiveServer) -> None:
    body = {"messages": HI, "tools": TOOLS, "n": 2, "stream": True}
    told, _ = checked(
        httpx.post(f"{server.base_url}/chat/completions", json=body).text, includes_usage=False
    )
    for choice in told:  # `checked` has each choice's calls begin at 0
        assert [call["name"] for call in choice.calls] == ["read", "test"]
        assert choice.finish_reason == "tool_calls"
    assert len({call["id"] for choice in told for call in choice.calls}) == 4


def test_each_choice_of_a_stream_counts_its_own_calls(server: LiveServer) -> None:
    body = {"messages": HI, "tools": TOOLS, "n": 2}
    url = f"{server.base_url}/chat/completions"
    told, _ = checked(httpx.post(url, json={**body, "stream": True}).text, includes_usage=False)
    whole = httpx.post(url, json=body).json()["choices"]
    for choices in (
        [(choice.finish_reason, choice.calls) for choice in told],
        [(choice["finish_reason"], choice["message"]["tool_calls"]) for choice in whole],
    ):
        assert [reason for reason, _ in choices] == ["tool_calls"] * 2
        assert [len(calls) for _, calls in choices] == [2, 2]
        assert len({call["id"] for _, calls in choices for call in calls}) == 4


def test_an_answer_that_was_cut_in_a_call_has_no_call_and_says_so() -> None:
    cut = TWO_CALLS.index('"test"')
    num_tokens = len(ByteTokenizer().encode_template(TWO_CALLS[:cut]))
    body = {"messages": HI, "tools": TOOLS, "max_tokens": num_tokens}
    with live_server(ScriptedEngine([TWO_CALLS] * 2)) as server:
        url = f"{server.base_url}/chat/completions"
        (choice,) = httpx.post(url, json=body).json()["choices"]
        (told,), _ = checked(httpx.post(url, json={**body, "stream": True}).text, **NO_USAGE)
    assert choice["finish_reason"] == told.finish_reason == "length"
    assert [c["function"]["name"] for c in choice["message"].get("tool_calls", ())] == ["read"]


async def test_the_async_client_reads_events_and_answers_at_once(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", _strict_response_validation=True
    ) as ai:
        whole, stream = await asyncio.gather(
            ai.chat.completions.create(model="scripted", messages=HI, n=2),
            ai.chat.completions.create(model="scripted", messages=HI, stream=True),
        )
        assert [choice.message.content for choice in whole.choices] == ["Done.", "Done."]
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Done."
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_fields_mean_what_they_mean_elsewhere(server: LiveServer) -> None:
    with client(server) as ai:
        ai.chat.completions.create(
            model="scripted",
            messages=[{"role": "developer", "content": [{"type": "text", "text": "Be."}]}, *HI],
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "test"}},
            parallel_tool_calls=False,
            response_format={"type": "json_object"},
            max_completion_tokens=7,
            max_tokens=9,
            temperature=0.5,
            seed=3,
            stop=["x", "y"],
            reasoning_effort="none",
            metadata={"session_id": "from metadata"},
            store=True,
            extra_body={"top_k": 4, "min_p": 0.1, "an_unknown_field": {"any": "thing"}},
        )
    request = last_request(server)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.output.tool_choice.names == ("test",)
    assert not request.output.parallel_tool_calls
    assert request.output.answer is not None
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 3)
    assert (sampling.top_k, sampling.min_p) == (4, 0.1)
    assert request.stop == ("x", "y")
    assert request.template_kwargs == {"enable_thinking": False}
    assert request.session_hint == "from metadata"


@pytest.mark.parametrize(
    ("headers", "fields", "hint"),
    [
        ({}, {}, None),
        ({}, {"metadata": {"session_id": "c"}}, "c"),
        ({}, {"prompt_cache_key": "b", "metadata": {"session_id": "c"}}, "b"),
        ({}, {"session_id": "a", "prompt_cache_key": "b"}, "a"),
        ({"Session_id": "9"}, {"session_id": "a"}, "9"),
        ({"x-opencode-session": "8", "Session_id": "9"}, {}, "8"),
        ({"x-session-affinity": "7", "x-opencode-session": "8"}, {}, "7"),
        ({"x-litellm-session-id": "6", "x-session-affinity": "7"}, {}, "6"),
        ({"X-Session-ID": "5", "x-litellm-session-id": "6"}, {}, "5"),
        ({"X-DLite-Session": "4", "X-Session-ID": "5"}, {"session_id": "a"}, "4"),
    ],
)
def test_the_first_name_of_a_session_counts(
    server: LiveServer, headers: dict[str, str], fields: dict[str, Any], hint: str | None
) -> None:
    url = f"{server.base_url}/chat/completions"
    assert httpx.post(url, json={"messages": HI, **fields}, headers=headers).is_success
    assert last_request(server).session_hint == hint


def test_the_model_is_listed_with_its_context(server: LiveServer) -> None:
    with client(server) as ai:
        (listed,) = ai.models.list().data
        assert ai.models.retrieve("scripted") == listed
    described = listed.model_dump()
    assert described["id"] == "scripted"
    assert described["max_model_len"] == described["context_length"] == 32_768
    assert described["meta"] == {"n_ctx": 32_768}


@pytest.mark.parametrize("ends", [(), (17, 19)])
def test_defaults_of_the_server_take_the_place_of_the_checkpoints(ends: tuple[int, ...]) -> None:
    defaults = SamplingParams(1.0, 0, 1.0, 0.0, 1.0, stop_token_ids=ends)
    with live_server(ScriptedEngine([say]), ServerSettings(sampling_defaults=defaults)) as server:
        body = {"messages": HI, "top_p": 0.5, "stop_token_ids": [3]}
        httpx.post(f"{server.base_url}/chat/completions", json=body)
        sampling = last_request(server).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.5, 0)
    assert sampling.stop_token_ids == (3, *ends)
