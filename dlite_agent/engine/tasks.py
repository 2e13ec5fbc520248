"""Tasks and events between an engine and its host, and what every host and service looks like."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.engine.session_tasks import (
    Decoded,
    Detokenize,
    FreeSessions,
    LoadConversation,
    SaveConversation,
    SessionCommand,
    SessionReply,
    TokenIds,
    Tokenize,
)
from dlite_agent.errors import ConfigurationError, DLiteError
from dlite_agent.outputs import GenerationChunk

__all__ = [
    "Answer",
    "Count",
    "CountTokens",
    "EngineInfo",
    "Event",
    "Failure",
    "Finished",
    "Host",
    "Inspect",
    "Later",
    "ListSessions",
    "Progress",
    "PurgeSessions",
    "Purged",
    "Question",
    "Service",
    "SessionList",
    "Sink",
    "StoredSession",
    "Task",
    "Ticket",
    "Usage",
    "closed_error",
    "fresh",
    "notify",
    "unheard",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a stage of loading and how much of it is done, in [0, 1]; in the loading thread."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known once the model is loaded.

    Attributes:
        model: The model's name as it was asked for.
        max_context: Most tokens of prompt and answer together.
        drafter: The drafter in use, and why.
        dtype: Type of weights and KV, e.g. `bfloat16`.
        device: E.g. `cpu`.
        max_kv_bytes: The KV budget.
        load_s: Seconds that loading took.
    """

    model: str
    max_context: int
    drafter: str
    dtype: str
    device: str
    max_kv_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Ask for the length of a prompt without a generation prompt. Answer: `Count`."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask for the memory in use. Answer: `Usage`."""


@dataclass(frozen=True, slots=True)
class ListSessions:
    """Ask which sessions are kept, of one tenant or of all. Answer: `SessionList`."""

    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class PurgeSessions:
    """Forget idle sessions that match both fields, in all tiers. Answer: `Purged`."""

    older_than_s: float | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session in one tier.

    Attributes:
        session_id: Its id.
        tier: `device` (the KV pool), `host` or `disk`; it may be in several.
        num_tokens: Tokens that it holds there.
        nbytes: What it takes there; of pages that sessions share, its part.
        idle_s: Seconds since it was used; 0 while a turn runs on it.
        tenant: Whose it is.
        is_pinned: It is not evicted from there.
        state: `running` while a turn runs on it, `parked` while one does whose stream nobody reads
            (`EngineConfig.park_after_s`), else `idle`.
    """

    session_id: str
    tier: str
    num_tokens: int
    nbytes: int
    idle_s: float
    tenant: str
    is_pinned: bool = False
    state: str = "idle"


@dataclass(frozen=True, slots=True)
class SessionList:
    """The sessions of all tiers."""

    sessions: tuple[StoredSession, ...]


@dataclass(frozen=True, slots=True)
class Purged:
    """How many sessions were forgotten."""

    num_sessions: int


@dataclass(frozen=True, slots=True)
class Count:
    """Tokens of a prompt."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of the sessions.

    Attributes:
        kv_used_bytes: KV pages in use; a page that two sessions share counts once.
        kv_free_bytes: What is left of the KV budget.
        num_sessions: Sessions that hold KV.
        rows_computed: Rows of all target forwards so far.
    """

    kv_used_bytes: int
    kv_free_bytes: int
    num_sessions: int
    rows_computed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The task ended with this error; the last event."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Finished:
    """The task ended well or was cancelled; the last event."""


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that another thread will have.

    Attributes:
        begin: Gets the sink for the answer and `Finished`, or for a `Failure`; called once.
    """

    begin: Callable[[Sink], None]


Question = (
    CountTokens
    | Inspect
    | ListSessions
    | PurgeSessions
    | Tokenize
    | Detokenize
    | SessionCommand
    | FreeSessions
    | SaveConversation
    | LoadConversation
)
Answer = Count | Usage | SessionList | Purged | TokenIds | Decoded | SessionReply
Task = ChatRequest | Question
Event = GenerationChunk | Answer | Failure | Finished
Sink = Callable[[Event], bool | None]
"""Gets the events of a task; True says that its reader has been away for long."""


class Ticket(Protocol):
    """Who asked for a turn.

    Attributes:
        submitted_s: `time.perf_counter` when it was asked for.
        is_cancelled: Nobody wants it any more.
        is_parked: Its reader has been away for long (`EngineConfig.park_after_s`).
    """

    submitted_s: float
    is_cancelled: bool
    is_parked: bool

    def put(self, event: Event) -> None:
        """Deliver an event; never blocks and never raises."""
        ...


class Service(Protocol):
    """What a worker loads. Used by the worker's thread only."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        ...

    @property
    def num_turns(self) -> int:
        """Turns that run."""
        ...

    @property
    def num_free(self) -> int:
        """How many more may be added now."""
        ...

    @property
    def is_idle_work_left(self) -> bool:
        """Whether `idle_step` would do something."""
        ...

    def idle_step(self) -> None:
        """Do a little of what nobody waits for (at most 50 ms); called while no turn runs."""
        ...

    def answer(self, question: Question) -> Answer | Later:
        """Answer a quick question at once, or begin what will answer it."""
        ...

    def add(self, request: ChatRequest, ticket: Ticket) -> None:
        """Add a turn to those that run. Its events go to the ticket, `Failure` or `Finished` last.

        A cancelled turn ends within one prefill chunk or one round, and is finished.
        """
        ...

    def step(self) -> None:
        """Bring all turns that can run one forward further."""
        ...

    def close(self, error: BaseException) -> None:
        """Fail the turns that run with this error, and give the memory back."""
        ...


class Host(Protocol):
    """Where tasks run: a thread of this process (`Worker`) or another process. Thread-safe."""

    @property
    def is_usable(self) -> bool:
        """False after a failed load, a close, or the end of the process behind it."""
        ...

    @property
    def is_started(self) -> bool:
        """Whether `start` would return at once; else it may block for a few milliseconds."""
        ...

    def start(self, progress: Progress | None = None) -> None:
        """Begin to load, unless that was done; `progress` hears the rest of it."""
        ...

    def wait_ready(self) -> EngineInfo:
        """Start, and block until the service is loaded.

        Raises:
            DLiteError: Loading failed, here or for an earlier caller.
        """
        ...

    def submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        """Start, queue a task, and return what cancels it; never blocks.

        What goes wrong later arrives as `Failure`, an error of loading too.

        Raises:
            CapacityError: `max_queue` tasks wait already.
            ConfigurationError: Loading failed before, or the host is closed.
        """
        ...

    def close(self) -> None:
        """Cancel what runs, fail what waits, free everything, and return when that is done."""
        ...


def closed_error(name: str) -> ConfigurationError:
    """The error of everything that is asked of a closed engine."""
    return ConfigurationError(
        f"the engine of {name!r} is closed; create another Engine, or use Engine.shared()"
    )


def fresh(error: BaseException) -> BaseException:
    """A copy for each caller, since an exception collects the tracebacks of its raises."""
    return copy.copy(error) if isinstance(error, DLiteError) else error


def unheard(stage: str, fraction: float) -> None:
    """A `Progress` for a load that nobody watches."""


def notify(listeners: Iterable[Progress], stage: str, fraction: float) -> None:
    """Tell listeners of progress; a progress bar that fails must not fail the load."""
    for listener in tuple(listeners):
        try:
            listener(stage, fraction)
        except Exception:
            logger.warning("a progress callback failed", exc_info=True)
