"""Answers of `/v1/completions` and their chunks, in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dlite_agent.chat.logprobs import TokenLogprob, logprobs_to_openai
from dlite_agent.chat.messages import TextDelta
from dlite_agent.outputs import Generation, GenerationChunk, turn_figures, usage_to_openai
from dlite_agent.serving.chat_request import AnswerForm
from dlite_agent.serving.chat_response import answer_head

__all__ = ["CompletionStreamWriter", "completion_answer"]

JSONObject = dict[str, Any]
_KIND = "text_completion"
_LOWEST = -9999.0


def completion_answer(
    form: AnswerForm, num_choices: int, generations: Sequence[Generation], echoes: Sequence[str]
) -> JSONObject:
    """A whole answer: the choices of the first prompt, then those of the second, and so on.

    Args:
        form: How it is asked for.
        num_choices: Of each prompt.
        generations: All of them, in order; none of a request that is partial.
        echoes: The prompts' texts, where the answers begin with them; else empty.
    """
    head = answer_head(form, "cmpl", _KIND)
    if not generations:
        return {**head, "choices": []}
    choices = []
    for index, generation in enumerate(generations):
        echo = echoes[index // num_choices] if echoes else ""
        choice = _choice(form, index, echo + generation.message.content, generation.logprobs, 0)
        if form.returns_token_ids:
            choice["token_ids"] = list(generation.token_ids)
        choices.append(choice | _end(form, generation))
    return {**head, "choices": choices, "usage": _usage(num_choices, generations)}


class CompletionStreamWriter:
    """Turns the chunks of one answer into OpenAI's.

    Until the last chunk of a choice its reason is null, as OpenAI and vLLM send it; openai-python's
    type of a chunk knows no null, which nobody notices but its strict validation.

    Args:
        form: How it is asked for.
        num_choices: Of each prompt.
        echoes: See `completion_answer`.
    """

    def __init__(self, form: AnswerForm, num_choices: int, echoes: Sequence[str]) -> None:
        self._form = form
        self._head = answer_head(form, "cmpl", _KIND)
        if form.includes_usage:
            self._head["usage"] = None  # as OpenAI: null until the last
        self._num_choices = num_choices
        self._echoes = echoes
        self._offsets: dict[int, int] = {}
        self._generations: dict[int, Generation] = {}

    def begin(self) -> Iterator[JSONObject]:
        """The prompts' texts, where they are asked for."""
        for number, echo in enumerate(self._echoes):
            for index in range(number * self._num_choices, (number + 1) * self._num_choices):
                yield self._chunk(_choice(self._form, index, echo, (), 0))

    def write(self, chunk: GenerationChunk) -> Iterator[JSONObject]:
        """One chunk for what is new, and one for the end of a choice."""
        index = chunk.choice_index
        text = "".join(delta.text for delta in chunk.deltas if isinstance(delta, TextDelta))
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        if text or chunk.token_ids:
            choice = _choice(self._form, index, text, chunk.logprobs, offset)
            if self._form.returns_token_ids:
                choice["token_ids"] = list(chunk.token_ids)
            yield self._chunk(choice)
        if chunk.generation is not None:
            self._generations[index] = chunk.generation
            choice = _choice(self._form, index, "", (), 0)
            yield self._chunk(choice | _end(self._form, chunk.generation))

    def finish(self) -> Iterator[JSONObject]:
        """The usage, where it was asked for."""
        if self._form.includes_usage and self._generations:
            generations = [self._generations[index] for index in sorted(self._generations)]
            usage = _usage(self._num_choices, generations)
            yield {**self._head, "choices": [], "usage": usage}

    def _chunk(self, choice: JSONObject) -> JSONObject:
        return {**self._head, "choices": [choice]}


def _choice(
    form: AnswerForm, index: int, text: str, logprobs: Sequence[TokenLogprob], offset: int
) -> JSONObject:
    described = _logprobs(form, logprobs, offset) if logprobs else None
    return {"index": index, "text": text, "logprobs": described, "finish_reason": None}


def _end(form: AnswerForm, generation: Generation) -> JSONObject:
    """What only the last chunk of a choice has."""
    end: JSONObject = {"finish_reason": generation.finish_reason, "dlite": turn_figures(generation)}
    if form.returns_token_ids:
        end["prompt_token_ids"] = list(generation.prompt_token_ids)
    return end


def _usage(num_choices: int, generations: Sequence[Generation]) -> JSONObject:
    """The sums over all prompts."""
    total: JSONObject = {}
    for start in range(0, len(generations), num_choices):
        total = _sum(total, usage_to_openai(generations[start : start + num_choices]))
    return total


def _sum(total: JSONObject, usage: JSONObject) -> JSONObject:
    return {
        name: _sum(total.get(name, {}), value)
        if isinstance(value, dict)
        else total.get(name, 0) + value
        for name, value in usage.items()
    }


def _logprobs(form: AnswerForm, logprobs: Sequence[TokenLogprob], offset: int) -> JSONObject:
    """The form of the completions API: one list a figure.

    Who asks for token ids gets the chat's form beside it, as that has room for ids and bytes.

    Args:
        form: How the answer is asked for.
        logprobs: One a token.
        offset: Characters of the answer before them.
    """
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    described: JSONObject = {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [max(token.logprob, _LOWEST) for token in logprobs],
        "top_logprobs": [
            {other.text: max(other.logprob, _LOWEST) for other in token.top} for token in logprobs
        ],
        "text_offset": offsets,
    }
    if form.returns_token_ids:
        described |= logprobs_to_openai(logprobs, with_ids=True)
    return described
