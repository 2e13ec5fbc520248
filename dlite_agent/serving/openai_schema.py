"""What a request may hold, for OpenAPI and for the first look at it.

Everything that is not named here is accepted and not looked at, as clients send what other servers
know. What a field means is decided by `dlite_agent.chat`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DLiteOptions",
    "DetokenizeBody",
    "ForkBody",
    "SamplingBody",
    "StreamOptions",
    "TokenizeBody",
]

JSONObject = dict[str, Any]

_ROLES = ["system", "developer", "user", "assistant", "tool"]
# What is described is what a client should send; what is read is more (`chat.openai_format`).
MessageObject = Annotated[
    JSONObject,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": _ROLES},
                "content": {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "null"}]},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "items": {"type": "object"}},
                "tool_call_id": {"type": "string"},
            },
            "required": ["role"],
        }
    ),
]
ToolObject = Annotated[
    JSONObject,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                    },
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        }
    ),
]


class StreamOptions(BaseModel):
    """How a stream is told.

    Attributes:
        include_usage: Whether the last event is the usage.
    """

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None


class DLiteOptions(BaseModel):
    """What OpenAI's format has no field for; `ChatRequest` has the same names.

    Attributes:
        history: How earlier answers come back.
        is_partial: The last message is still growing: prefill it and answer nothing.
        choice_index: Number of the first choice; another one is another answer.
        closes_calls: A call that runs out of tokens is closed as well.
    """

    history: Literal["auto", "as_generated", "template"] | None = None
    is_partial: bool = False
    choice_index: int = Field(default=0, ge=0, lt=2**31)
    closes_calls: bool = False


class SamplingBody(BaseModel):
    """What chat and text completions share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    metadata: JSONObject | None = None


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: list[MessageObject] = Field(min_length=1)
    tools: list[ToolObject] | None = None
    tool_choice: str | JSONObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: JSONObject | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JSONObject | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    dlite: DLiteOptions | None = None


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    dlite: DLiteOptions | None = None


class TokenizeBody(BaseModel):
    """Body of `/tokenize`: a text, or messages."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageObject] | None = None
    tools: list[ToolObject] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: JSONObject | None = None
    cache_salt: str | None = None


class DetokenizeBody(BaseModel):
    """Body of `/detokenize`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    tokens: list[int] = Field(max_length=2**20)


class ForkBody(BaseModel):
    """Body of `/v1/dlite/sessions/{name}/fork`.

    Attributes:
        name: What the client will call the new session, as it names one in a request; None: only
            its id.
    """

    name: str | None = None
    cache_salt: str | None = None
