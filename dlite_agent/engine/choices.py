"""Several answers to one request: as many turns, alike but for their noise."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace

from dlite_agent.backend import ChatRequest
from dlite_agent.errors import RequestError
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["answers_in_order", "split_choices"]

_MAX_CHOICES = 128  # OpenAI's limit


def split_choices(request: ChatRequest) -> list[ChatRequest]:
    """One request for each choice; they share a seed, and keep `num_choices`.

    Raises:
        RequestError: The number of choices is none.
    """
    count, sampling = request.num_choices, request.sampling
    if not 1 <= count <= _MAX_CHOICES:
        raise RequestError(f"num_choices is {count!r}; ask for 1 to {_MAX_CHOICES}")
    if count == 1:
        return [request]
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return [
        replace(
            request,
            sampling=replace(sampling, seed=seed, choice_index=sampling.choice_index + index),
        )
        for index in range(count)
    ]


def answers_in_order(chunks: Iterable[GenerationChunk]) -> list[Generation]:
    """The whole answers among some chunks, by their choice's number.

    Raises:
        RequestError: There is none: the request was a partial one.
    """
    answers = {c.choice_index: c.generation for c in chunks if c.generation is not None}
    if not answers:  # a turn that was not cancelled ends with its answer
        raise RequestError("is_partial=True has no answer; read its stream to the end instead")
    return [answers[index] for index in sorted(answers)]
