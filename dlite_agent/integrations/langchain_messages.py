"""LangChain messages to ours, and our turns to LangChain's messages and chunks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import (
    ToolCallChunk,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.json import parse_partial_json

from dlite_agent.backend import ChatBackend
from dlite_agent.chat.logprobs import logprobs_to_openai
from dlite_agent.chat.messages import (
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UnparsedToolCall,
)
from dlite_agent.chat.openai_format import messages_from_openai
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["ChunkWriter", "chat_result", "message_from_generation", "messages_from_langchain"]

_ROLES = {
    "human": "user",
    "Human": "user",
    "ai": "assistant",
    "AI": "assistant",
    "System": "system",
    "Tool": "tool",
    "Function": "function",
}
_CALL_BLOCKS = {"tool_call": "args", "tool_use": "input"}  # block type: its arguments' key
# Appended to arguments that are no call, until LangChain's lenient parser gives up on them.
_UNREADABLE = " "  # and yet what a JSON text may begin with
_POISONS = ('"]', '"}', '""]', '""}', "]", "}")


def messages_from_langchain(messages: Iterable[BaseMessage]) -> tuple[Message, ...]:
    """Convert a history.

    Reasoning is taken from `additional_kwargs["reasoning_content"]` and from content blocks, calls
    also from Anthropic's `tool_use` blocks, and our own calls that did not parse come back with the
    text that was generated.

    Raises:
        UnsupportedParameterError: A role or a content block (an image, say) that we cannot read.
    """
    return messages_from_openai([_openai_message(message) for message in messages])


def _openai_message(message: BaseMessage) -> dict[str, object]:
    converted: dict[str, object] = {
        "role": _role(message),
        "content": message.content,
        "name": message.name,
    }
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
    elif isinstance(message, AIMessage):
        converted.update(_assistant_fields(message))
    return converted


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    return _ROLES.get(message.type.removesuffix("MessageChunk"), message.type)


def _assistant_fields(message: AIMessage) -> dict[str, object]:
    calls = [_openai_call(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    known_ids = {call["id"] for call in message.tool_calls}
    for block in message.content if isinstance(message.content, list) else ():
        key = _CALL_BLOCKS.get(block.get("type", "")) if isinstance(block, dict) else None
        if key is not None and isinstance(block, dict) and block.get("id") not in known_ids:
            calls.append(_openai_call(block.get("id"), block.get("name"), block.get(key)))
    return {
        "dlite": message.response_metadata.get("dlite"),
        "reasoning_content": message.additional_kwargs.get("reasoning_content"),
        "tool_calls": calls + _unparsed_calls(message),
    }


def _unparsed_calls(message: AIMessage) -> list[dict[str, object]]:
    """Calls that did not parse; ours with the region's text, which the stream could only mangle."""
    ours = message.response_metadata.get("dlite") or {}
    texts = {item["id"]: item["text"] for item in ours.get("unparsed", ())}
    return [
        _openai_call(call["id"], call["name"], texts.get(call["id"], call["args"]) or "")
        for call in message.invalid_tool_calls
    ]


def _openai_call(call_id: object, name: object, arguments: object) -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def message_from_generation(generation: Generation, model_name: str) -> AIMessage:
    """The whole answer as one message."""
    message = generation.message
    invalid = [
        invalid_tool_call(name=item.name, args=item.text, id=item.id, error=item.error)
        for item in generation.unparsed
    ]
    return AIMessage(
        content=message.content,
        additional_kwargs={"reasoning_content": message.reasoning} if message.reasoning else {},
        tool_calls=[
            tool_call(name=call.name, args=cast(dict[str, Any], call.arguments), id=call.id)
            for call in message.tool_calls
        ],
        invalid_tool_calls=invalid,
        usage_metadata=_usage(generation),
        response_metadata={**_response_metadata(generation, model_name), **_logprobs(generation)},
    )


def chat_result(generations: Sequence[Generation], model_name: str) -> ChatResult:
    """All answers of a call."""
    messages = [message_from_generation(generation, model_name) for generation in generations]
    return ChatResult(generations=[ChatGeneration(message=message) for message in messages])


class ChunkWriter:
    """Turns one turn's chunks into LangChain's; keep one for each turn.

    LangChain puts streamed calls together itself and reads them leniently: whatever begins with a
    brace becomes a call, so that one that was cut inside a string would be a shorter call that
    runs. No way to split the arguments avoids that. So a call's first piece has its name, and
    arguments that nobody can read; the arguments come when the turn has ended, all at once, and
    until then there are empty chunks, signs of life. What a reader merges who leaves before is in
    `invalid_tool_calls`. A call that is none gets a last piece that no reading can repair, and ends
    up there too.

    Args:
        model: Whose name is in the metadata; a server is asked for it once the turn has ended.
        output_version: The chat model's. Under `"v1"` core numbers the blocks of text and reasoning
            from 0 and merges equal numbers, so calls are numbered far above.
        streams_arguments: Send arguments as they come. What is merged of a stream that was left has
            calls that were cut.
    """

    def __init__(
        self,
        model: ChatBackend,
        output_version: str | None = None,
        *,
        streams_arguments: bool = False,
    ) -> None:
        self._model = model
        self._streams_arguments = streams_arguments
        self._first_index = 1_000 if output_version == "v1" else 0
        self._arguments: list[str] = []
        self._ids: list[str | None] = []

    def write(self, chunk: GenerationChunk) -> Iterator[ChatGenerationChunk]:
        """One chunk a delta, and one for log-probabilities; the last one has the other metadata.

        It is marked with `chunk_position="last"`.
        """
        for delta in chunk.deltas:
            if isinstance(delta, TextDelta):
                yield _chunk(AIMessageChunk(content=delta.text))
            elif isinstance(delta, ReasoningDelta):
                reasoning = {"reasoning_content": delta.text}
                yield _chunk(AIMessageChunk(content="", additional_kwargs=reasoning))
            else:
                yield _chunk(AIMessageChunk(content="", tool_call_chunks=self._pieces(delta)))
        if chunk.logprobs:
            logprobs = {"logprobs": logprobs_to_openai(chunk.logprobs)}
            yield _chunk(AIMessageChunk(content="", response_metadata=logprobs))
        generation = chunk.generation
        if generation is None:
            return
        pieces = self._held_arguments(generation.unparsed)
        pieces += [self._poison(item) for item in generation.unparsed]
        if pieces:
            yield _chunk(AIMessageChunk(content="", tool_call_chunks=pieces))
        last = AIMessageChunk(
            content="",
            usage_metadata=_usage(generation),
            response_metadata=_response_metadata(generation, self._model.model_name),
            chunk_position="last",
        )
        yield _chunk(last)

    def _pieces(self, delta: ToolCallDelta) -> list[ToolCallChunk]:
        if delta.name is not None:
            self._arguments.append(delta.arguments)
            self._ids.append(delta.id)
        else:
            self._arguments[delta.index] += delta.arguments
        args = delta.arguments
        if not self._streams_arguments:
            if delta.name is None:
                return []
            args = _UNREADABLE
        index = self._first_index + delta.index
        return [tool_call_chunk(name=delta.name, args=args, id=delta.id, index=index)]

    def _held_arguments(self, unparsed: Sequence[UnparsedToolCall]) -> list[ToolCallChunk]:
        """The arguments of all calls that are calls."""
        if self._streams_arguments:
            return []
        broken = {item.id for item in unparsed}
        return [
            tool_call_chunk(name=None, args=args, id=None, index=self._first_index + number)
            for number, (call_id, args) in enumerate(zip(self._ids, self._arguments, strict=True))
            if call_id not in broken
        ]

    def _poison(self, item: UnparsedToolCall) -> ToolCallChunk:
        if item.id in self._ids:
            number = self._ids.index(item.id)
            if self._streams_arguments:
                args = _poison_for(self._arguments[number])
            else:
                args = item.text + _poison_for(_UNREADABLE + item.text)
            return tool_call_chunk(name=None, args=args, id=None, index=self._first_index + number)
        self._ids.append(item.id)
        self._arguments.append(item.text)
        args = item.text + _poison_for(item.text)
        index = self._first_index + len(self._ids) - 1
        return tool_call_chunk(name=item.name or "", args=args, id=item.id, index=index)


def _poison_for(arguments: str) -> str:
    """A suffix that keeps LangChain from reading the arguments as an object."""
    return next(poison for poison in _POISONS if not _reads_as_object(arguments + poison))


def _reads_as_object(arguments: str) -> bool:
    try:
        return isinstance(parse_partial_json(arguments), dict)
    except ValueError:
        return False


def _chunk(message: AIMessageChunk) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=message)


def _usage(generation: Generation) -> UsageMetadata:
    stats = generation.stats
    return UsageMetadata(
        input_tokens=stats.prompt_tokens,
        output_tokens=stats.completion_tokens,
        total_tokens=stats.prompt_tokens + stats.completion_tokens,
        input_token_details={"cache_read": stats.cached_tokens},
        output_token_details={"reasoning": stats.reasoning_tokens},
    )


def _logprobs(generation: Generation) -> dict[str, Any]:
    if not generation.logprobs:
        return {}
    return {"logprobs": logprobs_to_openai(generation.logprobs)}


def _response_metadata(generation: Generation, model_name: str) -> dict[str, Any]:
    turn = _plain(asdict(generation.stats))
    if generation.unparsed:
        turn["unparsed"] = _plain([asdict(item) for item in generation.unparsed])
    if generation.matched_stop is not None:
        turn["matched_stop"] = generation.matched_stop
    return {
        "model_name": model_name,
        "model_provider": "dlite",
        "finish_reason": generation.finish_reason,
        "dlite": turn,
    }


def _plain(value: Mapping[str, object] | Sequence[object]) -> Any:
    """Lists for tuples, as a checkpointer would give them back."""
    return json.loads(json.dumps(value))
