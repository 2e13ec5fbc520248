"""From a request to a prompt: what is refused, what is replayed, and how it will be sampled."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.message_keys import seed_key
from dlite_agent.chat.messages import Message
from dlite_agent.chat.past_requests import PastRequest
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.chat.replay import ReplayPlan, plan_replay
from dlite_agent.chat.stop_strings import StopStrings
from dlite_agent.chat.template import thought_closing
from dlite_agent.config import HistoryMode, SamplingParams
from dlite_agent.decoding.constraint import Constraint
from dlite_agent.decoding.thoughts import ThoughtBudget
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.session_tasks import Tokenize
from dlite_agent.engine.tenant_memory import TenantMemory
from dlite_agent.errors import (
    ContextLengthExceededError,
    RequestError,
    UnsupportedParameterError,
)
from dlite_agent.sessions.public import PUBLIC

__all__ = ["AdmittedRequest", "admit", "plan_history", "prompt_ids"]


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that can run.

    Attributes:
        request: As it came, but for its tools, which are in the form that came first.
        memory: Of its tenant.
        sent: What came, to tell what is different the next time.
        plan: Which assistant turns are spliced; its key is what the answer's keys continue.
        prompt: The ids.
        sampling: Resolved: no field is None, but that of a budget that was not asked for.
        stops: Stop strings, compiled; None without any.
        stop_controls: Ids of control tokens that a stop string spells, and that string: the token
            ends the turn.
        thoughts: The thinking budget; None is no limit.
        constraint: Grammar of the turn, at its start; None allows every token.
    """

    request: ChatRequest
    memory: TenantMemory
    sent: PastRequest
    plan: ReplayPlan
    prompt: RenderedPrompt
    sampling: SamplingParams
    stops: StopStrings | None = None
    stop_controls: Mapping[int, str] = field(default_factory=dict)
    thoughts: ThoughtBudget | None = None
    constraint: Constraint | None = None

    @property
    def is_raw(self) -> bool:
        """Whether the prompt came as text or ids, and no message belongs to it."""
        return self.request.prompt is not None

    @property
    def turn_start(self) -> int | None:
        """Where the generation prompt begins; None where the template hides that."""
        segments = self.prompt.segments
        return segments[-1].start if segments and segments[-1].message_index is None else None


def admit(model: LoadedModel, request: ChatRequest) -> AdmittedRequest:
    """Check a request, decide what is replayed, and render it.

    Raises:
        RequestError: There is no message, the template refuses them, or the output rules cannot be
            followed.
        UnsupportedParameterError: Something that we would have to ignore, or a token id that does
            not exist.
        ContextLengthExceededError: Prompt and answer do not fit the context.
    """
    _check(request, model.target.config.vocab_size)
    if request.is_public:
        request = replace(request, tenant=PUBLIC)
    if request.prompt is not None:
        return _admit_raw(model, request)
    stops = StopStrings(request.stop) if request.stop else None
    memory = model.tenants.of(request.tenant)
    asked = request
    sent = PastRequest.of(request.messages, request.tools, request.template_kwargs)
    request, plan, prompt = _render(model, memory, request)
    sampling = _resolve(request.sampling, model, len(prompt.token_ids))
    return AdmittedRequest(
        request,
        memory,
        sent,
        plan,
        prompt,
        sampling,
        stops,
        _stop_controls(model, request.stop),
        _thought_budget(model, sampling.thinking_budget, prompt),
        model.grammars.constraint(asked, prompt),
    )


def prompt_ids(model: LoadedModel, task: Tokenize) -> tuple[int, ...]:
    """The ids of a request's prompt, as `admit` would make them.

    Raises:
        RequestError: There is no message, or the template refuses them.
    """
    request, memory = task.request, model.tenants.of(task.request.tenant)
    if request.prompt is not None:
        return _raw_ids(model, request.prompt)
    *_, prompt = _render(model, memory, request, add_generation_prompt=task.add_generation_prompt)
    return prompt.token_ids


def _render(
    model: LoadedModel,
    memory: TenantMemory,
    request: ChatRequest,
    *,
    add_generation_prompt: bool = True,
) -> tuple[ChatRequest, ReplayPlan, RenderedPrompt]:
    """A request with its tools in the form that came first, what is spliced, and the prompt."""
    if model.config.reuse == "session":
        request = replace(request, tools=memory.tools.first_seen(request.tools))
    seed = seed_key(request.tools, request.template_kwargs)
    plan = plan_history(model, memory, request.messages, seed, request.history)
    prompt = memory.renderer.render(
        request.messages,
        request.tools,
        template_kwargs=request.template_kwargs,
        splices=plan.splices,
        add_generation_prompt=add_generation_prompt,
    )
    return request, plan, prompt


def plan_history(
    model: LoadedModel,
    memory: TenantMemory,
    messages: tuple[Message, ...],
    seed: bytes,
    history: HistoryMode | None = None,
) -> ReplayPlan:
    """What is spliced. The `prefix` baseline renders everything as it was received.

    Args:
        model: How it was loaded.
        memory: Its journal knows the earlier turns.
        messages: The request's.
        seed: `message_keys.seed_key` of the request.
        history: Overrides the engine's mode.
    """
    mode = "template" if model.config.reuse == "prefix" else history or model.config.history
    return plan_replay(
        messages,
        seed,
        memory.journal,
        handles=memory.handles,
        mode=mode,
        strips_thoughts=memory.renderer.strips_thoughts,
    )


def _admit_raw(model: LoadedModel, request: ChatRequest) -> AdmittedRequest:
    """The same for a prompt that no template makes."""
    assert request.prompt is not None
    memory = model.tenants.of(request.tenant)
    prompt = RenderedPrompt(_raw_ids(model, request.prompt))
    return AdmittedRequest(
        request,
        memory,
        PastRequest.of(()),
        plan_history(model, memory, (), seed_key((), {})),
        prompt,
        _resolve(request.sampling, model, len(prompt.token_ids)),
        StopStrings(request.stop) if request.stop else None,
        _stop_controls(model, request.stop),
    )


def _raw_ids(model: LoadedModel, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        prompt = tuple(model.tokenizer.encode_template(prompt))
    if not prompt:
        raise RequestError("prompt is empty; send at least one token")
    return prompt


def _check(request: ChatRequest, vocab_size: int) -> None:
    if not request.messages and request.prompt is None:
        raise RequestError("messages is empty; send at least one message")
    if request.tenant == PUBLIC:
        raise RequestError(f"tenant is {PUBLIC!r}, which is nobody's; use another name")
    if request.num_choices < 1:
        raise RequestError(f"num_choices is {request.num_choices!r}; ask for at least 1")
    sampling = request.sampling
    named = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": dict(sampling.logit_bias)}
    if isinstance(request.prompt, tuple):
        named["prompt"] = request.prompt
    for option, token_ids in named.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise UnsupportedParameterError(
                    f"{option} has {token_id!r}, but ids are in [0, {vocab_size}); take ids of "
                    "this model's tokenizer"
                )
    names = [tool.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise RequestError(f"tools has a name twice: {names!r}; give each tool its own name")


def _stop_controls(model: LoadedModel, stop: tuple[str, ...]) -> dict[int, str]:
    control = model.tokenizer.control_tokens
    known = {control[text]: text for text in stop if text in control}
    return {i: text for i, text in known.items() if i not in model.stop_token_ids}


def _thought_budget(
    model: LoadedModel, max_tokens: int | None, prompt: RenderedPrompt
) -> ThoughtBudget | None:
    if max_tokens is None:
        return None
    close_ids = thought_closing(model.tokenizer)
    if close_ids is None:
        raise UnsupportedParameterError(
            f"thinking_budget={max_tokens!r}: the vocabulary of {model.config.model!r} has no "
            "</think> token, so a thought cannot be closed; leave it out, or bound the answer with "
            "max_tokens"
        )
    open_id = model.tokenizer.control_tokens.get("<think>")
    return ThoughtBudget(max_tokens, close_ids, open_id, prompt.starts_in_reasoning)


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
