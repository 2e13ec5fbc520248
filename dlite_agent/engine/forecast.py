"""What recorded requests would cost, by their tokens alone: no weights, nothing is computed.

The requests go through the same replay, template and comparison as those of an engine. KV is kept
for ever, and answers are taken for what the template makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dlite_agent.chat.message_keys import seed_key, turn_forms
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.miss import Miss, explain_miss
from dlite_agent.chat.past_requests import PastRequest
from dlite_agent.chat.renderer import RenderedPrompt, Renderer
from dlite_agent.chat.replay import plan_replay
from dlite_agent.config import HistoryMode
from dlite_agent.engine.tenant_memory import TenantMemory
from dlite_agent.errors import RequestError
from dlite_agent.sessions.journal import JournalRecord

__all__ = [
    "RecordedRequest",
    "TurnForecast",
    "amplification",
    "answer_ids",
    "forecast",
    "requests_of",
]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as it was sent.

    Attributes:
        messages: Normalised.
        tools: Normalised.
        template_kwargs: Variables of the template.
        answer: What was answered; None takes it from a later request that repeats it.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    answer: Message | None = None


@dataclass(frozen=True, slots=True)
class TurnForecast:
    """What one request costs, in tokens.

    Attributes:
        prompt: Of the whole prompt.
        prefilled: Computed before the first token of the answer.
        plain: The same where the longest common prefix of the rendered text is all that is reused.
        needed: Of `prefilled`, what no earlier request had.
        miss: Why more was computed, and what the client changed; None where neither is.
    """

    prompt: int
    prefilled: int
    plain: int
    needed: int
    miss: Miss | None


def requests_of(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[RecordedRequest]:
    """The requests that made a transcript: one before each of its assistant's messages."""
    return [
        RecordedRequest(tuple(messages[:i]), tuple(tools), answer=message)
        for i, message in enumerate(messages)
        if message.role == "assistant" and i
    ]


def amplification(turns: Sequence[TurnForecast], *, plain: bool = False) -> float:
    """Tokens computed over tokens that had to be, from the second request on; 1.0 without one."""
    later = turns[1:]
    needed = sum(turn.needed for turn in later)
    computed = sum(turn.plain if plain else turn.prefilled for turn in later)
    return computed / needed if needed else 1.0


def forecast(
    requests: Sequence[RecordedRequest], renderer: Renderer, *, history: HistoryMode = "auto"
) -> list[TurnForecast]:
    """Go through requests in order.

    Args:
        requests: Of one client; they may be of several conversations.
        renderer: Of the model that is to answer them.
        history: As in `EngineConfig`.

    Raises:
        RequestError: The template refuses one.
    """
    memory = TenantMemory(renderer.sibling())
    ours, plain = _Kept(), _Kept()
    return [
        _turn(replace(request, answer=_answer(requests, number)), memory, ours, plain, history)
        for number, request in enumerate(requests)
    ]


class _Kept:
    """KV that nobody evicts: the tokens of every turn."""

    def __init__(self) -> None:
        self._turns: list[npt.NDArray[np.int32]] = []

    def cached(self, prompt_ids: Sequence[int]) -> int:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        longest = max((_common(prompt, turn) for turn in self._turns), default=0)
        return min(longest, len(prompt_ids) - 1)

    def add(self, prompt_ids: Sequence[int], sampled: Sequence[int]) -> None:
        # The last sampled token has no KV.
        turn = np.asarray([*prompt_ids, *sampled[:-1]], dtype=np.int32)
        self._turns = [t for t in self._turns if _common(turn, t) < len(t)]
        self._turns.append(turn)


def _turn(
    request: RecordedRequest, memory: TenantMemory, ours: _Kept, plain: _Kept, history: HistoryMode
) -> TurnForecast:
    tools = memory.tools.first_seen(request.tools)
    plan = plan_replay(
        request.messages,
        seed_key(tools, request.template_kwargs),
        memory.journal,
        mode=history,
        strips_thoughts=memory.renderer.strips_thoughts,
    )
    prompt = _render(request, memory, tools, plan.splices)
    rendered = _render(request, memory, request.tools, {})
    sent = PastRequest.of(request.messages, request.tools, request.template_kwargs)
    past = memory.past.closest(sent)
    cached = ours.cached(prompt.token_ids)
    miss = explain_miss(past, sent, plan, prompt, cached) if past is not None else None
    prefilled = len(prompt.token_ids) - cached
    figures = TurnForecast(
        len(prompt.token_ids),
        prefilled,
        len(rendered.token_ids) - plain.cached(rendered.token_ids),
        prefilled - (miss.tokens if miss is not None else 0),
        miss,
    )
    sampled: tuple[int, ...] = ()
    if request.answer is not None:
        sampled = answer_ids(replace(request, tools=tools), memory.renderer)
        sent = sent.with_answer(request.answer)
        ids = prompt.turn_record(sampled)
        for form in turn_forms(plan.key, request.answer) if ids is not None else ():
            memory.journal.record(form.key, JournalRecord(ids or (), form.reasoning_digest))
    ours.add(prompt.token_ids, sampled)
    plain.add(rendered.token_ids, sampled)
    memory.past.remember(plan.key.hex(), sent)
    return figures


def _render(
    request: RecordedRequest,
    memory: TenantMemory,
    tools: Sequence[ToolSpec],
    splices: Mapping[int, Sequence[int]],
) -> RenderedPrompt:
    kwargs = request.template_kwargs
    return memory.renderer.render(request.messages, tools, template_kwargs=kwargs, splices=splices)


def answer_ids(request: RecordedRequest, renderer: Renderer) -> tuple[int, ...]:
    """The ids of a request's answer: what the template makes of it, the closing token included.

    They follow the generation prompt, and are what a model would sample for these words.
    """
    assert request.answer is not None
    kwargs = request.template_kwargs
    prompt = renderer.render(request.messages, request.tools, template_kwargs=kwargs)
    whole = renderer.render(
        (*request.messages, request.answer),
        request.tools,
        template_kwargs=kwargs,
        add_generation_prompt=False,
    )
    suffix = prompt.generation_suffix or ()
    start = len(prompt.token_ids) - len(suffix)
    rest = whole.token_ids[start:]
    closer = renderer.closing_id
    end = rest.index(closer) + 1 if closer in rest else len(rest)
    return rest[len(suffix) : end] if rest[: len(suffix)] == suffix else rest[:end]


def _answer(requests: Sequence[RecordedRequest], number: int) -> Message | None:
    """What a request was answered: as recorded, else as a later request repeats it."""
    request = requests[number]
    if request.answer is not None:
        return request.answer
    length = len(request.messages)
    if not length:
        raise RequestError(f"request {number} has no messages; record what was sent")
    for later in requests[number + 1 :]:
        if len(later.messages) > length and later.messages[length - 1] == request.messages[-1]:
            answer = later.messages[length]
            return answer if answer.role == "assistant" else None
    return None


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    limit = min(len(left), len(right))
    different = np.flatnonzero(left[:limit] != right[:limit])
    return int(different[0]) if len(different) else limit
