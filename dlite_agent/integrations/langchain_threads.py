"""The thread of a direct call: no config is seen where a chat model generates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.runnables import RunnableConfig

from dlite_agent.integrations.langchain_options import ChatOptions
from dlite_agent.integrations.langchain_request import thread_options

__all__ = ["ChatWithThreads"]


class ChatWithThreads(ChatOptions):
    """Hands the `thread_id` of a config on, as a hint of where to look first."""

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """As LangChain's; the thread of the config says where to look first."""
        return super().invoke(input, config, **thread_options(config, kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        """As LangChain's; the thread of the config says where to look first."""
        return await super().ainvoke(input, config, **thread_options(config, kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """As LangChain's; the thread of the config says where to look first."""
        return super().stream(input, config, **thread_options(config, kwargs))

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """As LangChain's; the thread of the config says where to look first."""
        return super().astream(input, config, **thread_options(config, kwargs))
