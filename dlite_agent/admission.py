"""From a request to a prompt: what is refused, what is replayed, and how it will be sampled."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.message_keys import seed_key
from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.chat.replay import ReplayPlan, plan_replay
from dlite_agent.config import HistoryMode, SamplingParams
from dlite_agent.errors import (
    ContextLengthExceededError,
    RequestError,
    UnsupportedParameterError,
)
from dlite_agent.loading import LoadedModel

__all__ = ["AdmittedRequest", "admit", "plan_history"]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that can run.

    Attributes:
        request: As it came.
        plan: Which assistant turns are spliced; its key is what the answer's keys continue.
        prompt: The ids.
        sampling: Resolved: no field is None.
    """

    request: ChatRequest
    plan: ReplayPlan
    prompt: RenderedPrompt
    sampling: SamplingParams

    @property
    def turn_start(self) -> int | None:
        """Where the generation prompt begins; None where the template hides that."""
        segments = self.prompt.segments
        return segments[-1].start if segments and segments[-1].message_index is None else None


def admit(model: LoadedModel, request: ChatRequest) -> AdmittedRequest:
    """Check a request, decide what is replayed, and render it.

    Raises:
        RequestError: There is no message, or the template refuses them.
        UnsupportedParameterError: Something that we would have to ignore.
        ContextLengthExceededError: Prompt and answer do not fit the context.
    """
    _check(request, model.target.config.vocab_size)
    seed = seed_key(request.tools, request.template_kwargs)
    plan = plan_history(model, request.messages, seed, request.history)
    prompt = model.renderer.render(
        request.messages,
        request.tools,
        template_kwargs=request.template_kwargs,
        splices=plan.splices,
    )
    sampling = _resolve(request.sampling, model, len(prompt.token_ids))
    return AdmittedRequest(request, plan, prompt, sampling)


def plan_history(
    model: LoadedModel,
    messages: tuple[Message, ...],
    seed: bytes,
    history: HistoryMode | None = None,
) -> ReplayPlan:
    """What is spliced. The `prefix` baseline renders everything as it was received.

    Args:
        model: Its journal knows the earlier turns.
        messages: The request's.
        seed: `message_keys.seed_key` of the request.
        history: Overrides the engine's mode.
    """
    mode = "template" if model.config.reuse == "prefix" else history or model.config.history
    return plan_replay(
        messages,
        seed,
        model.journal,
        handles=model.handles,
        mode=mode,
        strips_thoughts=model.renderer.strips_thoughts,
    )


def _check(request: ChatRequest, vocab_size: int) -> None:
    if not request.messages:
        raise RequestError("messages is empty; send at least one message")
    if request.stop:
        raise UnsupportedParameterError(
            f"stop={request.stop!r}: stop strings are not supported yet; leave them out and cut "
            "the text yourself, or pass stop_token_ids"
        )
    for token_id in request.sampling.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise UnsupportedParameterError(
                f"stop_token_ids has {token_id!r}, but ids are in [0, {vocab_size}); take ids of "
                "this model's tokenizer"
            )
    names = [tool.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise RequestError(f"tools has a name twice: {names!r}; give each tool its own name")


def _resolve(params: SamplingParams, model: LoadedModel, num_prompt: int) -> SamplingParams:
    """Fill what the request left open, and see that prompt and answer fit the context."""
    room = model.max_context - num_prompt
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if room < max(1, max_tokens):
        raise ContextLengthExceededError(
            num_prompt, max(1, max_tokens), model.max_context, model.how_to_raise_context
        )
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return replace(params, max_tokens=max_tokens, seed=seed).with_defaults(model.defaults)
