"""LiteLLM's provider `dlite/<model>`: the model in the process that calls LiteLLM, or on a server.

Importing this module registers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import litellm
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponse, ModelResponseStream

from dlite_agent.backend import ChatRequest
from dlite_agent.client.remote_engine import RemoteEngine
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.integrations.blocking import iterate
from dlite_agent.integrations.litellm_errors import PROVIDER, litellm_errors
from dlite_agent.integrations.litellm_request import request_from_litellm
from dlite_agent.integrations.litellm_response import StreamWriter, fill_response
from dlite_agent.models.rope_config import declared_positions

__all__ = ["DLiteLLM", "handler", "register"]


class DLiteLLM(CustomLLM):
    """Answers LiteLLM's calls with the shared engine of the model; loads it at the first.

    With `api_base`, a `dlite-agent serve` there answers, and nothing is loaded.

    `timeout` bounds a whole answer, and in a stream the wait for each chunk. An answer that nobody
    waits for any more (a closed stream, a cancelled task, a timeout) ends within one prefill chunk
    or one round, and its session stays valid.
    """

    def __init__(self) -> None:
        super().__init__()
        self._configs: dict[str, EngineConfig] = {}

    def configure(self, config: EngineConfig) -> None:
        """Run this model with these options from the next call on, in place of `DLITE_*`'s."""
        self._configs[config.model] = config

    def completion(self, *_: Any, **call: Any) -> ModelResponse:
        """Answer; called by LiteLLM with keywords, as are the other three."""
        return next(iterate(self._answers(call)))

    def streaming(  # type: ignore[override]  # LiteLLM takes its own chunks as well as the dicts it declares
        self, *_: Any, **call: Any
    ) -> Iterator[ModelResponseStream]:
        """Answer in chunks."""
        return iterate(self.astreaming(**call))

    async def acompletion(self, *_: Any, **call: Any) -> ModelResponse:
        """Answer; the event loop never waits for the model."""
        async with aclosing(self._answers(call)) as answers:
            return await anext(answers)

    async def astreaming(  # type: ignore[override]  # LiteLLM declares a coroutine and iterates over the result
        self, *_: Any, **call: Any
    ) -> AsyncGenerator[ModelResponseStream, None]:
        """Answer in chunks; the event loop never waits for the model."""
        model, timeout_s = call["model"], _seconds(call.get("timeout"))
        with litellm_errors(model, timeout_s):
            request = self._request(call)
            if request.num_choices > 1:
                raise UnsupportedParameterError(
                    f"n={request.num_choices} cannot be streamed: LiteLLM ends a stream with its "
                    "first finish reason; leave out stream, or use n=1"
                )
            backend = self._backend(call)
            writer = StreamWriter(call["model_response"].id, model)
            async with aclosing(backend.astream(request)) as chunks:
                while True:
                    async with asyncio.timeout(timeout_s):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        return
                    for piece in writer.write(chunk):
                        yield piece

    async def _answers(self, call: dict[str, Any]) -> AsyncGenerator[ModelResponse, None]:
        """One item: the answer."""
        model, timeout_s = call["model"], _seconds(call.get("timeout"))
        with litellm_errors(model, timeout_s):
            request, backend = self._request(call), self._backend(call)
            async with asyncio.timeout(timeout_s):
                generations = await backend.agenerate_choices(request)
            yield fill_response(call["model_response"], generations, model)

    def _request(self, call: dict[str, Any]) -> ChatRequest:
        litellm_params = call.get("litellm_params") or {}
        return request_from_litellm(
            call["messages"],
            call["optional_params"],
            litellm_params,
            drops_unknown=bool(litellm.drop_params or litellm_params.get("drop_params")),
        )

    def _backend(self, call: dict[str, Any]) -> Engine | RemoteEngine:
        model, api_base = call["model"], call.get("api_base")
        if api_base:
            if f"{PROVIDER}/{model}" not in litellm.model_cost:
                _tell(EngineConfig(model=model))
            return RemoteEngine(api_base, api_key=call.get("api_key"), model=model)
        config = self._configs.get(model)
        if config is None:
            config = EngineConfig.from_env(model=model)
            register([config])
        return Engine.shared(config)


handler = DLiteLLM()
"""The one provider of this process; a proxy's `config.yaml` names it by this path."""


def register(models: Iterable[str | EngineConfig] = ()) -> None:
    """Tell LiteLLM about the provider and about models; may be called again.

    A model that was not registered works as well; LiteLLM then learns at its first call what it can
    do. Registered prices are 0.

    Args:
        models: Names as in `EngineConfig.model`, run with the options that `DLITE_*` variables
            set, or configurations.
    """
    provider_map = litellm.custom_provider_map
    if not any(entry["provider"] == PROVIDER for entry in provider_map):
        provider_map.append({"provider": PROVIDER, "custom_handler": handler})
    for model in models:
        config = EngineConfig.from_env(model=model) if isinstance(model, str) else model
        handler.configure(config)
        _tell(config)


def _tell(config: EngineConfig) -> None:
    litellm.register_model({f"{PROVIDER}/{config.model}": _model_info(config)})


def _model_info(config: EngineConfig) -> dict[str, Any]:
    info: dict[str, Any] = {
        "litellm_provider": PROVIDER,
        "mode": "chat",
        "input_cost_per_token": 0.0,
        "output_cost_per_token": 0.0,
        "cache_read_input_token_cost": 0.0,
        "cache_creation_input_token_cost": 0.0,
        "supports_function_calling": True,
        "supports_parallel_function_calling": True,
        "supports_prompt_caching": True,
        "supports_reasoning": True,
        "supports_response_schema": True,
        "supports_system_messages": True,
        "supports_tool_choice": True,
    }
    max_context = config.max_context or declared_positions(config.model, config.rope_scaling)
    if max_context is not None:  # else the weights are not here yet
        info |= dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"), max_context)
    return info


def _seconds(timeout: object) -> float | None:
    """LiteLLM's timeout: seconds, an `httpx.Timeout` (its `read` counts), or none."""
    seconds = getattr(timeout, "read", timeout)
    return None if seconds is None else float(seconds)  # type: ignore[arg-type]  # LiteLLM's own check


register(["nano"])
