"""The events of a streamed answer as `GenerationChunk`s. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dlite_agent.chat.logprobs import TokenLogprob
from dlite_agent.chat.messages import (
    Delta,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    UnparsedToolCall,
)
from dlite_agent.chat.miss import Miss
from dlite_agent.chat.openai_format import parse_arguments
from dlite_agent.client.remote_errors import error_of
from dlite_agent.errors import ConfigurationError
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats

__all__ = ["AnswerReader", "turn_stats"]

_DONE = "[DONE]"


class AnswerReader:
    """Reads the lines of one answer of the chat or of the completions API; keep one for each.

    Attributes:
        is_over: Whether the last line was there.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._choices: dict[int, _Choice] = {}
        self._prompt_token_ids: tuple[int, ...] = ()

    def read(self, line: str) -> Iterator[GenerationChunk]:
        """The chunks of a line; comments and empty lines have none.

        Raises:
            DLiteError: The line is an error that ended the turn.
        """
        name, _, data = line.partition(":")
        if name != "data":
            return
        data = data.strip()
        if data == _DONE:
            self.is_over = True
            return
        event = json.loads(data)
        if "error" in event:
            raise error_of(event["error"])
        for choice in event["choices"]:
            yield from self._chunk(choice, event)

    def _chunk(
        self, sent: Mapping[str, Any], event: Mapping[str, Any]
    ) -> Iterator[GenerationChunk]:
        prompt_token_ids = sent.get("prompt_token_ids", event.get("prompt_token_ids"))
        if prompt_token_ids is not None:
            self._prompt_token_ids = tuple(prompt_token_ids)
        index = sent["index"]
        choice = self._choices.setdefault(index, _Choice())
        deltas, token_ids, logprobs = choice.add(sent)
        reason = sent["finish_reason"]
        if reason is not None:
            generation = choice.generation(reason, self._prompt_token_ids)
            yield GenerationChunk(
                deltas, token_ids, reason, generation.stats, generation, index, logprobs
            )
        elif deltas or token_ids:
            yield GenerationChunk(deltas, token_ids, choice_index=index, logprobs=logprobs)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class _Choice:
    """What came of one choice so far."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, _Call] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    figures: Mapping[str, Any] | None = None

    def add(
        self, sent: Mapping[str, Any]
    ) -> tuple[tuple[Delta, ...], tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Take what an event says of it; returns what is new."""
        is_chat = "delta" in sent
        delta = sent["delta"] if is_chat else {"content": sent["text"], "dlite": sent.get("dlite")}
        self.figures = delta.get("dlite") or self.figures
        deltas = tuple(self._deltas(delta))
        token_ids = tuple(sent.get("token_ids", ()))
        logprobs = _logprobs(sent.get("logprobs"))
        self.token_ids += token_ids
        self.logprobs += logprobs
        return deltas, token_ids, logprobs

    def generation(self, reason: Any, prompt_token_ids: tuple[int, ...]) -> Generation:
        """The whole answer."""
        if self.figures is None:
            raise ConfigurationError(
                "the server sends no figures of its turns, so it is no dlite-agent server; use "
                "RemoteEngine with `dlite-agent serve`, and an OpenAI client with others"
            )
        unparsed = tuple(UnparsedToolCall(**call) for call in self.figures.get("unparsed", ()))
        refused = {call.id for call in unparsed}
        calls = tuple(
            ToolCall(call.name, parse_arguments(call.arguments), call.id, call.arguments)
            for call in self.calls.values()
            if call.id not in refused
        )
        return Generation(
            message=Message("assistant", self.content, self.reasoning or None, calls),
            finish_reason=reason,
            stats=turn_stats(self.figures),
            token_ids=self.token_ids,
            prompt_token_ids=prompt_token_ids,
            unparsed=unparsed,
            matched_stop=self.figures.get("matched_stop"),
            logprobs=self.logprobs,
        )

    def _deltas(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if text := delta.get("reasoning_content"):
            self.reasoning += text
            yield ReasoningDelta(text)
        if text := delta.get("content"):
            self.content += text
            yield TextDelta(text)
        for call in delta.get("tool_calls", ()):
            index, function = call["index"], call["function"]
            arguments = function.get("arguments") or ""
            if index not in self.calls:
                self.calls[index] = _Call(call["id"], function["name"], arguments)
                yield ToolCallDelta(index, arguments, call["id"], function["name"])
            else:
                self.calls[index].arguments += arguments
                yield ToolCallDelta(index, arguments)


def turn_stats(figures: Mapping[str, Any]) -> TurnStats:
    """Stats from JSON: those that this version knows; a newer server may send more."""
    known = {field.name for field in fields(TurnStats)}
    given = {name: value for name, value in figures.items() if name in known}
    for name in ("replayed", "notes"):
        given[name] = tuple(given.get(name, ()))
    if (miss := given.get("miss")) is not None:
        given["miss"] = Miss(**{**miss, "oddities": tuple(miss["oddities"])})
    return TurnStats(**given)


def _logprobs(sent: Any) -> tuple[TokenLogprob, ...]:
    return () if sent is None else tuple(_logprob(token) for token in sent["content"])


def _logprob(sent: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(_logprob(other) for other in sent.get("top_logprobs", ()))
    return TokenLogprob(sent["token_id"], bytes(sent["bytes"]), sent["logprob"], top)
