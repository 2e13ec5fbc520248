"""`RemoteEngine`: the engine of a server, with the methods of one in this process."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self

import httpx

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.client.loop_clients import LoopClients
from dlite_agent.client.remote_errors import pause_s, transport_errors
from dlite_agent.client.remote_sessions import RemoteSessions
from dlite_agent.client.remote_turn import CONNECT_S, RemoteTurn
from dlite_agent.client.wire import message_body, tool_body
from dlite_agent.errors import ModelNotFoundError, RequestError
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["RemoteEngine"]

# Less than a server waits for the next request: none is sent while it closes the connection.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=60.0)
_MODELS = "/v1/models"
JSONObject = dict[str, Any]


class RemoteEngine:
    """Answers with a model that `dlite-agent serve` runs; a `ChatBackend`, as `Engine` is.

    Nothing is asked before the first call, and no weights are loaded here. Every method may be
    called from any thread. An iterator that is closed or dropped, or whose task is cancelled,
    closes its connection, and the server ends the turn. A request waits while the server loads its
    model; `when_full` decides whether it also waits for a place. `AgentSession(RemoteEngine(url))`
    is a conversation that forks, rewinds and feeds. Connections are kept from one turn to the next,
    for asyncio those of each event loop.

    Args:
        base_url: E.g. `http://127.0.0.1:8000`; a `/v1` at the end may be there.
        api_key: Where the server asks for one.
        model: As the server calls it; None for its first.
        max_silence_s: A server that sends nothing for so long is given up; it sends a sign of life
            every five seconds while a turn runs.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        max_silence_s: float = 60.0,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._options: JSONObject = {
            "base_url": self.base_url,
            "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            "timeout": httpx.Timeout(max_silence_s, connect=CONNECT_S, pool=None),
            "limits": _LIMITS,
            "verify": httpx.create_ssl_context() if base_url.startswith("https") else False,
        }
        self._client = httpx.Client(**self._options)
        self._loop_clients = LoopClients(partial(httpx.AsyncClient, **self._options))
        self._finalizer = weakref.finalize(self, _close, self._client, self._loop_clients)
        self._described: JSONObject | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteEngine({self.base_url!r}, model={self._model!r})"

    async def alearn(self) -> None:
        """Ask what `model_name` and `max_context` say, so that they wait for nobody afterwards.

        Raises:
            CapacityError: No server answers.
            ModelNotFoundError: It has no such model.
        """
        if self._described is not None:
            return
        with transport_errors(self.base_url):
            client = await self._loop_clients.of_this_loop()
            while (response := await client.get(_MODELS)).is_error:
                await asyncio.sleep(pause_s(response, waits=True))
        self._described = self._own_description(response.json())

    @property
    def model_name(self) -> str:
        """The model as the server calls it; asks where none was named."""
        return self._model if self._model is not None else str(self._describe()["id"])

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together; waits while the model is loaded."""
        return int(self._describe()["max_model_len"])

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        """Run one turn; the last chunk has the finish reason, the stats and the whole answer.

        Raises:
            CapacityError: No server answers, or it is full.
            DLiteError: What the engine would raise; raised by `next`.
        """
        turn = RemoteTurn(request, self._model, self.base_url)
        with transport_errors(self.base_url):
            while True:
                with self._client.stream(**turn.call) as response:
                    if turn.has_lines(response):
                        for line in response.iter_lines():
                            yield from turn.read(line)
                    else:
                        response.read()
                    seconds = turn.pause_s(response)
                if seconds is None:
                    return
                time.sleep(seconds)

    def generate(self, request: ChatRequest) -> Generation:
        """Run one turn and return its end; of several choices, the first."""
        return self.generate_choices(request)[0]

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Run one turn a choice and return their ends, in order."""
        return _answers(list(self.stream(request)))

    async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
        """`stream` for asyncio."""
        turn = RemoteTurn(request, self._model, self.base_url)
        with transport_errors(self.base_url):
            client = await self._loop_clients.of_this_loop()
            while True:
                async with client.stream(**turn.call) as response:
                    if turn.has_lines(response):
                        async for line in response.aiter_lines():
                            for chunk in turn.read(line):
                                yield chunk
                    else:
                        await response.aread()
                    seconds = turn.pause_s(response)
                if seconds is None:
                    return
                await asyncio.sleep(seconds)

    async def agenerate(self, request: ChatRequest) -> Generation:
        """`generate` for asyncio."""
        return (await self.agenerate_choices(request))[0]

    async def agenerate_choices(self, request: ChatRequest) -> list[Generation]:
        """`generate_choices` for asyncio."""
        async with aclosing(self.astream(request)) as chunks:
            return _answers([chunk async for chunk in chunks])

    def count_tokens(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Exact length of these messages as they would be rendered, without a generation prompt."""
        body: JSONObject = {
            "messages": [message_body(message) for message in messages],
            "tools": [tool_body(tool) for tool in tools],
            "add_generation_prompt": False,
        }
        return int(self._ask("POST", "/tokenize", json=body)["count"])

    def sessions(self, tenant: str = "") -> RemoteSessions:
        """A tenant's sessions on the server: list, pin, fork, save, load, delete, explain."""
        return RemoteSessions(self._ask, tenant)

    def close(self) -> None:
        """Close the connections; turns that run on them end. The server goes on. Idempotent."""
        self._finalizer()

    def _ask(self, method: str, path: str, **options: Any) -> JSONObject:
        """Ask something quick and return the answer."""
        with transport_errors(self.base_url):
            while (response := self._client.request(method, path, **options)).is_error:
                time.sleep(pause_s(response, waits=True))
        answer: JSONObject = response.json()
        return answer

    def _describe(self) -> JSONObject:
        """What the server says of the model."""
        if self._described is None:
            self._described = self._own_description(self._ask("GET", _MODELS))
        return self._described

    def _own_description(self, listed: JSONObject) -> JSONObject:
        """What the server says of our model among its others."""
        models: list[JSONObject] = listed["data"]
        named = [model for model in models if self._model in (None, model["id"])]
        if not named:
            known = ", ".join(repr(model["id"]) for model in models)
            raise ModelNotFoundError(
                f"the server at {self.base_url!r} has no model {self._model!r}; it has {known}"
            )
        return named[0]


def _answers(chunks: Sequence[GenerationChunk]) -> list[Generation]:
    answers = {c.choice_index: c.generation for c in chunks if c.generation is not None}
    if not answers:
        raise RequestError("is_partial=True has no answer; read its stream to the end instead")
    return [answers[index] for index in sorted(answers)]


def _close(client: httpx.Client, loop_clients: LoopClients) -> None:
    client.close()
    loop_clients.drop()
