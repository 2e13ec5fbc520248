"""LiteLLM's provider `dlite/<model>`: what arrives, what comes back, and how it ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import litellm
import pytest
import yaml
from litellm.proxy.types_utils.utils import get_instance_fn
from pydantic import BaseModel

from dlite_agent import ChatRequest, Engine, EngineConfig, Message, errors
from dlite_agent.chat.output_rules import AnswerFormat, ToolChoice
from dlite_agent.integrations.litellm import handler, register
from dlite_agent.integrations.litellm_response import StreamWriter
from dlite_agent.testing import ScriptedEngine

CALLS = (
    "<think>\nHm.\n</think>\n\nI look."
    '<tool_call>\n{"name": "read", "arguments": {"path": "é.py"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "test", "arguments": {}}\n</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read", "test")
]
ASK = [{"role": "user", "content": "Hi."}]
FOLDER = Path(__file__).parents[2] / "integrations" / "litellm"
FOREVER_S = 3600.0  # a round that no test waits for

Script = Callable[..., ScriptedEngine]


@pytest.fixture(autouse=True)
def _litellm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    costs = dict(litellm.model_cost)
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    monkeypatch.setattr(litellm, "custom_provider_map", list(litellm.custom_provider_map))
    monkeypatch.setattr(handler, "_configs", {})
    yield
    litellm.model_cost.clear()
    litellm.model_cost.update(costs)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make every shared engine say these turns."""

    def script(*turns: Any, **options: Any) -> ScriptedEngine:
        engine = ScriptedEngine(turns, model_name="nano", **options)
        monkeypatch.setattr(Engine, "shared", lambda *_: engine)
        return engine

    return script


def ask(**options: Any) -> Any:
    return litellm.completion("dlite/nano", ASK, **options)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do; the test's own time limit ends it."""
    pause = threading.Event()
    while not is_so():
        pause.wait(0.005)


def test_an_answer_has_thought_text_calls_and_exact_usage(script: Script) -> None:
    script(CALLS, "Yes.")
    answer = ask(tools=TOOLS)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "I look.")
    assert [call.function.name for call in message.tool_calls] == ["read", "test"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"path": "é.py"}
    assert answer.choices[0].finish_reason == "tool_calls"
    turn = message.provider_specific_fields["dlite"]
    assert answer.usage.prompt_tokens == turn["prompt_tokens"]
    assert answer.usage.completion_tokens == turn["completion_tokens"]
    assert answer.usage.completion_tokens_details.reasoning_tokens == turn["reasoning_tokens"]
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = ask(tools=TOOLS)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert litellm.completion_cost(again) == 0


def test_a_stream_adds_up_to_the_answer(script: Script) -> None:
    script(CALLS, CALLS)
    whole = ask(tools=TOOLS)
    chunks = list(ask(tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    *_, finish, usage = chunks
    assert finish.choices[0].finish_reason == "tool_calls"
    assert not usage.choices
    cached = usage.usage.prompt_tokens_details.cached_tokens
    assert cached == usage.usage.prompt_tokens - 1
    assert usage.usage.completion_tokens == whole.usage.completion_tokens
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    message = whole.choices[0].message
    assert rebuilt.reasoning_content == message.reasoning_content
    assert rebuilt.content == message.content
    assert [call.function for call in rebuilt.tool_calls] == [
        call.function for call in message.tool_calls
    ]
    assert rebuilt.provider_specific_fields["dlite"]["cached_tokens"] == cached


def test_usage_stands_in_an_empty_chunk_before_the_finish() -> None:
    writer = StreamWriter("id", "nano")
    request = ChatRequest((Message("user", "Hi."),))
    chunks = [
        piece for chunk in ScriptedEngine([CALLS]).stream(request) for piece in writer.write(chunk)
    ]
    *others, figures, finish = chunks
    assert {chunk.id for chunk in chunks} == {"id"}
    assert not [chunk for chunk in others if getattr(chunk, "usage", None)]
    assert figures.usage.completion_tokens > 0
    for last in (figures, finish):
        delta = last.choices[0].delta
        said = (delta.content, delta.tool_calls, delta.get("reasoning_content"))
        assert not any(said)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_usage_is_streamed_only_where_it_was_asked_for(script: Script) -> None:
    script("Yes.")
    assert not [chunk for chunk in ask(stream=True) if getattr(chunk, "usage", None)]


async def test_async_calls_say_the_same(script: Script) -> None:
    script(CALLS, CALLS)
    answer = await litellm.acompletion("dlite/nano", ASK, tools=TOOLS)
    stream = await litellm.acompletion("dlite/nano", ASK, tools=TOOLS, stream=True)
    rebuilt = litellm.stream_chunk_builder([chunk async for chunk in stream])
    message = answer.choices[0].message
    assert rebuilt.choices[0].message.content == message.content == "I look."
    assert rebuilt.choices[0].message.reasoning_content == message.reasoning_content
    assert rebuilt.choices[0].finish_reason == "tool_calls"


async def test_a_blocking_call_works_below_a_running_loop(script: Script) -> None:
    script("Yes.")
    assert ask().choices[0].message.content == "Yes."


def test_several_answers_share_one_prompt_in_the_usage(script: Script) -> None:
    script("One.", "Three!")
    answer = ask(n=2)
    assert [choice.message.content for choice in answer.choices] == ["One.", "Three!"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    turns = [choice.message.provider_specific_fields["dlite"] for choice in answer.choices]
    assert answer.usage.prompt_tokens == turns[0]["prompt_tokens"]
    assert answer.usage.completion_tokens == sum(turn["completion_tokens"] for turn in turns)
    with pytest.raises(litellm.UnsupportedParamsError, match="n=2 cannot be streamed"):
        list(ask(n=2, stream=True))


def test_log_probabilities_come_in_both_modes(script: Script) -> None:
    script("Yes.", "Yes.")
    whole = ask(logprobs=True).choices[0].logprobs.content
    streamed = [
        token
        for chunk in ask(logprobs=True, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in whole] == [*"Yes.", "<|im_end|>"]
    assert [token.token for token in streamed] == [token.token for token in whole]


def test_a_stop_string_and_a_limit_end_the_answer(script: Script) -> None:
    script("One. Two.", "One. Two.")
    stopped = ask(stop=["Two"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("One. ", "stop")
    cut = ask(max_tokens=3).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("One", "length")


class Verdict(BaseModel):
    is_right: bool


def test_every_option_arrives(script: Script) -> None:
    engine = script("{}", "Yes.")
    ask(
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "read"}},
        parallel_tool_calls=False,
        response_format=Verdict,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        max_completion_tokens=50,
        presence_penalty=1.0,
        top_k=3,
        extra_body={"min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}},
        thinking_budget=9,
    )
    request = engine.requests[0]
    assert request.output.tool_choice == ToolChoice("required", ("read",))
    assert not request.output.parallel_tool_calls
    assert isinstance(request.output.answer, AnswerFormat)
    assert request.output.answer.schema is not None
    assert request.output.answer.schema["required"] == ["is_right"]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.max_tokens, sampling.presence_penalty) == (50, 1.0)
    assert (sampling.top_k, sampling.min_p, sampling.thinking_budget) == (3, 0.1, 9)
    assert request.template_kwargs == {"enable_thinking": False}
    assert [tool.name for tool in request.tools] == ["read", "test"]
    ask(reasoning_effort="none", allowed_openai_params=["reasoning_effort"])
    assert engine.requests[1].template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"session_id": "a", "prompt_cache_key": "b"}, "a"),
        ({"prompt_cache_key": "b", "metadata": {"session_id": "c"}}, "b"),
        ({"metadata": {"session_id": "c"}}, "c"),
        ({}, None),
    ],
)
def test_the_session_is_named_by_what_clients_send(
    script: Script, options: dict[str, Any], hint: str | None
) -> None:
    engine = script("Yes.")
    ask(**options)
    assert engine.requests[0].session_hint == hint


def test_an_unknown_option_is_refused_unless_litellm_may_drop_it(script: Script) -> None:
    script("Yes.")
    with pytest.raises(litellm.UnsupportedParamsError, match="nonsense=1 is not supported"):
        ask(nonsense=1)
    with pytest.raises(litellm.UnsupportedParamsError, match="chat_template_kwargs is 3"):
        ask(chat_template_kwargs=3)
    assert ask(nonsense=1, drop_params=True).choices[0].message.content == "Yes."


def test_options_that_mean_nothing_to_us_are_no_reason_to_refuse(script: Script) -> None:
    engine = script("Yes.")
    ask(
        user="me",
        safety_identifier="me",
        service_tier="auto",
        store=True,
        modalities=["text"],
        allowed_openai_params=["verbosity"],
        verbosity="low",
    )
    assert len(engine.requests) == 1
    with pytest.raises(litellm.UnsupportedParamsError, match="modalities="):
        ask(modalities=["text", "audio"])


async def test_what_may_pass_is_tried_again_and_falls_back(script: Script) -> None:
    full = errors.CapacityError("full")
    engine = script(full, full, "Yes.")
    answer = await litellm.acompletion("dlite/nano", ASK, num_retries=2)
    assert answer.choices[0].message.content == "Yes."
    assert len(engine.requests) == 3
    engine = script(full, "The other one.")
    answer = await litellm.acompletion("dlite/nano", ASK, fallbacks=["dlite/other"])
    assert (answer.model, answer.choices[0].message.content) == ("other", "The other one.")


@pytest.mark.parametrize(
    ("raised", "litellms"),
    [
        (errors.ModelNotFoundError("no"), litellm.NotFoundError),
        (errors.ContextLengthExceededError(9, 9, 9), litellm.ContextWindowExceededError),
        (errors.CapacityError("full"), litellm.ServiceUnavailableError),
        (errors.UnsupportedCheckpointError("no"), litellm.UnsupportedParamsError),
        (errors.RequestError("no"), litellm.BadRequestError),
        (ArithmeticError("a fault"), litellm.APIConnectionError),
    ],
)
def test_errors_are_litellms_own(
    script: Script, raised: Exception, litellms: type[Exception]
) -> None:
    script(raised, raised)
    with pytest.raises(litellms, match=str(raised)):
        ask()
    with pytest.raises(litellms if litellms is not litellm.APIConnectionError else Exception):
        list(ask(stream=True))


@pytest.mark.parametrize("timeout", [0.05, httpx.Timeout(0.05)])
@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_enforced_and_frees_the_turn(
    script: Script, timeout: object, stream: bool
) -> None:
    engine = script("Yes.", round_s=FOREVER_S)
    with pytest.raises(litellm.Timeout, match=r"no answer within timeout=0\.05 seconds"):
        list(ask(timeout=timeout, stream=stream))
    wait_until(lambda: engine.num_cancelled == 1)


def test_closing_a_stream_cancels_the_turn(script: Script) -> None:
    engine = script("A long answer. " * 500, round_s=0.05)  # minutes, if nobody ends it
    stream = ask(stream=True)
    next(stream)
    del stream
    wait_until(lambda: engine.num_cancelled == 1)


async def test_cancelling_the_task_cancels_the_turn(script: Script) -> None:
    engine = script("Yes.", "Yes.", round_s=FOREVER_S)
    answer = asyncio.ensure_future(litellm.acompletion("dlite/nano", ASK))
    stream = await litellm.acompletion("dlite/nano", ASK, stream=True)
    chunk = asyncio.ensure_future(anext(aiter(stream)))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.005)
    for task in (answer, chunk):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    while engine.num_cancelled < 2:
        await asyncio.sleep(0.005)


async def test_of_twenty_calls_at_once_those_that_are_left_end(script: Script) -> None:
    engine = script(*["A long answer. " * 500] * 20, round_s=0.05)  # minutes, if nobody ends one
    rng = random.Random(7)

    async def leave(number: int) -> None:
        stream = await litellm.acompletion("dlite/nano", ASK, stream=True)
        for _ in range(rng.randint(1, 3)):
            await anext(stream)
        if number % 2:
            await stream.aclose()

    left = [asyncio.ensure_future(leave(number)) for number in range(7)]
    calls = [asyncio.ensure_future(litellm.acompletion("dlite/nano", ASK)) for _ in range(13)]
    while len(engine.requests) < 20:  # before that LiteLLM itself has the calls
        await asyncio.sleep(0.005)
    for call in rng.sample(calls, k=13):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await asyncio.gather(*left)
    while engine.num_cancelled < 20:
        await asyncio.sleep(0.005)


def test_registering_twice_leaves_one_provider_and_the_others_alone() -> None:
    other = {"provider": "other", "custom_handler": handler}
    litellm.custom_provider_map[:] = [other]
    register()
    register(["nano"])
    assert [entry["provider"] for entry in litellm.custom_provider_map] == ["other", "dlite"]


def test_litellm_knows_what_a_model_can_do() -> None:
    register(["nano", EngineConfig("some/hub-name"), EngineConfig("other", max_context=99)])
    assert litellm.supports_function_calling("dlite/nano")
    assert litellm.supports_response_schema("dlite/nano")
    assert litellm.supports_reasoning("dlite/nano")
    assert litellm.utils.supports_prompt_caching("dlite/nano")
    assert litellm.get_model_info("dlite/nano")["max_input_tokens"] > 4096
    assert litellm.get_model_info("dlite/some/hub-name")["max_input_tokens"] is None
    assert litellm.get_model_info("dlite/other")["max_input_tokens"] == 99


def test_a_configured_model_runs_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EngineConfig] = []

    def shared(config: EngineConfig) -> ScriptedEngine:
        asked.append(config)
        return ScriptedEngine(["Yes."])

    monkeypatch.setattr(Engine, "shared", shared)
    monkeypatch.setenv("DLITE_MAX_BATCH", "3")
    register([EngineConfig("nano", drafter="null")])
    ask()
    litellm.completion("dlite/org/name", ASK)
    assert asked == [EngineConfig("nano", drafter="null"), EngineConfig("org/name", max_batch=3)]
    assert litellm.supports_function_calling("dlite/org/name")


def test_a_proxy_finds_the_handler_by_the_path_in_its_config() -> None:
    path = FOLDER / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    (entry,) = config["litellm_settings"]["custom_provider_map"]
    assert get_instance_fn(entry["custom_handler"], str(path)) is handler
    assert config["model_list"][0]["litellm_params"]["model"].startswith(entry["provider"] + "/")


def test_calls_survive_the_responses_api(script: Script) -> None:
    script(CALLS, CALLS)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    whole = litellm.responses(model="dlite/nano", input="Hi.", tools=tools)
    assert [(item.name, json.loads(item.arguments)) for item in whole.output[2:]] == [
        *(("read", {"path": "é.py"}), ("test", {}))
    ]
    assert [item.type for item in whole.output[:2]] == ["reasoning", "message"]
    events = list(litellm.responses(model="dlite/nano", input="Hi.", tools=tools, stream=True))
    calls = [item for item in events[-1].response.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["read", "test"]
    assert json.loads(calls[0].arguments) == {"path": "é.py"}
    streamed: dict[str, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            streamed[event.item_id] = streamed.get(event.item_id, "") + event.delta
    assert [json.loads(text) for text in streamed.values()] == [{"path": "é.py"}, {}]


async def test_calls_survive_the_messages_api(script: Script) -> None:
    script(CALLS, CALLS)
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "test")]
    whole = await litellm.anthropic.messages.acreate(
        model="dlite/nano", max_tokens=500, messages=ASK, tools=tools
    )
    thought, said, *calls = whole["content"]
    assert (thought["thinking"], said["text"]) == ("Hm.", "I look.")
    assert [(c["name"], c["input"]) for c in calls] == [("read", {"path": "é.py"}), ("test", {})]
    assert whole["stop_reason"] == "tool_use"
    stream = await litellm.anthropic.messages.acreate(
        model="dlite/nano", max_tokens=500, messages=ASK, tools=tools, stream=True
    )
    lines = b"".join([event async for event in stream]).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    kinds = [block["type"] for block in blocks]
    assert kinds[:4] == ["thinking", "text", "tool_use", "tool_use"]  # LiteLLM adds an empty text
    pieces = [
        e["delta"].get("partial_json", "") for e in events if e.get("index") == 2 and "delta" in e
    ]
    assert json.loads("".join(pieces)) == {"path": "é.py"}
    (end,) = (event for event in events if event["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "tool_use"
    assert end["usage"]["output_tokens"] > 0


def test_nano_says_the_same_streamed_and_whole() -> None:
    options = {"temperature": 0, "max_tokens": 24, "enable_thinking": False}
    try:
        whole = ask(**options)
        chunks = list(ask(**options, stream=True, stream_options={"include_usage": True}))
        said = whole.choices[0].message.model_dump()
        history = [*ASK, said, {"role": "user", "content": "And now?"}]
        after = litellm.completion("dlite/nano", history, **options)
    finally:
        Engine.close_all()
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0]
    assert rebuilt.message.content == said["content"] != ""
    assert rebuilt.finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    turn = after.choices[0].message.provider_specific_fields["dlite"]
    assert after.usage.prompt_tokens_details.cached_tokens == turn["cached_tokens"] > 0
