"""The engine: a model that lasts, and the turns of every agent in the process, together.

`Engine` only wires. A `Host` (a thread, or another process) owns the model; here its events become
iterators for threads and for asyncio, and here is the one process-wide registry, so that two chat
objects do not load a model twice.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.config import EngineConfig
from dlite_agent.engine.choices import answers_in_order, split_choices
from dlite_agent.engine.submission import ReaderWatch, TurnReader, submit_choices
from dlite_agent.engine.submit_beside import submitted
from dlite_agent.engine.tasks import (
    Answer,
    Count,
    CountTokens,
    EngineInfo,
    Event,
    Failure,
    Inspect,
    ListSessions,
    Progress,
    Purged,
    PurgeSessions,
    Question,
    Service,
    SessionList,
    Sink,
    StoredSession,
    Task,
    Usage,
)
from dlite_agent.engine.turnstile import Turnstile
from dlite_agent.engine.worker import close_dropped, open_host
from dlite_agent.errors import ConfigurationError
from dlite_agent.outputs import Generation, GenerationChunk
from dlite_agent.sessions.public import PUBLIC

__all__ = ["Engine"]

AnswerT = TypeVar("AnswerT", bound=Answer)


class Engine:
    """Runs one model for every agent of this process; a `ChatBackend`.

    Constructing it loads nothing. The model is loaded by `load`, or by the first call that needs
    it. Every method may be called from any thread. Up to `max_batch` turns run at once and share
    forwards; the others wait, in the order in which they came. An iterator that is closed or
    dropped, or whose task is cancelled, cancels its turn within one prefill chunk or one round, and
    leaves its session valid. Who reads slowly holds up nobody: chunks wait for their reader without
    a limit, and the turn runs to its end.

    An engine that is not needed any more is closed with `close`, by leaving its `with` block, when
    it is collected, or at the exit of the interpreter. It does not survive `os.fork`: in the child
    it raises `ConfigurationError`.

    Args:
        config: How to load the model, or just the model's name.
        loader: Builds what the worker runs, in the worker's thread; None loads the model that
            `config` names.
    """

    def __init__(
        self,
        config: EngineConfig | str = "nano",
        *,
        loader: Callable[[EngineConfig, Progress], Service] | None = None,
    ) -> None:
        self.config = EngineConfig(model=config) if isinstance(config, str) else config
        self._loader = loader
        self._pid = os.getpid()
        self._host = open_host(self.config, loader)
        self._turnstile = Turnstile(self.config.max_queue)
        self._finalizer = weakref.finalize(self, close_dropped, self._host)

    @classmethod
    def shared(cls, config: EngineConfig | str = "nano") -> Engine:
        """The engine of this configuration in this process; made when there is none that works.

        It lives until `close` or `Engine.close_all`, whoever else holds it. One that failed to load
        or was closed is replaced, so a repaired cause (a full disk, a wrong path) needs no new
        process.
        """
        key = EngineConfig(model=config) if isinstance(config, str) else config
        with _shared_lock:
            engine = _shared.get(key)
            if engine is None or not engine._host.is_usable:
                engine = _shared[key] = cls(key)
            return engine

    @staticmethod
    def close_all() -> None:
        """Close every shared engine."""
        with _shared_lock:
            engines = list(_shared.values())
            _shared.clear()
        for engine in engines:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self.config.model!r}, isolation={self.config.isolation!r})"

    @property
    def model_name(self) -> str:
        """The model as it was asked for."""
        return self.config.model

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together. Loads the model when that was not done yet."""
        return self.load().max_context

    def start(self, progress: Progress | None = None) -> None:
        """Begin to load in the background, unless that was done. See `load`."""
        self._check_process()
        self._host.start(progress)

    def load(self, progress: Progress | None = None) -> EngineInfo:
        """Block until the model is loaded.

        Args:
            progress: Hears the stage and its share done in [0, 1], in another thread; not called
                when it is loaded.

        Raises:
            ConfigurationError: The model cannot be loaded, or the engine is closed. Every later
                call raises the same.
        """
        self.start(progress)
        return self._host.wait_ready()

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        """Run one turn; the last chunk has the finish reason, the stats and the whole answer.

        Nothing is submitted before the first `next`. Several choices are as many turns, which share
        the prompt's KV; each ends with a last chunk of its own.

        Raises:
            DLiteError: See `docs/reference/errors.md`; raised by `next`.
        """
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        choices = split_choices(request)
        self._turnstile.enter(len(choices), waits=request.when_full == "wait")
        watch = ReaderWatch(self.config.park_after_s)
        cancel = self._submit_choices(choices, lambda *event: events.put(event), watch)
        with TurnReader(len(choices), cancel, watch) as reader:
            while reader.num_running:
                yield from reader.read(*events.get())

    def generate(self, request: ChatRequest) -> Generation:
        """Run one turn and return its end; of several choices, the first."""
        return self.generate_choices(request)[0]

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Run one turn a choice and return their ends, in order."""
        return answers_in_order(self.stream(request))

    async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
        """`stream` for asyncio; the event loop never waits for the model, not even while it loads.

        With `isolation="thread"` the first load imports torch beside the loop, and that holds the
        interpreter lock for up to a second at a time; with `isolation="process"` it does not.
        """
        if not self._host.is_started:
            await asyncio.to_thread(self.start)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        choices = split_choices(request)

        # A loop that is closed meanwhile raises in the worker, which takes the turn for cancelled.
        def put(choice_index: int, event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (choice_index, event))

        await self._turnstile.aenter(len(choices), waits=request.when_full == "wait")
        watch = ReaderWatch(self.config.park_after_s)
        submit = partial(self._submit_choices, choices, put, watch)
        cancel = await submitted(request, submit)
        with TurnReader(len(choices), cancel, watch) as reader:
            while reader.num_running:
                for chunk in reader.read(*await events.get()):
                    yield chunk

    async def agenerate(self, request: ChatRequest) -> Generation:
        """`generate` for asyncio."""
        return (await self.agenerate_choices(request))[0]

    async def agenerate_choices(self, request: ChatRequest) -> list[Generation]:
        """`generate_choices` for asyncio."""
        return answers_in_order([chunk async for chunk in self.astream(request)])

    def publish(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        template_kwargs: Mapping[str, JSON] | None = None,
    ) -> None:
        """Declare that these messages and tools are no secret, and compute them for all tenants.

        Prompts that begin with them, of whatever tenant, then begin behind them. Nothing else is
        shared between tenants. Their KV is kept until `unpublish`, whoever needs memory.

        Raises:
            CapacityError: There is no room for them.
            DLiteError: As for a turn.
        """
        kwargs = dict(template_kwargs or {})
        request = ChatRequest(tuple(messages), tuple(tools), template_kwargs=kwargs)
        request = replace(request, is_partial=True, is_public=True, when_full="wait")
        for _ in self.stream(request):
            raise AssertionError("what is published has no answer")

    def unpublish(self) -> int:
        """Let go of all that was published; returns how many prefixes there were."""
        return self.purge(tenant=PUBLIC)

    def count_tokens(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Exact length of these messages as they would be rendered, without a generation prompt."""
        return self.ask(CountTokens(messages, tools), Count).num_tokens

    def usage(self) -> Usage:
        """Memory of the sessions now; does not wait for a turn that runs."""
        return self.ask(Inspect(), Usage)

    def sessions(self, tenant: str | None = None) -> tuple[StoredSession, ...]:
        """The sessions of one tenant or of all, in every tier; does not wait for a turn."""
        return self.ask(ListSessions(tenant), SessionList).sessions

    def purge(self, *, older_than_s: float | None = None, tenant: str | None = None) -> int:
        """Forget idle sessions in every tier, and what was noted to replay their turns.

        What was published stays.

        Args:
            older_than_s: Only those that were not used for so long.
            tenant: Only this tenant's; None: of all.

        Returns:
            How many sessions there were.
        """
        return self.ask(PurgeSessions(older_than_s, tenant), Purged).num_sessions

    def close(self) -> None:
        """Cancel the turns that run, fail those that wait, and give all memory back. Idempotent."""
        with _shared_lock:
            if _shared.get(self.config) is self:
                del _shared[self.config]
        if os.getpid() == self._pid and self._finalizer.detach() is not None:
            self._host.close()

    def _submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        self._check_process()
        return self._host.submit(task, sink)

    def _submit_choices(
        self,
        choices: Sequence[ChatRequest],
        sink: Callable[[int, Event], None],
        watch: ReaderWatch,
    ) -> Callable[[], None]:
        return submit_choices(self._submit, choices, self._turnstile, sink, watch)

    def ask(self, task: Question, kind: type[AnswerT]) -> AnswerT:
        """Ask something quick, which is answered between two forwards.

        Args:
            task: A question of `engine.tasks` or `engine.session_tasks`.
            kind: The class of its answer.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cancel = self._submit(task, events.put)
        try:
            event = events.get()
        finally:
            cancel()
        if isinstance(event, Failure):
            raise event.error
        assert isinstance(event, kind)
        return event

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigurationError(
                f"the engine of {self.model_name!r} was made in process {self._pid}, and this is "
                f"process {os.getpid()}, forked from it: its thread stayed there; make the engine "
                'after the fork, or start worker processes with the "spawn" method'
            )


_shared: dict[EngineConfig, Engine] = {}
_shared_lock = threading.RLock()


def _forget_shared() -> None:
    """In a forked child: the parent's engines are not ours, and a lost thread may hold its lock."""
    global _shared_lock
    _shared_lock = threading.RLock()
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_shared)
