"""Our turns as LiteLLM's responses and stream chunks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from litellm.types.utils import (
    Choices,
    Delta,
    Message,
    ModelResponse,
    ModelResponseStream,
    StreamingChoices,
    Usage,
)

from dlite_agent.chat.logprobs import logprobs_to_openai
from dlite_agent.chat.messages import Delta as OurDelta
from dlite_agent.chat.messages import ReasoningDelta, TextDelta
from dlite_agent.chat.openai_format import message_to_openai
from dlite_agent.outputs import Generation, GenerationChunk, turn_figures, usage_to_openai

__all__ = ["StreamWriter", "fill_response"]


def fill_response(
    response: ModelResponse, generations: Sequence[Generation], model_name: str
) -> ModelResponse:
    """Fill LiteLLM's empty response with all answers; returns it.

    Each message has the turn's figures in `provider_specific_fields["dlite"]`.
    """
    response.model = model_name
    response.choices = [_choice(index, answer) for index, answer in enumerate(generations)]
    response.usage = _usage(generations)  # type: ignore[attr-defined]  # by its constructor
    return response


class StreamWriter:
    """Turns one turn's chunks into LiteLLM's; keep one for each turn.

    LiteLLM stops reading after the chunk with the finish reason, and counts tokens itself where it
    saw no usage: the usage therefore comes in an empty chunk before it.

    Args:
        response_id: The same in every chunk.
        model_name: For the chunks.
    """

    def __init__(self, response_id: str, model_name: str) -> None:
        self._id = response_id
        self._model_name = model_name
        self._role: str | None = "assistant"

    def write(self, chunk: GenerationChunk) -> Iterator[ModelResponseStream]:
        """One chunk a delta, one for log-probabilities; behind the last, usage and finish."""
        for delta in chunk.deltas:
            yield self._chunk(StreamingChoices(delta=_delta(delta)))
        if chunk.logprobs:
            logprobs = logprobs_to_openai(chunk.logprobs)
            yield self._chunk(StreamingChoices(delta=Delta(content=""), logprobs=logprobs))
        if chunk.generation is None:
            return
        own = {"dlite": turn_figures(chunk.generation)}
        figures = StreamingChoices(delta=Delta(provider_specific_fields=own))
        yield self._chunk(figures, usage=_usage([chunk.generation]))
        reason = chunk.generation.finish_reason
        yield self._chunk(StreamingChoices(delta=Delta(), finish_reason=reason))

    def _chunk(self, choice: StreamingChoices, **fields: Any) -> ModelResponseStream:
        choice.delta.role, self._role = self._role, None  # as OpenAI: in the first chunk
        return ModelResponseStream(choices=[choice], id=self._id, model=self._model_name, **fields)


def _choice(index: int, generation: Generation) -> Choices:
    message: dict[str, Any] = {**message_to_openai(generation.message)}
    logprobs = logprobs_to_openai(generation.logprobs) if generation.logprobs else None
    return Choices(
        finish_reason=generation.finish_reason,
        index=index,
        message=Message(**message, provider_specific_fields={"dlite": turn_figures(generation)}),
        logprobs=logprobs,
    )


def _delta(delta: OurDelta) -> Delta:
    if isinstance(delta, TextDelta):
        return Delta(content=delta.text)
    if isinstance(delta, ReasoningDelta):
        return Delta(reasoning_content=delta.text)
    function = {"name": delta.name, "arguments": delta.arguments}
    call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return Delta(tool_calls=[call])


def _usage(generations: Sequence[Generation]) -> Usage:
    figures: dict[str, Any] = usage_to_openai(generations)
    reasoning_tokens = figures.pop("completion_tokens_details")["reasoning_tokens"]
    return Usage(**figures, reasoning_tokens=reasoning_tokens)
