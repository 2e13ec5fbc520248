"""The engine behind `ChatDLite`: its turns, its sessions, and what it tells."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from langchain_core.language_models import ModelProfile
from langchain_core.messages import BaseMessage
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from dlite_agent.backend import ChatBackend
from dlite_agent.chat.miss import Miss
from dlite_agent.chat.openai_format import tools_from_openai
from dlite_agent.client.remote_engine import RemoteEngine
from dlite_agent.config import EngineConfig
from dlite_agent.engine.agent_session import AgentSession
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.tasks import Usage
from dlite_agent.errors import ConfigurationError, UnsupportedParameterError
from dlite_agent.integrations.langchain_errors import langchain_errors
from dlite_agent.integrations.langchain_messages import messages_from_langchain
from dlite_agent.integrations.langchain_options import ENGINE_OPTIONS
from dlite_agent.integrations.langchain_profile import model_profile
from dlite_agent.integrations.langchain_request import (
    CALL_DEFAULTS,
    request_from_call,
    timeout_from_call,
)
from dlite_agent.integrations.langchain_threads import ChatWithThreads
from dlite_agent.integrations.langchain_turn import ChatTurn
from dlite_agent.models.rope_config import declared_positions
from dlite_agent.outputs import Generation

__all__ = ["ChatWithEngine", "Tool"]

_DEFAULT = "nano"
Tool = builtins.dict[str, Any] | type | Callable[..., Any] | BaseTool


class ChatWithEngine(ChatWithThreads):
    """A chat model's side that faces its engine; see `ChatDLite`."""

    _last_miss: Miss | None = PrivateAttr(default=None)
    _has_final_profile: bool = PrivateAttr(default=False)
    _remotes: dict[str, RemoteEngine] = PrivateAttr(default_factory=dict)  # by model name

    def __getstate__(self) -> builtins.dict[Any, Any]:
        """Connections stay here."""
        state = super().__getstate__()
        private = {**(state["__pydantic_private__"] or {}), "_remotes": {}}
        return {**state, "__pydantic_private__": private}

    def __deepcopy__(self, memo: builtins.dict[int, Any] | None = None) -> Self:
        """A copy of its own, with the same engine and connections."""
        shared = (self.engine, *self._remotes.values())
        return super().__deepcopy__({**(memo or {}), **{id(item): item for item in shared}})

    def session(self, name: str | None = None, tools: Sequence[Tool] = ()) -> AgentSession:
        """A conversation that keeps its own transcript, with this model's engine.

        Its `fork` branches off, its `rewind` goes back. It speaks `dlite_agent.Message`; sampling
        is that of each turn, not of this object.

        Args:
            name: Where the engine looks first; None makes one up.
            tools: What the model may call, in any form that `bind_tools` takes.
        """
        specs = tools_from_openai(_openai_tools(tools))
        thinking = self.enable_thinking
        return AgentSession(
            self._backend(),
            name,
            tools=specs,
            history=None if self.history == "auto" else self.history,
            template_kwargs={} if thinking is None else {"enable_thinking": thinking},
        )

    def feed(
        self, messages: list[BaseMessage], *, tools: Sequence[Tool] = (), **kwargs: Any
    ) -> None:
        """Prefill a history whose last message is what a tool has printed so far.

        Blocks until that is done. The turn that follows decides by its tokens, as always: what the
        whole result does not begin with is dropped. `FeedToolOutput` does this for an agent.

        Args:
            messages: The history, up to the `ToolMessage` that grows.
            tools: Those of the turn.
            **kwargs: Its other options.
        """
        with langchain_errors():
            turn = self._turn(messages, None, {**kwargs, "tools": _openai_tools(tools)})
            for _ in turn.backend.stream(replace(turn.request, is_partial=True)):
                raise AssertionError("a partial request has no answer")

    async def afeed(
        self, messages: list[BaseMessage], *, tools: Sequence[Tool] = (), **kwargs: Any
    ) -> None:
        """`feed` for asyncio; what is cancelled keeps the chunks that were prefilled."""
        with langchain_errors():
            turn = await self._aturn(messages, None, {**kwargs, "tools": _openai_tools(tools)})
            async for _ in turn.backend.astream(replace(turn.request, is_partial=True)):
                raise AssertionError("a partial request has no answer")

    def cache_info(self) -> Usage:
        """Memory of the sessions of this model's engine. Loads the model; waits for no turn.

        Raises:
            ConfigurationError: The sessions are a server's, or a backend's that keeps none.
        """
        backend = self._backend()
        if not isinstance(backend, Engine):
            advice = (
                "the server's /metrics say what its sessions take, RemoteEngine.sessions() which "
                "there are"
                if isinstance(backend, RemoteEngine)
                else "leave engine out"
            )
            raise ConfigurationError(f"{backend!r} does not tell its memory; {advice}")
        return backend.usage()

    async def acache_info(self) -> Usage:
        """`cache_info` for asyncio; never blocks the loop."""
        return await asyncio.to_thread(self.cache_info)

    def explain_last_miss(self) -> Miss | None:
        """Why a turn of this object computed tokens again that an earlier turn had computed.

        Returns:
            The latest such turn's cause, both texts, the cost and what to do; None where there was
            none. Each turn's own is in `response_metadata["dlite"]["miss"]`.
        """
        return self._last_miss

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """Exact length of the rendered messages and tools, without a generation prompt.

        Loads the model.
        """
        specs = tools_from_openai(_openai_tools(tools or ()))
        with langchain_errors():
            return self._backend().count_tokens(messages_from_langchain(messages), specs)

    async def aget_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Tool] | None = None
    ) -> int:
        """`get_num_tokens_from_messages` for asyncio; never blocks the loop."""
        return await asyncio.to_thread(self.get_num_tokens_from_messages, messages, tools)

    def _resolve_model_profile(self) -> ModelProfile | None:
        declared = self.max_context
        if declared is None and self.base_url is None:
            declared = declared_positions(self.model, self.rope_scaling)
        return model_profile(declared, self.max_tokens)

    def _engine_config(self, model: str) -> EngineConfig:
        options = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        return EngineConfig(**{**options, "model": model})

    def _backend(self, options: Mapping[str, Any] | None = None) -> ChatBackend:
        model = (options or {}).get("model")
        if self.base_url is not None:
            return self._server(model)
        if self.engine is None:
            return Engine.shared(self._engine_config(model or self.model))
        if model not in (None, self.engine.model_name):
            raise UnsupportedParameterError(
                f"model={model!r} is not the model of the engine that this ChatDLite was given "
                f"({self.engine.model_name!r}); make another ChatDLite"
            )
        return self.engine

    def _server(self, model: str | None) -> RemoteEngine:
        """The client of `base_url`; another model is another client."""
        named = self.model if model is None else model
        if named not in self._remotes:
            key = None if self.api_key is None else self.api_key.get_secret_value()
            self._remotes[named] = RemoteEngine(
                self.base_url or "", api_key=key, model=None if named == _DEFAULT else named
            )
        return self._remotes[named]

    def _check_server_options(self) -> None:
        """Refuse options that a server was started with, and would not hear of."""
        fields = type(self).model_fields
        names = ("engine", *ENGINE_OPTIONS)
        set_here = [name for name in names if getattr(self, name) != fields[name].default]
        unheard = [name for name in set_here if name != "model"]
        if self.base_url is not None and unheard:
            raise ConfigurationError(
                f"{unheard[0]} is {getattr(self, unheard[0])!r}, but the model runs on the server "
                f"at {self.base_url!r}; set it there, or leave base_url out"
            )

    async def _aturn(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> ChatTurn:
        """`_turn` for asyncio: a new client of a server may read certificates."""
        if self.base_url is not None:
            await asyncio.to_thread(self._backend, options)
        return self._turn(messages, stop, options)

    def _turn(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> ChatTurn:
        chosen = self.stop if stop is None else stop
        defaults = {name: getattr(self, name) for name in CALL_DEFAULTS}
        request = request_from_call(messages, {**options, "stop": chosen}, defaults)
        return ChatTurn(self._backend(options), request, timeout_from_call(options, self.timeout))

    def _learn(self, turn: ChatTurn, answer: Generation | None) -> None:
        """Note what a finished turn tells: its miss, and how much fits into the loaded model."""
        if answer is None:
            return
        miss = answer.stats.miss
        if miss is not None and miss.cause is not None:
            self._last_miss = miss
        if not self._has_final_profile and turn.backend.model_name == self._backend().model_name:
            self.profile = model_profile(turn.backend.max_context, self.max_tokens)
            self._has_final_profile = True


def _openai_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [convert_to_openai_tool(tool) for tool in tools]
