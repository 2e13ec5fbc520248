"""The options of one LangChain call as a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import ensure_config

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.openai_format import tools_from_openai
from dlite_agent.config import SamplingParams
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.integrations.langchain_messages import messages_from_langchain

__all__ = ["CALL_DEFAULTS", "SAMPLING_OPTIONS", "refuse_forcing", "request_from_call"]

SAMPLING_OPTIONS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
CALL_DEFAULTS = (*SAMPLING_OPTIONS, "enable_thinking", "history", "session_id")

_FORCING = ("tool_choice", "strict", "response_format")
_KNOWN = frozenset(
    (*CALL_DEFAULTS, *_FORCING, "model", "prompt_cache_key", "stop", "stream", "tools")
)


def request_from_call(
    messages: list[BaseMessage], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> ChatRequest:
    """Build a request.

    Args:
        messages: The history.
        options: What was passed to this call or bound before; None counts as absent.
        defaults: The model's own `CALL_DEFAULTS`.

    Raises:
        RequestError: An option that does not exist or is not supported yet, or a message that is
            not text.
        ConfigurationError: A sampling option is out of its range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    refuse_forcing(*(given.get(name) for name in _FORCING))
    _refuse_unknown(given)
    chosen = {**defaults, **given}
    thinking, history = chosen["enable_thinking"], chosen["history"]
    return ChatRequest(
        messages=messages_from_langchain(messages),
        tools=tools_from_openai(given.get("tools")),
        sampling=SamplingParams(**{name: chosen[name] for name in SAMPLING_OPTIONS}),
        session_hint=_session_hint(chosen),
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        history=None if history == "auto" else history,
    )


def refuse_forcing(
    tool_choice: object = None, strict: object = None, response_format: object = None
) -> None:
    """Refuse what only constrained decoding can promise.

    Raises:
        UnsupportedParameterError: One of them asks for more than "the model decides".
    """
    because = "needs constrained decoding, which this version does not have"
    if tool_choice not in (None, "auto"):
        raise UnsupportedParameterError(
            f"tool_choice={tool_choice!r} {because}; use tool_choice='auto' and say in the prompt "
            "when to call which tool, or bind no tools where none must be called"
        )
    if strict:
        raise UnsupportedParameterError(
            f"strict={strict!r} {because}; leave it out and validate the arguments in the tool"
        )
    if response_format is not None:
        raise UnsupportedParameterError(
            f"response_format={response_format!r} {because}; describe the format in the prompt and "
            "parse the answer"
        )


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - _KNOWN)
    if unknown:
        raise UnsupportedParameterError(
            f"{unknown[0]}={given[unknown[0]]!r} is not an option of a call; leave it out; "
            f"known: {', '.join(sorted(_KNOWN))}"
        )
    if given.get("stop"):
        raise UnsupportedParameterError(
            f"stop={given['stop']!r} is not supported yet; leave it out and cut the answer "
            "yourself, or bound it with max_tokens"
        )


def _session_hint(chosen: Mapping[str, Any]) -> str | None:
    """The session that the caller names, else the LangGraph thread; sub-graphs have their own."""
    explicit = chosen["session_id"] or chosen.get("prompt_cache_key")
    if explicit:
        return str(explicit)
    configurable = ensure_config().get("configurable") or {}
    thread_id = configurable.get("thread_id")
    if thread_id is None:
        return None
    # "tools:<task>|model:<task>": the last is new at each step, those before name the sub-graph.
    parents = str(configurable.get("checkpoint_ns") or "").rpartition("|")[0]
    return f"{thread_id}|{parents}" if parents else str(thread_id)
