"""The options of one LangChain call as a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import ensure_config

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.openai_format import tools_from_openai
from dlite_agent.chat.openai_sampling import (
    num_choices_from_openai,
    sampling_from_openai,
    stop_from_openai,
)
from dlite_agent.chat.output_rules import (
    OutputRules,
    answer_format_from_openai,
    tool_choice_from_openai,
)
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.integrations.langchain_messages import messages_from_langchain

__all__ = [
    "CALL_DEFAULTS",
    "SAMPLING_OPTIONS",
    "output_rules_from_call",
    "refuse_to_stream",
    "request_from_call",
]

SAMPLING_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "thinking_budget"),
)
CALL_DEFAULTS = (*SAMPLING_OPTIONS, "n", "enable_thinking", "history", "session_id")

_FORCING = ("tool_choice", "parallel_tool_calls", "response_format", "closes_calls")
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
        RequestError: An option that does not exist or is not supported, a tool that cannot be
            chosen, or a message that is not text.
        ConfigurationError: A sampling option is out of its range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _refuse_unknown(given)
    chosen = {**defaults, **given}
    thinking, history = chosen["enable_thinking"], chosen["history"]
    tools = tools_from_openai(given.get("tools"))
    return ChatRequest(
        messages=messages_from_langchain(messages),
        tools=tools,
        sampling=sampling_from_openai({name: chosen[name] for name in SAMPLING_OPTIONS}),
        session_hint=_session_hint(chosen),
        template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        history=None if history == "auto" else history,
        stop=stop_from_openai(given.get("stop")),
        num_choices=num_choices_from_openai(chosen["n"]),
        output=output_rules_from_call(given, tools),
        when_full="wait",
    )


def refuse_to_stream(request: ChatRequest) -> None:
    """Refuse a stream of several answers, as `ChatOpenAI` does.

    Raises:
        UnsupportedParameterError: There are several.
    """
    if request.num_choices > 1:
        raise UnsupportedParameterError(
            f"n={request.num_choices} cannot be streamed: a stream of LangChain is one message; "
            "use generate or agenerate, or n=1"
        )


def output_rules_from_call(options: Mapping[str, Any], tools: Sequence[ToolSpec]) -> OutputRules:
    """What the answer of a call must be.

    Args:
        options: `tool_choice`, `parallel_tool_calls`, `response_format` and `closes_calls`, in
            OpenAI's form.
        tools: The call's.

    Raises:
        UnsupportedParameterError: One of them has a form that is not known.
        RequestError: The choice names a tool that is not there.
    """
    rules = OutputRules(
        tool_choice_from_openai(options.get("tool_choice")),
        options.get("parallel_tool_calls") is not False,
        answer_format_from_openai(options.get("response_format")),
        bool(options.get("closes_calls")),
    )
    rules.allowed(tools)
    return rules


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - _KNOWN)
    if unknown:
        raise UnsupportedParameterError(
            f"{unknown[0]}={given[unknown[0]]!r} is not an option of a call; leave it out; "
            f"known: {', '.join(sorted(_KNOWN))}"
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
