"""Answers and their chunks in OpenAI's form. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from dlite_agent.chat.logprobs import logprobs_to_openai
from dlite_agent.chat.messages import Delta, ReasoningDelta, TextDelta
from dlite_agent.chat.openai_format import message_to_openai
from dlite_agent.outputs import Generation, GenerationChunk, turn_figures, usage_to_openai
from dlite_agent.serving.chat_request import AnswerForm

__all__ = ["ChatStreamWriter", "answer_head", "chat_answer"]

JSONObject = dict[str, Any]


def answer_head(form: AnswerForm, prefix: str, kind: str) -> JSONObject:
    """The fields that all chunks of an answer share.

    Args:
        form: Names the model.
        prefix: Of the random id.
        kind: The object's type.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(datetime.now(UTC).timestamp()),
        "model": form.model,
    }


def chat_answer(form: AnswerForm, generations: Sequence[Generation]) -> JSONObject:
    """A whole answer; each message has its turn's figures under `dlite`.

    Args:
        form: How it is asked for.
        generations: All choices; none of a request that is partial.
    """
    head = answer_head(form, "chatcmpl", "chat.completion")
    if not generations:
        return {**head, "choices": []}
    choices = [_choice(form, index, answer) for index, answer in enumerate(generations)]
    answer = {**head, "choices": choices, "usage": usage_to_openai(generations)}
    if form.returns_token_ids:
        answer["prompt_token_ids"] = list(generations[0].prompt_token_ids)
    return answer


class ChatStreamWriter:
    """Turns the chunks of one answer into OpenAI's, as its clients want them.

    One id and one time in all of them; the role first; a call's name once, before its arguments;
    the reason alone in a choice's last chunk; the usage behind all, where it was asked for. What
    OpenAI has no field for, a turn's figures, stands under `dlite` in a delta before the last.
    """

    def __init__(self, form: AnswerForm, num_choices: int) -> None:
        self._form = form
        self._head = answer_head(form, "chatcmpl", "chat.completion.chunk")
        if form.includes_usage:
            self._head["usage"] = None  # as OpenAI: null until the last
        self._num_choices = num_choices
        self._generations: dict[int, Generation] = {}

    def begin(self) -> Iterator[JSONObject]:
        """One chunk a choice, with its role."""
        for index in range(self._num_choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def write(self, chunk: GenerationChunk) -> Iterator[JSONObject]:
        """One chunk a delta, and for the end of a choice two."""
        index = chunk.choice_index
        extra: JSONObject = {}
        if chunk.logprobs:
            extra["logprobs"] = logprobs_to_openai(
                chunk.logprobs, with_ids=self._form.returns_token_ids
            )
        if self._form.returns_token_ids and chunk.token_ids:
            extra["token_ids"] = list(chunk.token_ids)
        deltas = [piece for delta in chunk.deltas for piece in _pieces(delta)]
        if extra and not deltas:
            deltas = [{}]
        for delta in deltas:
            yield self._chunk(index, delta, **extra)
            extra = {}
        if chunk.generation is not None:
            yield from self._end(index, chunk.generation)

    def finish(self) -> Iterator[JSONObject]:
        """The usage, where it was asked for."""
        if self._form.includes_usage and self._generations:
            usage = usage_to_openai(list(self._generations.values()))
            yield {**self._head, "choices": [], "usage": usage}

    def _end(self, index: int, generation: Generation) -> Iterator[JSONObject]:
        self._generations[index] = generation
        figures = self._chunk(index, {"dlite": turn_figures(generation)})
        if self._form.returns_token_ids:
            figures["prompt_token_ids"] = list(generation.prompt_token_ids)
        yield figures
        yield self._chunk(index, {}, finish_reason=generation.finish_reason)

    def _chunk(self, index: int, delta: JSONObject, **fields: Any) -> JSONObject:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {**self._head, "choices": [choice]}


def _choice(form: AnswerForm, index: int, generation: Generation) -> JSONObject:
    message: JSONObject = {
        **message_to_openai(generation.message),
        "dlite": turn_figures(generation),
    }
    choice: JSONObject = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": generation.finish_reason,
    }
    if generation.logprobs:
        choice["logprobs"] = logprobs_to_openai(
            generation.logprobs, with_ids=form.returns_token_ids
        )
    if form.returns_token_ids:
        choice["token_ids"] = list(generation.token_ids)
    return choice


def _pieces(delta: Delta) -> Iterator[JSONObject]:
    """A delta; the first one of a call has its name and no arguments."""
    if isinstance(delta, TextDelta):
        yield {"content": delta.text}
        return
    if isinstance(delta, ReasoningDelta):
        yield {"reasoning_content": delta.text}
        return
    if delta.id is not None:
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        yield {"tool_calls": [call]}
    if delta.arguments:
        yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
