"""ChatDLite over a scripted engine: what a LangChain program sees."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from langchain_core import exceptions as core
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.exceptions import OutputParserException
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableBinding, RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel

import dlite_agent
from dlite_agent import ChatDLite
from dlite_agent.chat.output_rules import AnswerFormat, OutputRules, ToolChoice
from dlite_agent.config import SamplingParams
from dlite_agent.errors import ConfigurationError
from dlite_agent.testing import ByteTokenizer, ScriptedEngine

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
THINK_AND_ADD = f"<think>\nI should add.\n</think>\n\nLet me add.\n{ADD}"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat(*turns: Any, **options: Any) -> ChatDLite:
    engine = ScriptedEngine(
        turns, **{k: options.pop(k) for k in ("round_s", "tokens_per_round") if k in options}
    )
    return ChatDLite("scripted", engine=engine, **options)


def engine_of(model: ChatDLite) -> ScriptedEngine:
    assert isinstance(model.engine, ScriptedEngine)
    return model.engine


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    return message


# Construction


def test_constructing_loads_nothing() -> None:
    start = time.perf_counter()
    for _ in range(50):
        ChatDLite("no/such-model")
    assert (time.perf_counter() - start) / 50 < 0.005


def test_options_are_checked_when_constructed() -> None:
    with pytest.raises(dlite_agent.ConfigurationError, match="'tempreture' is not an option"):
        ChatDLite("nano", tempreture=0)
    with pytest.raises(dlite_agent.ConfigurationError, match="temperature is -1"):
        ChatDLite("nano", temperature=-1)
    with pytest.raises(dlite_agent.ConfigurationError, match="max_context is 0"):
        ChatDLite("nano", max_context=0)


def test_objects_with_the_same_engine_options_share_an_engine() -> None:
    first, second = ChatDLite("nano", temperature=0), ChatDLite("nano", max_tokens=5)
    assert first._backend() is second._backend()
    assert first._backend() is not ChatDLite("nano", drafter="null")._backend()
    assert first._backend({"model": "other"}).model_name == "other"
    dlite_agent.Engine.close_all()


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_model_can_be_saved_and_loaded_by_its_public_name() -> None:
    model = ChatDLite("nano", temperature=0.5, engine=ScriptedEngine([]), api_key="secret")
    saved = dumpd(model)
    assert saved["id"] == ["dlite_agent", "ChatDLite"]
    assert "secret" not in str(saved)
    assert "engine" not in saved["kwargs"]
    loaded = load(saved, allowed_objects=[ChatDLite], valid_namespaces=["dlite_agent"])
    assert loaded.asdict() == model.asdict()
    assert pickle.loads(pickle.dumps(ChatDLite("nano", seed=1))).seed == 1


def test_copies_share_the_engine_and_its_connections() -> None:
    model = chat("Hi.", temperature=0.5)
    copied = copy.deepcopy(model)
    assert copied.engine is model.engine
    assert model.model_copy(deep=True).invoke("?").content == "Hi."
    remote = ChatDLite(base_url="http://127.0.0.1:9/v1", api_key="secret")
    client = remote._backend()
    assert copy.deepcopy(remote)._backend() is client
    loaded = pickle.loads(pickle.dumps(remote))
    assert loaded.base_url == remote.base_url
    assert loaded._backend() is not client


def test_what_identifies_the_model_is_small_and_set() -> None:
    assert ChatDLite("nano", temperature=0, stop=["x"])._identifying_params == {
        "model": "nano",
        "drafter": "auto",
        "device": "auto",
        "dtype": "auto",
        "isolation": "thread",
        "temperature": 0,
        "stop": ["x"],
        "history": "auto",
    }
    params = ChatDLite("nano", temperature=0, max_tokens=5)._get_ls_params(model="other")
    assert params == {
        "ls_provider": "dlite",
        "ls_model_type": "chat",
        "ls_model_name": "other",
        "ls_temperature": 0.0,
        "ls_max_tokens": 5,
    }


def test_profile_says_what_fits(tmp_path: Path) -> None:
    """Middleware that summarises at a share of the context asks for it."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    nano, local, hub = (
        ChatDLite().profile,
        ChatDLite(str(tmp_path)).profile,
        ChatDLite("a/b").profile,
    )
    assert nano is not None
    assert nano["max_input_tokens"] == 65_535  # an answer has one token at least
    assert local is not None
    assert local["max_input_tokens"] == 1023
    assert hub is not None
    assert "max_input_tokens" not in hub


def test_stretched_positions_raise_the_context_of_the_profile(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 40960}')
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    profile = ChatDLite(str(tmp_path), rope_scaling=yarn).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 131_071
    with pytest.raises(ConfigurationError, match="'spiral' is not supported"):
        ChatDLite(rope_scaling={"rope_type": "spiral"})


def test_profile_says_what_works() -> None:
    profile = ChatDLite("nano", max_context=4096, max_tokens=96).profile
    assert profile is not None
    assert profile["max_input_tokens"] == 4000
    assert profile["max_output_tokens"] == 96
    assert profile["tool_calling"]
    assert profile["tool_choice"]
    assert profile["structured_output"]


# One turn


def test_invoke_has_content_reasoning_calls_and_figures() -> None:
    model = chat(THINK_AND_ADD)
    message = model.invoke("1 + 2?")
    assert type(message) is AIMessage
    assert message.content == "Let me add."
    assert message.additional_kwargs == {"reasoning_content": "I should add."}
    assert message.tool_calls == [
        {"name": "add", "args": {"a": 1, "b": 2}, "id": "call_0", "type": "tool_call"}
    ]
    assert [block["type"] for block in message.content_blocks] == [
        "reasoning",
        "text",
        "tool_call",
    ]
    metadata = message.response_metadata
    assert metadata["finish_reason"] == "tool_calls"
    assert metadata["model_name"] == "scripted"
    assert metadata["model_provider"] == "dlite"
    assert metadata["dlite"]["session_id"] == "scripted"
    usage = message.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_token_details"]["reasoning"] > len("I should add.")


def test_stream_adds_up_to_what_invoke_returns() -> None:
    streamed = total(list(chat(THINK_AND_ADD).stream("1 + 2?")))
    invoked = chat(THINK_AND_ADD).invoke("1 + 2?")
    assert streamed.content == invoked.content
    assert streamed.additional_kwargs == invoked.additional_kwargs
    assert streamed.tool_calls == invoked.tool_calls
    assert streamed.usage_metadata == invoked.usage_metadata
    assert streamed.response_metadata == invoked.response_metadata
    assert streamed.chunk_position == "last"


def test_stream_names_a_call_once_and_has_figures_once() -> None:
    chunks = list(chat(THINK_AND_ADD).stream("1 + 2?"))
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert [piece["name"] for piece in pieces if piece["name"]] == ["add"]
    assert [piece["id"] for piece in pieces if piece["id"]] == ["call_0"]
    assert {piece["index"] for piece in pieces} == {0}
    assert len([chunk for chunk in chunks if chunk.usage_metadata]) == 1
    assert [chunk.chunk_position for chunk in chunks].count("last") == 1
    assert chunks[-1].usage_metadata
    assert all(not chunk.response_metadata for chunk in chunks[:-1])


@pytest.mark.parametrize("version", ["v0", "v1", "responses/v1"])
def test_content_blocks_in_every_output_version(version: str) -> None:
    model = chat(THINK_AND_ADD, THINK_AND_ADD, output_version=version)
    expected = ["reasoning", "text", "tool_call"]
    assert [block["type"] for block in model.invoke("?").content_blocks] == expected
    assert [block["type"] for block in total(list(model.stream("?"))).content_blocks] == expected


async def test_async_is_the_same() -> None:
    model = chat(THINK_AND_ADD, THINK_AND_ADD)
    invoked = await model.ainvoke("1 + 2?")
    streamed = total([chunk async for chunk in model.astream("1 + 2?")])
    assert streamed.content == invoked.content == "Let me add."
    assert [c["args"] for c in streamed.tool_calls] == [c["args"] for c in invoked.tool_calls]


def test_batch_and_chains_work() -> None:
    model = chat("one", "two")
    assert {message.text for message in model.batch(["a", "b"])} == {"one", "two"}
    chain = ChatPromptTemplate.from_messages([("system", "Be {how}."), ("user", "Hi")]) | chat("Hi")
    assert chain.invoke({"how": "kind"}).text == "Hi"


def test_streaming_inside_invoke_reaches_callbacks() -> None:
    handler = UsageMetadataCallbackHandler()
    model = chat("Hello.", streaming=True)
    assert model.invoke("?", config={"callbacks": [handler]}).text == "Hello."
    assert handler.usage_metadata["scripted"]["output_tokens"] == len("Hello.") + 1
    chunks = list(chat("Hello.", streaming=False).stream("?"))
    assert len(chunks) == 1


def test_stream_events_v3_have_every_kind_of_block() -> None:
    events = list(chat(THINK_AND_ADD).stream_events("?", version="v3"))
    finished = [e["content"] for e in events if e["event"] == "content-block-finish"]
    assert [block["type"] for block in finished] == ["reasoning", "text", "tool_call"]
    assert finished[2]["args"] == {"a": 1, "b": 2}


# Calls that are none

CUT = '<tool_call>\n{"name": "sh", "arguments": {"command": "rm -rf build/old"}}\n</tool_call>'


@pytest.mark.parametrize("tokens", range(1, len(ByteTokenizer().encode_template(CUT)), 2))
def test_call_that_was_cut_never_runs(tokens: int) -> None:
    """LangChain's own merge would hand out `rm -rf build`."""
    invoked = chat(CUT, max_tokens=tokens).invoke("?")
    streamed = total(list(chat(CUT, max_tokens=tokens).stream("?")))
    for message in (invoked, streamed):
        assert message.tool_calls == []
        assert [call["id"] for call in message.invalid_tool_calls] == ["call_0"]
        assert message.response_metadata["finish_reason"] == "length"
        assert message.response_metadata["dlite"]["unparsed"][0]["error"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "no json",
        '{"arguments": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}} or so',
        '{"name": "f", "arguments": {"a": ["x\\',
        '{"name": "f", "arguments": {"a": ["x',
        '{"name": "f", "arguments": {"a": "x\\',
        '{"name": "f", "arguments": {"a": [1',
        '{"name": "f", "arguments": {"a": 1',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f"',
        "[1, 2]",
        "7",
    ],
)
def test_text_that_is_no_call_never_runs(body: str) -> None:
    turn = f"{ADD}\n<tool_call>{body}</tool_call>"
    messages = [chat(turn).invoke("?"), total(list(chat(turn).stream("?")))]
    for version in ("v0", "v1"):
        messages.append(total(list(chat(turn, output_version=version).stream("?"))))
    for message in messages:
        assert [call["name"] for call in message.tool_calls] == ["add"]
        assert [call["id"] for call in message.invalid_tool_calls] == ["call_1"]
    events = list(chat(turn).stream_events("?", version="v3"))
    finished = [e["content"] for e in events if e["event"] == "content-block-finish"]
    assert [block["type"] for block in finished] == ["tool_call", "invalid_tool_call"]


def test_broken_call_comes_back_as_it_was_generated() -> None:
    turn = '<tool_call>\n{"name": "f", "arguments": {"a": "x}}\n</tool_call>'
    for ask in (
        lambda model: model.invoke("?"),
        lambda model: total(list(model.stream("?"))),
    ):
        model = chat(turn, "ok")
        answer = ask(model)
        model.invoke([HumanMessage("?"), answer, HumanMessage("and?")])
        replayed = engine_of(model).requests[1].messages[1]
        assert replayed.tool_calls[0].arguments == '{"name": "f", "arguments": {"a": "x}}'


# Requests


def test_options_reach_the_engine_and_a_call_overrides_them() -> None:
    model = chat("a", "b", temperature=0, top_k=5, enable_thinking=False, history="template")
    model.invoke("?")
    bound = model.bind(top_p=0.5, enable_thinking=True, history="auto", temperature=None)
    bound.invoke("?", max_tokens=7, seed=3, session_id="s")
    first, second = engine_of(model).requests
    assert first.sampling == SamplingParams(temperature=0, top_k=5)
    assert first.template_kwargs == {"enable_thinking": False}
    assert first.history == "template"
    assert first.session_hint is None
    assert second.sampling == SamplingParams(
        temperature=0, top_k=5, top_p=0.5, max_tokens=7, seed=3
    )
    assert second.template_kwargs == {"enable_thinking": True}
    assert second.history is None
    assert second.session_hint == "s"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [7]}, "stop is .*; use a text or a list of texts"),
        ({"n": 0}, "n is 0; use a whole number from 1 to 128"),
        ({"best_of": 2}, "best_of=2 is not an option of a call"),
        ({"tool_choice": 7}, "tool_choice is 7"),
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"strict": True}, "strict=True is not an option of a call"),
        ({"model": "other"}, "make another ChatDLite"),
    ],
)
def test_what_is_not_there_is_refused_and_not_ignored(
    options: dict[str, Any], message: str
) -> None:
    model = chat("a")
    for error in (dlite_agent.UnsupportedParameterError, core.ModelInvalidRequestError):
        with pytest.raises(error, match=message):
            model.invoke("?", **options)
        with pytest.raises(error, match=message):
            list(model.stream("?", **options))
    assert engine_of(model).requests == []


def test_option_can_be_configured_for_a_call() -> None:
    model = chat("a")
    field = ConfigurableField(id="heat")
    configured = model.configurable_fields(temperature=field)
    configured.with_config(configurable={"heat": 0.5}).invoke("?")
    assert engine_of(model).requests[0].sampling.temperature == 0.5


class Multiply(BaseModel):
    """Multiply two numbers."""

    a: int
    b: int


@pytest.mark.host
def test_agent_answers_in_the_form_that_was_asked_for() -> None:
    agents = pytest.importorskip("langchain.agents")
    model = chat(
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '{"a": 3, "b": 4}',
    )
    agent = agents.create_agent(model, [add], response_format=Multiply)
    result = agent.invoke({"messages": [HumanMessage("?")]})
    assert result["structured_response"] == Multiply(a=3, b=4)
    for request in engine_of(model).requests:
        assert request.output.answer is not None
        assert request.tools[0].name == "add"


@pytest.mark.parametrize("include_raw", [False, True])
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_structured_output_is_asked_for_and_read(method: Any, include_raw: bool) -> None:
    said = '{"a": 3, "b": 4}'
    if method == "function_calling":
        said = f'<tool_call>\n{{"name": "Multiply", "arguments": {said}}}\n</tool_call>'
    model = chat(said, said)
    for schema, value in (
        (Multiply, Multiply(a=3, b=4)),
        (Multiply.model_json_schema(), {"a": 3, "b": 4}),
    ):
        asked = model.with_structured_output(schema, method=method, include_raw=include_raw)
        answer = asked.invoke("3 by 4")
        if include_raw:
            assert answer["parsing_error"] is None
            answer = answer["parsed"]
        assert answer == value
    for request in engine_of(model).requests:
        rules = request.output
        if method == "function_calling":
            assert rules == OutputRules(ToolChoice("required", ("Multiply",)), closes_calls=True)
            assert request.tools[0].strict
        else:
            assert rules.answer is not None
            assert rules.answer.schema is not None
            assert rules.answer.schema["required"] == ["a", "b"]


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_a_schema_without_properties_is_enforced_as_well(method: Any, strict: bool | None) -> None:
    """LangChain's conversion keeps nothing of it."""
    choice = {"anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}]}
    model = chat("{}")
    asked = model.with_structured_output({"title": "one", **choice}, method=method, strict=strict)
    asked.first.invoke("?")  # type: ignore[attr-defined]
    (request,) = engine_of(model).requests
    if method == "function_calling":
        assert request.tools[0].parameters == choice
    else:
        assert request.output.answer is not None
        assert request.output.answer.schema == choice


def test_what_does_not_fit_is_an_error_or_reported() -> None:
    model = chat("no", "no")
    with pytest.raises(OutputParserException):
        model.with_structured_output(Multiply).invoke("?")
    answer = model.with_structured_output(Multiply, include_raw=True).invoke("?")
    assert answer["raw"].content == "no"
    assert answer["parsed"] is None
    assert isinstance(answer["parsing_error"], OutputParserException)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(dlite_agent.UnsupportedParameterError, match="json_schema"):
        chat().with_structured_output(Multiply, method="yaml")  # type: ignore[arg-type]


def subtract(a: int, b: int) -> int:
    """Subtract two numbers."""
    return a - b


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_tools_are_bound_in_every_form() -> None:
    schema = {"title": "divide", "description": "Divide.", "type": "object", "properties": {}}
    openai = {"type": "function", "function": {"name": "raw", "parameters": {"type": "object"}}}
    shout = RunnableLambda(lambda text: str(text).upper()).as_tool(
        name="shout", description="Shout.", arg_types={"text": str}
    )
    model = chat("ok")
    bound = model.bind_tools(
        [add, Multiply, subtract, schema, openai, shout],
        tool_choice="auto",
        strict=False,
        response_format=None,
    )
    assert isinstance(bound, RunnableBinding)
    bound.invoke("?")
    tools = engine_of(model).requests[0].tools
    names = ["add", "Multiply", "subtract", "divide", "raw", "shout"]
    assert [spec.name for spec in tools] == names
    assert set(tools[1].parameters["properties"]) == {"a", "b"}
    with pytest.raises(core.ModelInvalidRequestError, match=r"'sub', but tools has \['add'\]"):
        model.bind_tools([add], tool_choice="sub")


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, OutputRules()),
        ({"tool_choice": "any"}, OutputRules(ToolChoice("required"))),
        ({"tool_choice": "add"}, OutputRules(ToolChoice("required", ("add",)))),
        ({"tool_choice": "none"}, OutputRules(ToolChoice("none"))),
        ({"parallel_tool_calls": False}, OutputRules(parallel_tool_calls=False)),
        ({"response_format": {"type": "json_object"}}, OutputRules(answer=AnswerFormat())),
    ],
)
def test_what_is_forced_reaches_the_engine(options: dict[str, Any], rules: OutputRules) -> None:
    model = chat("ok")
    model.bind_tools([add], strict=True, **options).invoke("?")
    request = engine_of(model).requests[0]
    assert request.output == rules
    assert request.tools[0].strict


def test_a_call_of_no_tool_cannot_be_demanded() -> None:
    with pytest.raises(dlite_agent.RequestError, match="no tools"):
        chat("a").invoke("?", tool_choice="any")


def test_tokens_are_counted_with_tools() -> None:
    model = chat()
    messages = [HumanMessage("Hello")]
    plain = model.get_num_tokens_from_messages(messages)
    assert plain == engine_of(model).count_tokens(
        tuple(dlite_agent.Message("user", "Hello") for _ in range(1))
    )
    assert model.get_num_tokens_from_messages(messages, tools=[add]) > plain
    with pytest.raises(dlite_agent.UnsupportedParameterError, match="get_num_tokens_from_messages"):
        model.get_token_ids("Hello")
    assert chat(custom_get_token_ids=lambda text: [len(text)]).get_token_ids("Hello") == [5]


# Errors


@pytest.mark.parametrize(
    ("error", "theirs", "is_retryable"),
    [
        (dlite_agent.ContextLengthExceededError(5, 1, 4), core.ContextOverflowError, False),
        (dlite_agent.ModelNotFoundError("no"), core.ModelNotFoundError, False),
        (dlite_agent.RequestError("no"), core.ModelInvalidRequestError, False),
        (dlite_agent.SessionNotFoundError("no"), core.ModelInvalidRequestError, False),
        (dlite_agent.SessionBusyError("no"), core.ModelAPIError, True),
        (dlite_agent.CapacityError("no"), core.ModelAPIError, True),
        (dlite_agent.DrafterMismatchError("no"), dlite_agent.DrafterMismatchError, None),
    ],
)
def test_errors_are_ours_and_langchains(
    error: dlite_agent.DLiteError, theirs: type[Exception], is_retryable: bool | None
) -> None:
    model = chat(error, error)
    with pytest.raises(theirs) as raised:
        model.invoke("?")
    with pytest.raises(theirs):
        list(model.stream("?"))
    assert isinstance(raised.value, type(error))
    assert str(raised.value) == str(error)
    if is_retryable is not None:
        assert raised.value.is_retryable == is_retryable == error.retryable  # type: ignore[attr-defined]
        copy = pickle.loads(pickle.dumps(raised.value))
        assert (type(copy), str(copy)) == (type(raised.value), str(error))


async def test_errors_are_both_in_asyncio() -> None:
    model = chat(dlite_agent.CapacityError("full"), dlite_agent.CapacityError("full"))
    with pytest.raises(core.ModelAPIError):
        await model.ainvoke("?")
    with pytest.raises(core.ModelAPIError):
        _ = [chunk async for chunk in model.astream("?")]


# Cancelling


def test_leaving_a_stream_cancels_the_turn() -> None:
    model = chat("a long answer " * 100)
    stream = model.stream("?")
    assert len(list(itertools.islice(stream, 3))) == 3
    stream.close()  # type: ignore[attr-defined]
    assert engine_of(model).num_cancelled == 1


async def test_cancelling_a_task_cancels_the_turn_within_a_round() -> None:
    model = chat(*["a long answer"] * 3, round_s=3600.0)

    async def asked(number: int) -> None:
        while len(engine_of(model).requests) < number:
            await asyncio.sleep(0.005)

    invoke = asyncio.create_task(model.ainvoke("?"))
    await asked(1)
    invoke.cancel()
    with pytest.raises(asyncio.CancelledError):
        await invoke
    assert engine_of(model).num_cancelled == 1

    async def read() -> None:
        async for _ in model.astream("?"):
            pass

    stream = asyncio.create_task(read())
    await asked(2)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert engine_of(model).num_cancelled == 2

    async def wait_no_longer_than_the_start() -> None:
        async with asyncio.timeout(None) as limit:
            started = asyncio.create_task(asked(3))
            started.add_done_callback(lambda _: limit.reschedule(0.0))
            await model.ainvoke("?")

    with pytest.raises(TimeoutError):
        await wait_no_longer_than_the_start()
    assert engine_of(model).num_cancelled == 3


class WithoutClose:
    """A backend whose streams are bare iterators."""

    model_name = "bare"
    max_context = 100

    def __init__(self) -> None:
        self._engine = ScriptedEngine(["a", "b"])

    def stream(self, request: Any) -> Iterator[Any]:
        return iter(list(self._engine.stream(request)))

    def astream(self, request: Any) -> AsyncIterator[Any]:
        chunks = self._engine.astream(request)

        class Bare:
            def __aiter__(self) -> AsyncIterator[Any]:
                return self

            async def __anext__(self) -> Any:
                return await chunks.__anext__()

        return Bare()


async def test_backend_may_stream_without_a_generator() -> None:
    model = ChatDLite(engine=WithoutClose())
    assert total(list(model.stream("?"))).text == "a"
    assert total([chunk async for chunk in model.astream("?")]).text == "b"


# Agents

HOST = pytest.mark.host


@HOST
@pytest.mark.parametrize("mode", ["invoke", "stream", "ainvoke"])
async def test_agent_calls_a_tool_and_answers(mode: str) -> None:
    agents = pytest.importorskip("langchain.agents")
    model = chat(THINK_AND_ADD, "It is 3.")
    agent = agents.create_agent(model, [add])
    question = {"messages": [{"role": "user", "content": "1 + 2?"}]}
    if mode == "invoke":
        messages = agent.invoke(question)["messages"]
    elif mode == "ainvoke":
        messages = (await agent.ainvoke(question))["messages"]
    else:
        pieces = [
            chunk.text
            for chunk, meta in agent.stream(question, stream_mode="messages")
            if meta["langgraph_node"] == "model"
        ]
        assert "".join(pieces) == "Let me add.It is 3."
        messages = [None, None, None, AIMessage("It is 3.")]
    assert messages[-1].text == "It is 3."
    second = engine_of(model).requests[1]
    roles = [message.role for message in second.messages]
    assert roles == ["user", "assistant", "tool"]
    assert second.messages[1].reasoning == "I should add."
    assert second.messages[1].tool_calls[0].id == "call_0"
    assert second.messages[2].content == "3"
    assert [spec.name for spec in second.tools] == ["add"]


@HOST
def test_agent_is_told_about_a_call_that_was_cut() -> None:
    agents = pytest.importorskip("langchain.agents")
    model = chat(CUT, "Sorry.", max_tokens=60)
    agent = agents.create_agent(model, [add])
    messages = agent.invoke({"messages": [{"role": "user", "content": "?"}]})["messages"]
    assert messages[-1].tool_calls == []
    assert len(engine_of(model).requests) == 1


@HOST
def test_thread_id_is_the_hint_and_a_sub_graph_has_its_own() -> None:
    agents = pytest.importorskip("langchain.agents")
    memory = pytest.importorskip("langgraph.checkpoint.memory")
    inner = agents.create_agent(chat("inner"), [])

    @tool
    def delegate(task: str) -> str:
        """Ask another agent."""
        return str(inner.invoke({"messages": [HumanMessage(task)]})["messages"][-1].text)

    call = '<tool_call>\n{"name": "delegate", "arguments": {"task": "x"}}\n</tool_call>'
    outer_model, inner_model = chat(call, "done"), chat("inner")
    inner = agents.create_agent(inner_model, [])
    agent = agents.create_agent(outer_model, [delegate], checkpointer=memory.InMemorySaver())
    config = {"configurable": {"thread_id": "fix-123"}}
    agent.invoke({"messages": [HumanMessage("?")]}, config)
    assert [request.session_hint for request in engine_of(outer_model).requests] == ["fix-123"] * 2
    (inner_request,) = engine_of(inner_model).requests
    assert str(inner_request.session_hint).startswith("fix-123|tools:")
    explicit = chat("a", session_id="mine")
    explicit.invoke("?", config=config)
    assert engine_of(explicit).requests[0].session_hint == "mine"


def test_threads_share_a_model() -> None:
    model = chat(*["answer"] * 16)
    texts: list[str] = []

    def ask() -> None:
        texts.extend(str(model.invoke("?").text) for _ in range(4))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["answer"] * 16


def test_tool_results_keep_their_ids() -> None:
    model = chat("ok")
    calls = [{"name": "add", "args": {"a": 1}, "id": "x", "type": "tool_call"}]
    model.invoke(
        [HumanMessage("?"), AIMessage("", tool_calls=calls), ToolMessage("1", tool_call_id="x")]
    )
    assert engine_of(model).requests[0].messages[2].tool_call_id == "x"


class Heard(BaseCallbackHandler):
    """Which events of a chat model came, in order; a run of equal ones once."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.text = ""
        self.ended: LLMResult | None = None

    def _hear(self, event: str) -> None:
        if not self.events or self.events[-1] != event:
            self.events.append(event)

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        self._hear("start")

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self._hear("token")
        self.text += token if isinstance(token, str) else ""

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        self._hear("end")
        self.ended = response

    def on_llm_error(self, *_: Any, **__: Any) -> None:
        self._hear("error")


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
@pytest.mark.parametrize("fails", [False, True])
async def test_callbacks_hear_of_every_turn(way: str, fails: bool) -> None:
    model = chat(dlite_agent.CapacityError("full") if fails else THINK_AND_ADD)
    heard = Heard()
    config: Any = {"callbacks": [heard]}
    with suppress(core.ModelAPIError):
        match way:
            case "invoke":
                model.invoke("?", config)
            case "stream":
                list(model.stream("?", config))
            case "ainvoke":
                await model.ainvoke("?", config)
            case _:
                _ = [chunk async for chunk in model.astream("?", config)]
    is_stream = way.endswith("stream")
    if fails:
        assert heard.events == ["start", "error"]
        return
    assert heard.events == (["start", "token", "end"] if is_stream else ["start", "end"])
    assert heard.text == ("Let me add." if is_stream else "")
    assert heard.ended is not None
    (generation,) = heard.ended.generations[0]
    assert isinstance(generation, ChatGeneration)
    assert isinstance(generation.message, AIMessage)
    assert generation.message.usage_metadata is not None
    assert [call["name"] for call in generation.message.tool_calls] == ["add"]
