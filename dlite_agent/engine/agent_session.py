"""A conversation that keeps its own transcript: take turns, branch off, go back, feed.

It holds messages and no tensors. What makes it cheap is the engine, which finds the tokens of every
branch again; so forks, rewinds and retries need nothing but the messages.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.config import HistoryMode, SamplingParams
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.session_tasks import (
    FreeSessions,
    LoadConversation,
    SaveConversation,
    SessionAction,
    SessionCommand,
    SessionReply,
)
from dlite_agent.engine.tasks import Count, Purged
from dlite_agent.engine.transcript_file import read_transcript, write_transcript
from dlite_agent.errors import ConfigurationError, RequestError, SessionError
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["AgentSession"]


class AgentSession:
    """One conversation with a backend. Used by one thread or task at a time.

    In asyncio, take turns with `astream`, `aturn` and `aregenerate`, and feed with `afeed`; `fork`
    and `rewind` wait for nothing. The other methods wait where they are called.

    Args:
        backend: E.g. an `Engine`.
        name: Where the engine looks first; None makes one up.
        tools: What the model may call.
        tenant: Whose conversation it is.
        history: How earlier answers come back; None: as the engine does.
        template_kwargs: Variables of the chat template.
    """

    def __init__(
        self,
        backend: ChatBackend,
        name: str | None = None,
        *,
        tools: Sequence[ToolSpec] = (),
        tenant: str = "",
        history: HistoryMode | None = None,
        template_kwargs: Mapping[str, JSON] | None = None,
    ) -> None:
        self.name = name or f"session-{secrets.token_hex(8)}"
        self.messages: list[Message] = []
        """The transcript, answers included; may be edited."""
        self._backend = backend
        self._request = ChatRequest(
            (),
            tools=tuple(tools),
            session_hint=self.name,
            tenant=tenant,
            history=history,
            template_kwargs=dict(template_kwargs or {}),
            when_full="wait",
        )
        self._sampling = SamplingParams()
        self._is_closed = False
        self._session_ids: list[str] = []  # that its turns ran on, the last one last
        # Itself and its open forks, some of which have the same sessions.
        self._family = weakref.WeakSet([self])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def stream(
        self, *messages: Message, sampling: SamplingParams | None = None
    ) -> Iterator[GenerationChunk]:
        """Add messages and take a turn. The answer is added at its end.

        A turn that is not read to its end leaves the transcript as it was before.

        Raises:
            SessionError: The session is closed.
            DLiteError: See `ChatBackend.stream`.
        """
        request = self._next_request(messages, sampling)
        for chunk in self._backend.stream(request):
            self._note(request, chunk)
            yield chunk

    async def astream(
        self, *messages: Message, sampling: SamplingParams | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """`stream` for asyncio."""
        request = self._next_request(messages, sampling)
        source = self._backend.astream(request)
        try:
            async for chunk in source:
                self._note(request, chunk)
                yield chunk
        finally:
            close = getattr(source, "aclose", None)  # a bare iterator has none
            if close is not None:
                await close()

    def turn(self, *messages: Message, sampling: SamplingParams | None = None) -> Generation:
        """`stream`, to its end."""
        *_, last = self.stream(*messages, sampling=sampling)
        assert last.generation is not None
        return last.generation

    async def aturn(self, *messages: Message, sampling: SamplingParams | None = None) -> Generation:
        """`turn` for asyncio."""
        async with aclosing(self.astream(*messages, sampling=sampling)) as chunks:
            *_, last = [chunk async for chunk in chunks]
        assert last.generation is not None
        return last.generation

    def feed(self, text: str) -> None:
        """Say what a tool has printed so far, all of it; it is prefilled while the tool runs.

        The turn that follows gets the final text as a message and decides: what differs is dropped.
        Blocks until it is prefilled.

        Raises:
            RequestError: No call waits for a result.
            SessionError: The session is closed.
        """
        for _ in self._backend.stream(self._partial_request(text)):
            raise AssertionError("a partial request has no answer")

    async def afeed(self, text: str) -> None:
        """`feed` for asyncio."""
        async for _ in self._backend.astream(self._partial_request(text)):
            raise AssertionError("a partial request has no answer")

    def fork(self, name: str | None = None) -> AgentSession:
        """A session that goes its own way from here; what was said so far is shared."""
        self._check_open()
        other = AgentSession(self._backend, name)
        other._request = replace(self._request, session_hint=other.name)
        other.messages = list(self.messages)
        other._session_ids = self._session_ids[-1:]
        self._family.add(other)
        other._family = self._family
        return other

    def pin(self, is_pinned: bool = True) -> None:
        """Keep what an `Engine` has computed for it, whatever needs the memory; False: no longer.

        Raises:
            ConfigurationError: The backend is no `Engine`; see `RemoteEngine.sessions` for another.
            SessionError: The session is closed, or has taken no turn whose KV is left.
        """
        self._check_open()
        if not isinstance(self._backend, Engine):
            raise ConfigurationError(
                f"{self._backend!r} is no Engine; pin a server's session with "
                f"RemoteEngine.sessions().pin({self.name!r})"
            )
        action: SessionAction = "pin" if is_pinned else "unpin"
        name = self._session_ids[-1] if self._session_ids else self.name
        self._backend.ask(SessionCommand(action, name, self._request.tenant), SessionReply)

    def rewind(self, num_messages: int) -> None:
        """Forget all messages from this number on.

        Raises:
            RequestError: There are fewer, or it is no number of messages.
        """
        if type(num_messages) is not int or not 0 <= num_messages <= len(self.messages):
            raise RequestError(
                f"num_messages is {num_messages!r}; use a whole number from 0 to "
                f"{len(self.messages)}, the number of messages now"
            )
        del self.messages[num_messages:]

    def regenerate(self, sampling: SamplingParams | None = None) -> Generation:
        """Take the last turn again, for another answer; the one before is dropped.

        Args:
            sampling: None: as before, with the next `choice_index`.

        Raises:
            RequestError: The last message is no answer.
        """
        with self._without_answer(sampling) as changed:
            return self.turn(sampling=changed)

    async def aregenerate(self, sampling: SamplingParams | None = None) -> Generation:
        """`regenerate` for asyncio."""
        with self._without_answer(sampling) as changed:
            return await self.aturn(sampling=changed)

    def save(self, folder: str | Path) -> int:
        """Write the conversation to a folder: transcript, and what an `Engine` has computed for it.

        A folder that holds an earlier state of it gets what is new. The engine's turns go on while
        it is written.

        Returns:
            KV rows that were saved; 0 where the engine has dropped them, or the backend is no
            `Engine`: then the next turn after `load` prefills.

        Raises:
            CheckpointError: The folder cannot be written, or somebody else writes it.
            RequestError: It is no path.
            SessionError: The session is closed.
        """
        self._check_open()
        folder = _as_path(folder)
        request = replace(self._request, messages=tuple(self.messages))
        num_rows = 0
        if isinstance(self._backend, Engine):
            session_id = self._session_ids[-1] if self._session_ids else ""
            task = SaveConversation(request, session_id, str(folder))
            num_rows = self._backend.ask(task, Count).num_tokens
        write_transcript(folder, request)
        return num_rows

    @classmethod
    def load(
        cls, folder: str | Path, backend: ChatBackend, name: str | None = None, *, tenant: str = ""
    ) -> Self:
        """A conversation that goes on from what `save` wrote, in this process or another.

        Its KV is read by its next turn, and verified; what is damaged is prefilled. The folder has
        to stay until then.

        Args:
            folder: As it was given to `save`.
            backend: The engine of the same model; of another one, `CheckpointError`. Others than an
                `Engine` get the transcript alone.
            name: As for a new one.
            tenant: Whose it is from now on.

        Raises:
            CheckpointError: The folder holds no conversation, a damaged one, or another model's.
        """
        folder = _as_path(folder)
        saved = read_transcript(folder)
        if isinstance(backend, Engine):
            backend.ask(LoadConversation(str(folder), tenant), Count)
        session = cls(backend, name, tenant=tenant)
        session._request = replace(
            session._request,
            tools=saved.tools,
            history=saved.history,
            template_kwargs=saved.template_kwargs,
        )
        session.messages = list(saved.messages)
        return session

    def close(self) -> None:
        """Take no more turns, and free the engine's memory for it. Idempotent.

        What an open fork goes on with stays, and so does what is kept on disk (`Engine.purge`).
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._family.discard(self)
        shared = {session_id for other in self._family for session_id in other._session_ids}
        own = tuple(i for i in self._session_ids if i not in shared)
        if self._session_ids and isinstance(self._backend, Engine):
            with suppress(ConfigurationError):  # an engine that is closed holds nothing
                self._backend.ask(FreeSessions(self.name, own, self._request.tenant), Purged)

    def _next_request(
        self, messages: Sequence[Message], sampling: SamplingParams | None
    ) -> ChatRequest:
        self._check_open()
        self._sampling = sampling or SamplingParams()
        sent = (*self.messages, *messages)
        return replace(self._request, messages=sent, sampling=self._sampling)

    def _note(self, request: ChatRequest, chunk: GenerationChunk) -> None:
        """Add the answer, once it is there."""
        if chunk.generation is None:
            return
        stats = chunk.generation.stats
        self.messages = [*request.messages, replace(chunk.generation.message, turn=stats.turn)]
        self._session_ids = [i for i in self._session_ids if i != stats.session_id]
        self._session_ids.append(stats.session_id)

    def _partial_request(self, text: str) -> ChatRequest:
        self._check_open()
        partial = Message("tool", text, tool_call_id=self._open_call())
        return replace(self._request, messages=(*self.messages, partial), is_partial=True)

    @contextmanager
    def _without_answer(self, sampling: SamplingParams | None) -> Iterator[SamplingParams]:
        """Drop the last answer, unless the body fails; with the sampling of another one."""
        if not self.messages or self.messages[-1].role != "assistant":
            raise RequestError("the last message is no answer; take a turn first")
        if sampling is None:
            index = self._sampling.choice_index + 1
            sampling = replace(self._sampling, choice_index=index)
        dropped = self.messages.pop()
        try:
            yield sampling
        except BaseException:
            self.messages.append(dropped)
            raise

    def _open_call(self) -> str | None:
        """The first call of the last answer without a result."""
        answered = [m.tool_call_id for m in self.messages if m.role == "tool"]
        answers = [message for message in self.messages if message.role == "assistant"]
        calls = answers[-1].tool_calls if answers else ()
        waiting = [call.id for call in calls if call.id not in answered]
        if not waiting or self.messages[-1].role not in ("assistant", "tool"):
            raise RequestError("no call waits for a result; feed what a tool prints after its call")
        return waiting[0]

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionError(f"session {self.name!r} is closed; make another one")


def _as_path(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path) or not str(folder) or "\0" in str(folder):
        raise RequestError(f"folder is {folder!r}; use the path of a folder")
    return Path(folder)
