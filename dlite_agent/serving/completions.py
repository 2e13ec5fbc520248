"""`/v1/completions`: text or token ids in, text out, no template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.logprobs import TokenLogprob
from dlite_agent.chat.messages import TextDelta
from dlite_agent.chat.openai_sampling import (
    num_choices_from_openai,
    sampling_from_openai,
    stop_from_openai,
)
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.outputs import Generation, GenerationChunk, usage_to_openai
from dlite_agent.serving.answers import collected, streamed
from dlite_agent.serving.caller import session_hint
from dlite_agent.serving.chat_request import AnswerForm, answer_form
from dlite_agent.serving.chat_response import answer_head
from dlite_agent.serving.openai_schema import CompletionBody
from dlite_agent.serving.service import ServingService

__all__ = ["answer_completion"]

JSONObject = dict[str, Any]
_KIND = "text_completion"
_DEFAULT_TOKENS = 16  # OpenAI's


async def answer_completion(service: ServingService, http: Request) -> Response:
    """Answer a request, in one piece or in events."""
    given, tenant = await service.read(http)
    service.check_ready()
    body = CompletionBody.model_validate(given)
    form = answer_form(body, service.served_name(body.model))
    request = _request(body, tenant, session_hint(http.headers, given))
    turn = service.start(request)
    turn.watch(http.receive)
    if form.is_stream:
        return await streamed(turn, _StreamWriter(form), service.settings)
    return await collected(turn, lambda answers: _answer(form, answers))


def _request(body: CompletionBody, tenant: str, hint: str | None) -> ChatRequest:
    given: JSONObject = body.model_dump(exclude_none=True)
    for name, default in (("echo", False), ("suffix", ""), ("best_of", given.get("n", 1))):
        if given.get(name, default) != default:
            raise UnsupportedParameterError(f"{name} is {given[name]!r}; leave it out")
    num_logprobs = given.pop("logprobs", None)
    sampling = sampling_from_openai({"max_tokens": _DEFAULT_TOKENS, **given})
    if num_logprobs is not None:
        sampling = replace(sampling, logprobs=True, top_logprobs=num_logprobs)
    return ChatRequest(
        (),
        prompt=_prompt(body.prompt),
        sampling=sampling,
        session_hint=hint,
        tenant=tenant,
        stop=stop_from_openai(given.get("stop")),
        num_choices=num_choices_from_openai(given.get("n")),
        when_full="wait",
    )


def _prompt(given: str | Sequence[Any]) -> str | tuple[int, ...]:
    """A text or ids; a list of one prompt is that prompt."""
    if isinstance(given, str):
        return given
    if given and not isinstance(given[0], int):
        if len(given) > 1:
            raise UnsupportedParameterError(
                f"prompt is a list of {len(given)} prompts; send one a request, at the same time"
            )
        return _prompt(given[0])
    return tuple(given)


class _StreamWriter:
    """Turns the chunks of one answer into OpenAI's."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        self._head = answer_head(form, "cmpl", _KIND)
        self._offsets: dict[int, int] = {}
        self._generations: dict[int, Generation] = {}

    def begin(self) -> Iterator[JSONObject]:
        yield from ()

    def write(self, chunk: GenerationChunk) -> Iterator[JSONObject]:
        index = chunk.choice_index
        text = "".join(delta.text for delta in chunk.deltas if isinstance(delta, TextDelta))
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        if text or chunk.token_ids:
            choice = _choice(index, text, chunk.logprobs, offset)
            if self._form.returns_token_ids:
                choice["token_ids"] = list(chunk.token_ids)
            yield {**self._head, "choices": [choice]}
        if chunk.generation is not None:
            self._generations[index] = chunk.generation
            choice = _choice(index, "", (), 0)
            choice["finish_reason"] = chunk.generation.finish_reason
            if self._form.returns_token_ids:
                choice["prompt_token_ids"] = list(chunk.generation.prompt_token_ids)
            yield {**self._head, "choices": [choice]}

    def finish(self) -> Iterator[JSONObject]:
        if self._form.includes_usage and self._generations:
            usage = usage_to_openai(list(self._generations.values()))
            yield {**self._head, "choices": [], "usage": usage}


def _answer(form: AnswerForm, generations: Sequence[Generation]) -> JSONObject:
    choices = []
    for index, generation in enumerate(generations):
        choice = _choice(index, generation.message.content, generation.logprobs, 0)
        choice["finish_reason"] = generation.finish_reason
        if form.returns_token_ids:
            choice["token_ids"] = list(generation.token_ids)
            choice["prompt_token_ids"] = list(generation.prompt_token_ids)
        choices.append(choice)
    head = answer_head(form, "cmpl", _KIND)
    return {**head, "choices": choices, "usage": usage_to_openai(generations)}


def _choice(index: int, text: str, logprobs: Sequence[TokenLogprob], offset: int) -> JSONObject:
    described = _logprobs(logprobs, offset) if logprobs else None
    return {"index": index, "text": text, "logprobs": described, "finish_reason": None}


def _logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> JSONObject:
    """The form of the completions API: one list a figure.

    Args:
        logprobs: One a token.
        offset: Characters of the answer before them.
    """
    offsets = []
    for token in logprobs:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in logprobs],
        "token_logprobs": [max(token.logprob, -9999.0) for token in logprobs],
        "top_logprobs": [
            {other.text: max(other.logprob, -9999.0) for other in token.top} for token in logprobs
        ],
        "text_offset": offsets,
    }
