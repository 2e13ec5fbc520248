"""The options of one LangChain call as a `ChatRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig, ensure_config

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
    "canonical_options",
    "output_rules_from_call",
    "request_from_call",
    "thread_options",
    "timeout_from_call",
]

SAMPLING_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "thinking_budget"),
)
_ALIASES = {"reasoning": "enable_thinking", "max_model_len": "max_context"}
CALL_DEFAULTS = (*SAMPLING_OPTIONS, "n", "enable_thinking", "history", "session_id")

_THREAD = "thread_hint"  # how the thread of a direct call gets to where no config is seen
_FORCING = ("tool_choice", "parallel_tool_calls", "response_format", "closes_calls")
_KNOWN = frozenset(
    (
        *CALL_DEFAULTS,
        *_FORCING,
        "model",
        "prompt_cache_key",
        "stop",
        "stream",
        "stream_arguments",
        "timeout",
        "tools",
        _THREAD,
    )
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
    present = {name: value for name, value in options.items() if value is not None}
    given = canonical_options(present)
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


def canonical_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options under our own names: `reasoning`, `max_model_len` and `extra_body` are others'.

    Raises:
        UnsupportedParameterError: `extra_body` holds anything but `chat_template_kwargs` with
            `enable_thinking`, or a name and its alias differ.
    """
    chosen = dict(options)
    body = chosen.pop("extra_body", None) or {}
    variables = body.get("chat_template_kwargs") if isinstance(body, Mapping) else None
    is_known = isinstance(variables, Mapping) and variables.keys() <= {"enable_thinking"}
    if body and not (is_known and body.keys() == {"chat_template_kwargs"}):
        raise UnsupportedParameterError(
            f"extra_body={body!r} is not supported; it may hold "
            "{'chat_template_kwargs': {'enable_thinking': ...}}"
        )
    if isinstance(variables, Mapping):
        chosen = _renamed(chosen, "extra_body", "enable_thinking", variables["enable_thinking"])
    for alias, name in _ALIASES.items():
        if alias in chosen:
            value = chosen.pop(alias)
            chosen = _renamed(chosen, alias, name, value)
    return chosen


def _renamed(options: dict[str, Any], alias: str, name: str, value: Any) -> dict[str, Any]:
    if options.get(name, value) != value:
        raise UnsupportedParameterError(
            f"{alias} says {name}={value!r}, but {name}={options[name]!r} is there too; send one"
        )
    return {**options, name: value}


def thread_options(config: RunnableConfig | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a direct call, and the thread that its config names."""
    hint = _thread_hint((config or {}).get("configurable") or {})
    return dict(options) if hint is None else {_THREAD: hint, **options}


def timeout_from_call(options: Mapping[str, Any], default: float | None) -> float | None:
    """Most seconds to wait in this call; None: as long as it takes.

    Raises:
        UnsupportedParameterError: It is no positive number.
    """
    timeout = options.get("timeout")
    seconds = default if timeout is None else timeout
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if seconds is None or (is_number and seconds > 0):
        return seconds
    raise UnsupportedParameterError(
        f"timeout is {seconds!r}; use a number of seconds above 0, or None to wait for the answer"
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
    hint = chosen.get(_THREAD)
    return str(hint) if hint else _thread_hint(ensure_config().get("configurable") or {})


def _thread_hint(configurable: Mapping[str, Any]) -> str | None:
    thread_id = configurable.get("thread_id")
    if thread_id is None:
        return None
    # "tools:<task>|model:<task>": the last is new at each step, those before name the sub-graph.
    parents = str(configurable.get("checkpoint_ns") or "").rpartition("|")[0]
    return f"{thread_id}|{parents}" if parents else str(thread_id)
