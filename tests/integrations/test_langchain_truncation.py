"""A call that was cut is no call of a message, however LangChain asks; here under a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import Runnable

from dlite_agent import ChatDLite, Engine
from dlite_agent.testing import ScriptedEngine
from tests.tiny_checkpoint import control_id, write_checkpoint

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 20},
        "where": {"enum": ["here", "there"]},
    },
    "required": ["text", "where"],
}
TOOL = {"type": "function", "function": {"name": "search", "parameters": SEARCH, "strict": True}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"text": "rm -rf b/old", "where": "here"}}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=2048)
    model = ChatDLite(
        str(folder),
        dtype="float64",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=3,
        max_kv_bytes=16 * 2**20,
        logit_bias={str(control_id("<think>")): -100},  # it would think for ever
    )
    yield model
    Engine.shared(model._engine_config(model.model)).close()


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    return message


async def in_every_way(bound: Runnable[Any, AIMessage]) -> list[AIMessage]:
    """The same answer by invoke, stream, and both for asyncio."""
    return [
        bound.invoke("?"),
        merged(list(bound.stream("?"))),  # type: ignore[arg-type]
        await bound.ainvoke("?"),
        merged([chunk async for chunk in bound.astream("?")]),  # type: ignore[misc]
    ]


async def test_a_call_that_its_tokens_end_is_none(model: ChatDLite) -> None:
    forced = model.bind_tools([TOOL], tool_choice="search")
    whole = forced.invoke("?", max_tokens=200)
    jsonschema.validate(whole.tool_calls[0]["args"], SEARCH)
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    length = whole.usage_metadata["output_tokens"]  # type: ignore[index]
    for max_tokens in (3, length - 5):
        for message in await in_every_way(forced.bind(max_tokens=max_tokens)):
            assert message.tool_calls == []
            assert len(message.invalid_tool_calls) == 1
            assert message.response_metadata["finish_reason"] == "length"


async def test_an_answer_that_its_tokens_end_is_closed(model: ChatDLite) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SEARCH, "strict": True}}
    for message in await in_every_way(model.bind(response_format=form, max_tokens=40)):
        assert message.response_metadata["finish_reason"] == "stop"
        jsonschema.validate(json.loads(str(message.content)), SEARCH)


THERE = CALL.replace('"here"', '"there"')
TWO = f"Two calls.\n{CALL}</tool_call>\n{THERE}</tool_call>"


@pytest.mark.parametrize("version", ["v0", "v1", "responses/v1"])
async def test_what_was_read_of_a_stream_that_was_left_has_no_call_that_was_cut(
    version: str,
) -> None:
    """A call is there once all of the answer is, and not before; every break of every stream."""

    def model() -> Runnable[Any, AIMessage]:
        engine = ScriptedEngine([TWO], tokens_per_round=3)
        return ChatDLite("scripted", engine=engine, output_version=version).bind_tools([TOOL])

    whole: list[AIMessageChunk] = list(model().stream("?"))  # type: ignore[arg-type]
    again = [chunk async for chunk in model().astream("?")]
    assert [chunk.tool_call_chunks for chunk in whole] == [c.tool_call_chunks for c in again]  # type: ignore[attr-defined]
    named = [c for c in whole if any(piece["name"] for piece in c.tool_call_chunks)]
    assert len(named) == 2
    assert whole.index(named[1]) < len(whole) - 5  # each is named as soon as it begins
    args = [call["args"] for call in merged(whole).tool_calls]
    assert args == [{"text": "rm -rf b/old", "where": where} for where in ("here", "there")]
    for stop in range(1, len(whole) - 2):
        left = merged(whole[:stop])
        assert left.tool_calls == []
        assert not [block for block in left.content_blocks if block["type"] == "tool_call"]
    assert merged(whole[:-3]).invalid_tool_calls
    assert all(chunk.tool_calls == [] for chunk in whole[:-3])


def test_who_asks_for_arguments_as_they_come_gets_calls_that_were_cut_from_a_stream_he_left() -> (
    None
):
    """LangChain reads `{"text": "rm -rf b` as a call. It is the same with every provider."""
    engine = ScriptedEngine([f"{CALL}</tool_call>"] * 2, tokens_per_round=3)
    model = ChatDLite("scripted", engine=engine)
    chunks = list(model.stream("?", stream_arguments=True))
    pieces = [piece["args"] or "" for chunk in chunks for piece in chunk.tool_call_chunks]
    assert sum(map(bool, pieces)) > 10
    assert json.loads("".join(pieces)) == {"text": "rm -rf b/old", "where": "here"}
    left = [merged(chunks[:stop]) for stop in range(1, len(chunks))]
    cut = [call["args"] for message in left for call in message.tool_calls]
    assert {} in cut
    assert any("rm -rf" in args.get("text", "") < "rm -rf b/old" for args in cut)
    assert all(message.chunk_position != "last" for message in left)  # which tells them apart
    assert merged(chunks).chunk_position == "last"


@pytest.mark.parametrize("num_tokens", [20, 60, 75])
async def test_a_scripted_call_that_its_tokens_end_is_none(num_tokens: int) -> None:
    engine = ScriptedEngine([CALL + "</tool_call>"] * 4)
    bound = ChatDLite("scripted", engine=engine, max_tokens=num_tokens).bind_tools([TOOL])
    for message in await in_every_way(bound):
        assert message.tool_calls == []
        assert len(message.invalid_tool_calls) == 1
        assert message.response_metadata["finish_reason"] == "length"
