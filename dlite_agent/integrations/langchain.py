"""`ChatDLite`: a LangChain chat model in the agent's own process."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool

from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.openai_sampling import num_choices_from_openai, sampling_from_openai
from dlite_agent.errors import ConfigurationError, UnsupportedParameterError
from dlite_agent.integrations.langchain_engine import ChatWithEngine, Tool
from dlite_agent.integrations.langchain_errors import langchain_errors
from dlite_agent.integrations.langchain_messages import (
    ChunkWriter,
    chat_result,
)
from dlite_agent.integrations.langchain_options import ENGINE_OPTIONS
from dlite_agent.integrations.langchain_request import (
    SAMPLING_OPTIONS,
    canonical_options,
    output_rules_from_call,
    timeout_from_call,
)
from dlite_agent.integrations.langchain_structured import (
    StructuredMethod,
    bound_options,
    structured_parser,
    with_raw,
)
from dlite_agent.integrations.langchain_turn import ChatTurn
from dlite_agent.outputs import Generation

__all__ = ["ChatDLite"]

# Reported only where they are not the default.
_SILENT = ("kv_disk", "max_batch", "max_queue", "reproducible", "audit", "n")


class ChatDLite(ChatWithEngine):
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
        self._has_final_profile = options.get("profile") is not None
        self._engine_config(self.model)
        self._check_server_options()
        timeout_from_call({}, self.timeout)
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

    @property
    def _llm_type(self) -> str:
        return "dlite"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = (
            *ENGINE_OPTIONS,
            *SAMPLING_OPTIONS,
            "n",
            "stop",
            "enable_thinking",
            "history",
            "base_url",
        )
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
            turn = self._turn(messages, stop, kwargs)
            return self._result(turn, turn.answers())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            turn = await self._aturn(messages, stop, kwargs)
            return self._result(turn, await turn.aanswers())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with langchain_errors():
            turn = self._turn(messages, stop, kwargs)
            writer = self._writer(turn, kwargs)
            with closing(turn.chunks()) as chunks:
                for chunk in chunks:
                    self._learn(turn, chunk.generation)
                    yield from writer.write(chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            turn = await self._aturn(messages, stop, kwargs)
            writer = self._writer(turn, kwargs)
            async with aclosing(turn.achunks()) as chunks:
                async for chunk in chunks:
                    self._learn(turn, chunk.generation)
                    for piece in writer.write(chunk):
                        yield piece

    def _writer(self, turn: ChatTurn, options: Mapping[str, Any]) -> ChunkWriter:
        streams = options.get("stream_arguments", self.stream_arguments)
        return ChunkWriter(turn.backend, self.output_version, streams_arguments=bool(streams))

    def _result(self, turn: ChatTurn, answers: list[Generation]) -> ChatResult:
        for answer in answers:
            self._learn(turn, answer)
        return chat_result(answers, turn.backend.model_name)
