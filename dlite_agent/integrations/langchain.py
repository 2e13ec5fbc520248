"""`ChatDLite`: a LangChain chat model in the agent's own process."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.openai_format import tools_from_openai
from dlite_agent.chat.openai_sampling import num_choices_from_openai, sampling_from_openai
from dlite_agent.config import EngineConfig
from dlite_agent.engine.agent_session import AgentSession
from dlite_agent.engine.engine import Engine
from dlite_agent.errors import ConfigurationError, UnsupportedParameterError
from dlite_agent.integrations.langchain_errors import langchain_errors
from dlite_agent.integrations.langchain_messages import (
    ChunkWriter,
    chat_result,
    messages_from_langchain,
)
from dlite_agent.integrations.langchain_options import ENGINE_OPTIONS
from dlite_agent.integrations.langchain_request import (
    CALL_DEFAULTS,
    SAMPLING_OPTIONS,
    canonical_options,
    output_rules_from_call,
    refuse_to_stream,
    request_from_call,
)
from dlite_agent.integrations.langchain_structured import (
    StructuredMethod,
    bound_options,
    structured_parser,
    with_raw,
)
from dlite_agent.integrations.langchain_threads import ChatWithThreads
from dlite_agent.models.rope_config import declared_positions

__all__ = ["ChatDLite"]

# Reported only where they are not the default.
_SILENT = ("kv_disk", "max_batch", "max_queue", "reproducible", "audit", "n")
Tool = builtins.dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatDLite(ChatWithThreads):
    """Qwen3 in this process, with a session that outlasts the call.

    Constructing it loads nothing; the first call does. Objects with the same engine options share
    one engine. Anything that changes one turn only (temperature, `max_tokens`, `enable_thinking`,
    tools, …) may also be passed to `invoke`, `stream` or `bind`.

    Reuse of earlier turns needs no setup: sessions are found by their tokens. The LangGraph thread,
    or `session_id`, only says where to look first.

    ```python
    agent = create_agent(ChatDLite("nano"), tools=[read_file], checkpointer=saver)
    ```

    The answer's `usage_metadata` has the reused tokens under `cache_read`, and
    `response_metadata["dlite"]` all of `TurnStats`. Thoughts are in
    `additional_kwargs["reasoning_content"]`.

    Args:
        model: `"nano"`, a folder in the Hugging Face layout, a GGUF file, or a hub name.
    """

    def __init__(self, model: str = "nano", **options: Any) -> None:
        options = canonical_options(options)
        unknown = sorted(set(options) - set(type(self).model_fields))
        if unknown:
            own = set(type(self).model_fields) - set(BaseChatModel.model_fields)
            known = ", ".join(sorted(own))
            raise ConfigurationError(
                f"{unknown[0]!r} is not an option of ChatDLite; known: {known}"
            )
        super().__init__(**{"model": model, **options})
        self._engine_config(self.model)
        sampling_from_openai({name: getattr(self, name) for name in SAMPLING_OPTIONS})
        num_choices_from_openai(self.n)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Options can be saved; an `engine` is left out."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where the public name is, whatever module defines it."""
        return ["dlite_agent"]

    def session(self, name: str | None = None, tools: Sequence[Tool] = ()) -> AgentSession:
        """A conversation that keeps its own transcript, with this model's engine.

        Its `fork` branches off, its `rewind` goes back. It speaks `dlite_agent.Message`; sampling
        is that of each turn, not of this object.

        Args:
            name: Where the engine looks first; None makes one up.
            tools: What the model may call, in any form that `bind_tools` takes.
        """
        specs = tools_from_openai([convert_to_openai_tool(tool) for tool in tools])
        thinking = self.enable_thinking
        return AgentSession(
            self._backend(),
            name,
            tools=specs,
            history=None if self.history == "auto" else self.history,
            template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        )

    @property
    def _llm_type(self) -> str:
        return "dlite"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = (*ENGINE_OPTIONS, *SAMPLING_OPTIONS, "n", "stop", "enable_thinking", "history")
        set_here = {name: getattr(self, name) for name in names}
        plain = {name: type(self).model_fields[name].default for name in _SILENT}
        return {
            name: value
            for name, value in set_here.items()
            if value is not None and value != plain.get(name)
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=stop or own, **kwargs)
        params["ls_provider"] = "dlite"
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            open_weights=True,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_call_streaming=True,
            tool_choice=True,
            structured_output=True,
            reasoning_output=True,
            temperature=True,
        )
        max_context = self.max_context or declared_positions(self.model, self.rope_scaling)
        if max_context is not None:
            profile["max_input_tokens"] = max_context
        return profile

    def bind_tools(
        self,
        tools: Sequence[Tool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools, or make it.

        A forced call always fits its schema, whatever the weights. With `tool_choice="auto"` a call
        is constrained where its tool is strict.

        Args:
            tools: Functions, LangChain tools, pydantic or `TypedDict` classes, OpenAI tools or
                JSON schemas.
            tool_choice: None or `"auto"`: the model decides; `"any"`, `"required"` or True: at
                least one call; `"none"`: no call; a tool's name or OpenAI's form of it: exactly one
                call of it; OpenAI's `allowed_tools`: some of the tools.
            strict: Every call fits its tool's schema, whoever decided to make it.
            **kwargs: Options of the call, `parallel_tool_calls` and `response_format` among them.

        Raises:
            RequestError: The choice is not known, or names a tool that is not there.
        """
        formatted = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        with langchain_errors():
            options = {**kwargs, "tool_choice": tool_choice}
            named = [ToolSpec(tool["function"]["name"]) for tool in formatted]
            output_rules_from_call(options, named)
        chosen = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=formatted, **chosen, **kwargs)

    def with_structured_output(
        self,
        schema: builtins.dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: StructuredMethod = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that fit a schema, as objects of a pydantic class or as dicts.

        The answer is closed in time when its tokens run out, its last strings cut short.

        Args:
            schema: A pydantic or `TypedDict` class, a JSON schema, or an OpenAI function.
            include_raw: Return the message as well, under `raw`, and `parsing_error` in place of an
                exception.
            method: `"json_schema"`, `"function_calling"` or `"json_mode"`; each is constrained by
                the schema.
            strict: False leaves out keywords that cannot be enforced; they are an error otherwise.
            **kwargs: Options of the call.

        Raises:
            UnsupportedParameterError: The method is another.
        """
        with langchain_errors():
            options = bound_options(schema, method, strict=strict)
        model = self.bind(**options, **kwargs)
        parser = structured_parser(schema, method)
        return with_raw(model, parser) if include_raw else model | parser

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Exact length of the rendered messages and tools, without a generation prompt.

        Loads the model.
        """
        specs = tools_from_openai([convert_to_openai_tool(tool) for tool in tools or ()])
        with langchain_errors():
            return self._backend().count_tokens(messages_from_langchain(messages), specs)

    def get_token_ids(self, text: str) -> list[int]:
        """Not supported; see `get_num_tokens_from_messages`."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        raise UnsupportedParameterError(
            "ChatDLite does not hand out token ids of a text; "
            "count with get_num_tokens_from_messages instead"
        )

    def _streaming_disabled(self, **kwargs: Any) -> bool:
        """Several answers are not streamed because a callback would like it."""
        is_asked_for = kwargs.get("stream") or self.streaming
        return super()._streaming_disabled(**kwargs) or (
            not is_asked_for and (kwargs.get("n") or self.n) > 1
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            request, backend = self._request(messages, stop, kwargs), self._backend(kwargs)
            return chat_result(backend.generate_choices(request), backend.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            request, backend = self._request(messages, stop, kwargs), self._backend(kwargs)
            return chat_result(await backend.agenerate_choices(request), backend.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            request, backend = self._request(messages, stop, kwargs), self._backend(kwargs)
            refuse_to_stream(request)
            writer = ChunkWriter(backend.model_name, self.output_version)
            chunks = backend.stream(request)
            try:
                for chunk in chunks:
                    yield from writer.write(chunk)
            finally:
                _close(chunks)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            request, backend = self._request(messages, stop, kwargs), self._backend(kwargs)
            refuse_to_stream(request)
            writer = ChunkWriter(backend.model_name, self.output_version)
            chunks = backend.astream(request)
            try:
                async for chunk in chunks:
                    for piece in writer.write(chunk):
                        yield piece
            finally:
                await _aclose(chunks)

    def _engine_config(self, model: str) -> EngineConfig:
        options = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return EngineConfig(**{**options, "model": model})

    def _backend(self, options: Mapping[str, Any] | None = None) -> ChatBackend:
        model = (options or {}).get("model")
        if self.engine is None:
            return Engine.shared(self._engine_config(model or self.model))
        if model not in (None, self.engine.model_name):
            raise UnsupportedParameterError(
                f"model={model!r} is not the model of the engine that this ChatDLite was given "
                f"({self.engine.model_name!r}); make another ChatDLite"
            )
        return self.engine

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> ChatRequest:
        chosen = self.stop if stop is None else stop
        defaults = {name: getattr(self, name) for name in CALL_DEFAULTS}
        return request_from_call(messages, {**options, "stop": chosen}, defaults)


def _close(chunks: Iterator[object]) -> None:
    """End the turn of a stream that is not read to its end."""
    close = getattr(chunks, "close", None)
    if close is not None:
        close()


async def _aclose(chunks: AsyncIterator[object]) -> None:
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
