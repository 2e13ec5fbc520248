"""`/v1/completions`: texts or token ids in, text out, no template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.openai_sampling import (
    num_choices_from_openai,
    sampling_from_openai,
    stop_from_openai,
)
from dlite_agent.engine.session_tasks import Decoded, Detokenize
from dlite_agent.errors import RequestError, UnsupportedParameterError
from dlite_agent.serving.answers import Asked, answered
from dlite_agent.serving.caller import session_hint
from dlite_agent.serving.chat_request import answer_form
from dlite_agent.serving.completion_response import CompletionStreamWriter, completion_answer
from dlite_agent.serving.openai_schema import CompletionBody, DLiteOptions
from dlite_agent.serving.questions import ask
from dlite_agent.serving.service import ServingService

__all__ = ["answer_completion"]

JSONObject = dict[str, Any]
_DEFAULT_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 2048


async def answer_completion(service: ServingService, http: Request) -> Response:
    """Answer a request, in one piece or in events."""
    echoes: list[str] = []  # the prompts' texts, where the answers begin with them

    def build(given: JSONObject, tenant: str) -> tuple[CompletionBody, Asked]:
        body = CompletionBody.model_validate(given)
        form = answer_form(body, service.served_name(body.model))
        requests = _requests(body, tenant, session_hint(http.headers, given))
        num_choices = requests[0].num_choices
        asked = Asked(
            requests,
            form.is_stream and not requests[0].is_partial,
            lambda: CompletionStreamWriter(form, num_choices, echoes),
            lambda generations: completion_answer(form, num_choices, generations, echoes),
        )
        return body, asked

    body, asked = await service.read(http, build)
    if body.echo:
        echoes.extend([await _text(service, request.prompt) for request in asked.requests])
    return await answered(service, http, asked)


async def _text(service: ServingService, prompt: str | tuple[int, ...] | None) -> str:
    if isinstance(prompt, tuple):
        return (await ask(service, Detokenize(prompt), Decoded)).text
    return prompt or ""


def _requests(body: CompletionBody, tenant: str, hint: str | None) -> list[ChatRequest]:
    """One request a prompt; of several, none has a session's name: they are no conversation."""
    given: JSONObject = body.model_dump(exclude_none=True, exclude={"prompt"})
    _refuse(given)
    options = body.dlite or DLiteOptions()
    num_logprobs = given.pop("logprobs", None)
    if "max_tokens" not in body.model_fields_set:  # null is what the context leaves, as for vLLM
        given["max_tokens"] = _DEFAULT_TOKENS
    sampling = replace(sampling_from_openai(given), choice_index=options.choice_index)
    if num_logprobs is not None:
        sampling = replace(sampling, logprobs=True, top_logprobs=num_logprobs)
    prompts = _prompts(body.prompt)
    if not all(prompts):  # told before the answer to another one begins
        raise RequestError("prompt is empty; send at least one token")
    num_choices = num_choices_from_openai(given.get("n"))
    if len(prompts) * num_choices > _MAX_CHOICES:
        raise UnsupportedParameterError(
            f"prompt is a list of {len(prompts)} prompts and n is {num_choices!r}; ask for at most "
            f"{_MAX_CHOICES} answers a request"
        )
    return [
        ChatRequest(
            (),
            prompt=prompt,
            sampling=sampling,
            session_hint=hint if len(prompts) == 1 else None,
            tenant=tenant,
            stop=stop_from_openai(given.get("stop")),
            is_partial=options.is_partial,
            num_choices=num_choices,
            when_full="wait",
        )
        for prompt in prompts
    ]


def _refuse(given: JSONObject) -> None:
    """What we would have to ignore although it matters."""
    for name, default in (("suffix", ""), ("best_of", given.get("n", 1))):
        if given.get(name, default) != default:
            raise UnsupportedParameterError(f"{name} is {given[name]!r}; leave it out")
    if given.get("echo") and given.get("logprobs") is not None:
        raise UnsupportedParameterError(
            f"logprobs is {given['logprobs']!r} with echo, but the log-probabilities of a prompt "
            "are not kept; leave out one of them"
        )


def _prompts(given: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    """One text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        return [()]
    ids = tuple(token_id for token_id in given if isinstance(token_id, int))
    if ids:
        return [ids]
    return [
        prompt if isinstance(prompt, str) else tuple(prompt)
        for prompt in given
        if not isinstance(prompt, int)
    ]
