"""One turn of `ChatDLite` on its backend, waited for no longer than its timeout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from dataclasses import dataclass

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.client.remote_engine import RemoteEngine
from dlite_agent.errors import UnsupportedParameterError
from dlite_agent.integrations.blocking import iterate
from dlite_agent.integrations.langchain_errors import ModelTimeoutError
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["ChatTurn"]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A request, who answers it, and how long to wait.

    Attributes:
        backend: Runs it.
        request: What is asked.
        timeout_s: Most seconds until the whole answer, loading and queueing included; of a stream,
            until each chunk. None waits as long as it takes. A turn that is given up ends within
            one prefill chunk or one round, and its session stays valid.
    """

    backend: ChatBackend
    request: ChatRequest
    timeout_s: float | None = None

    def answers(self) -> list[Generation]:
        """All answers.

        Raises:
            ModelTimeoutError: They took longer.
        """
        if self.timeout_s is None:
            return self.backend.generate_choices(self.request)
        return next(iterate(self._all_answers()))

    async def aanswers(self) -> list[Generation]:
        """`answers` for asyncio."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._learn()
                return await self.backend.agenerate_choices(self.request)
        except TimeoutError as error:
            raise self._timed_out("answer") from error

    def chunks(self) -> Generator[GenerationChunk, None, None]:
        """The only answer, as it comes; closing the iterator ends the turn.

        Raises:
            UnsupportedParameterError: There are several, and a stream of LangChain is one message.
            ModelTimeoutError: A chunk took longer.
        """
        self._refuse_several()
        if self.timeout_s is None:
            source = self.backend.stream(self.request)
        else:
            source = iterate(self.achunks())
        try:
            yield from source
        finally:
            close = getattr(source, "close", None)  # a bare iterator has none
            if close is not None:
                close()

    async def achunks(self) -> AsyncGenerator[GenerationChunk, None]:
        """`chunks` for asyncio."""
        self._refuse_several()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._learn()
        except TimeoutError as error:
            raise self._timed_out("chunk") from error
        source = self.backend.astream(self.request)
        try:
            while (chunk := await self._next(source)) is not None:
                yield chunk
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    async def _learn(self) -> None:
        """Ask a server for what is read without `await` afterwards: its model's name and size."""
        if isinstance(self.backend, RemoteEngine):
            await self.backend.alearn()

    async def _all_answers(self) -> AsyncGenerator[list[Generation], None]:
        yield await self.aanswers()

    async def _next(self, source: AsyncIterator[GenerationChunk]) -> GenerationChunk | None:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await anext(source, None)
        except TimeoutError as error:
            raise self._timed_out("chunk") from error

    def _timed_out(self, what: str) -> ModelTimeoutError:
        is_remote = isinstance(self.backend, RemoteEngine)  # which may have to ask for the name
        who = self.backend if is_remote else self.backend.model_name
        return ModelTimeoutError(
            f"{who!r} gave no {what} within timeout={self.timeout_s!r} s; the "
            "first call loads the model; raise timeout, or send less with a smaller max_tokens"
        )

    def _refuse_several(self) -> None:
        if self.request.num_choices > 1:
            raise UnsupportedParameterError(
                f"n={self.request.num_choices} cannot be streamed: a stream of LangChain is one "
                "message; use generate or agenerate, or n=1"
            )
