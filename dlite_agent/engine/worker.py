"""One thread that loads a service, owns it, and runs its turns together.

Whoever submits gets events through a sink that the worker's thread calls; nothing else crosses
between the threads. A sink must not block: the engine's put into queues without a limit, since an
answer has one, so that nobody who reads slowly holds up others, or his own turn. Turns begin in the
order in which they came. A question (a count, a look at the memory) is answered between two
forwards, so that it never waits for somebody's whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dlite_agent.backend import ChatRequest
from dlite_agent.config import EngineConfig
from dlite_agent.engine.tasks import (
    EngineInfo,
    Event,
    Failure,
    Finished,
    Host,
    Later,
    Progress,
    Service,
    Sink,
    Task,
    closed_error,
    fresh,
    notify,
)
from dlite_agent.errors import CapacityError, ConfigurationError

__all__ = ["Worker", "close_dropped", "open_host"]

logger = logging.getLogger(__name__)

_LOADING_JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    sink: Sink
    submitted_s: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    is_parked: bool = False

    def put(self, event: Event) -> None:
        """Deliver an event; a sink that raises has no reader any more."""
        try:
            self.is_parked |= self.sink(event) is True
        except Exception:  # a reader's fault must not end the thread that serves the others
            logger.debug("reader is gone; its task is cancelled", exc_info=True)
            self.is_cancelled = True

    def cancel(self) -> None:
        self.is_cancelled = True


class Worker:
    """A `Host` in a thread of this process.

    Args:
        load: Builds the service; called once, in the worker's thread.
        name: Names the thread, and the engine in errors.
        max_queue: Tasks that may wait; turns that run are not counted.
    """

    def __init__(self, load: Callable[[Progress], Service], *, name: str, max_queue: int) -> None:
        self._load = load
        self._name = name
        self._max_queue = max_queue
        self._pid = os.getpid()
        self._changed = (
            threading.Condition()
        )  # re-entrant: a collected engine may close us from any frame
        self._state: Literal["new", "loading", "ready", "failed", "closed"] = "new"
        self._thread: threading.Thread | None = None
        self._info: EngineInfo | None = None
        self._error: BaseException | None = None
        self._jobs: deque[_Job] = deque()
        self._listeners: list[Progress] = []

    @property
    def is_usable(self) -> bool:
        """See `Host.is_usable`."""
        return self._state not in ("failed", "closed")

    @property
    def is_started(self) -> bool:
        """See `Host.is_started`."""
        return self._state != "new"

    def start(self, progress: Progress | None = None) -> None:
        """See `Host.start`."""
        with self._changed:
            if progress is not None and self._state in ("new", "loading"):
                self._listeners.append(progress)
            if self._state == "new":
                self._state = "loading"
                # A daemon: a program that ends in the middle of a turn must not hang; Engine closes
                # us at exit.
                self._thread = threading.Thread(
                    target=self._run, name=f"dlite {self._name}", daemon=True
                )
                self._thread.start()

    def wait_ready(self) -> EngineInfo:
        """See `Host.wait_ready`."""
        self.start()
        with self._changed:
            self._changed.wait_for(lambda: self._state != "loading")
            self._raise_unless_usable()
            assert self._info is not None
            return self._info

    def submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        """See `Host.submit`."""
        self.start()
        with self._changed:
            self._raise_unless_usable()
            waiting = sum(not job.is_cancelled for job in self._jobs)
            if waiting >= self._max_queue:
                raise CapacityError(
                    f"{waiting} requests wait for {self._name!r} already "
                    f"(max_queue={self._max_queue}); try again later, send fewer at a time, or "
                    "raise max_queue of the EngineConfig"
                )
            job = _Job(task, sink)
            self._jobs.append(job)
            self._changed.notify_all()
        return job.cancel

    def close(self) -> None:
        """See `Host.close`."""
        if os.getpid() != self._pid:
            return  # a fork inherits neither the thread nor the right to the lock
        with self._changed:
            thread = self._thread
            if self._state != "failed":
                self._state = "closed"
            self._listeners.clear()
            self._changed.notify_all()
            is_loading = self._info is None
        if thread is not None and thread is not threading.current_thread():
            # A load ends at its next report; one that waits for a network is left to that.
            thread.join(_LOADING_JOIN_S if is_loading else None)

    def _raise_unless_usable(self) -> None:
        if self._state == "failed":
            raise self._load_error()
        if self._state == "closed":
            raise closed_error(self._name)

    def _load_error(self) -> BaseException:
        assert self._error is not None
        return fresh(self._error)

    # ---- below: the worker's thread --------------------------------------------------------

    def _run(self) -> None:
        try:
            service = self._load(self._report)
        except BaseException as error:  # noqa: BLE001  # whatever it is, who waits must hear of it
            self._fail_load(error)
            return
        try:
            with self._changed:
                if self._state == "loading":
                    self._state, self._info = "ready", service.info
                self._listeners.clear()
                self._changed.notify_all()
            while self._admit(service):
                if service.num_turns:
                    service.step()
                elif service.is_idle_work_left:
                    service.idle_step()
        finally:
            with self._changed:
                self._state = "closed"
            service.close(closed_error(self._name))
            self._fail_waiting(closed_error(self._name))

    def _report(self, stage: str, fraction: float) -> None:
        with self._changed:
            if self._state == "closed":
                raise closed_error(self._name)  # closed while loading: stop here
            listeners = tuple(self._listeners)
        notify(listeners, stage, fraction)

    def _fail_load(self, error: BaseException) -> None:
        logger.debug("loading model=%s failed", self._name, exc_info=error)
        with self._changed:
            # Without the traceback, whose frames hold half-loaded weights.
            self._error = error.with_traceback(None)
            self._error.__context__ = None
            if self._state == "loading":
                self._state = "failed"
            self._changed.notify_all()
        self._fail_waiting(self._load_error())

    def _fail_waiting(self, error: BaseException) -> None:
        with self._changed:
            jobs, self._jobs = list(self._jobs), deque()
        for job in jobs:
            job.put(Failure(error))

    def _admit(self, service: Service) -> bool:
        """Hand over what waits, or wait for something to do; False once the worker is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._state != "ready"
                    or self._jobs
                    or service.num_turns
                    or service.is_idle_work_left
                )
            )
            if self._state != "ready":
                return False
            if not self._jobs:  # the usual case
                return True
            wanted = [job for job in self._jobs if not job.is_cancelled]
            questions = [job for job in wanted if not isinstance(job.task, ChatRequest)]
            turns = [job for job in wanted if isinstance(job.task, ChatRequest)]
            num_free = service.num_free
            self._jobs = deque(turns[num_free:])
        for job in questions:
            _answer(service, job)
        for job in turns[:num_free]:
            assert isinstance(job.task, ChatRequest)
            service.add(job.task, job)
        return True


def _answer(service: Service, job: _Job) -> None:
    assert not isinstance(job.task, ChatRequest)
    try:
        answer = service.answer(job.task)
        if isinstance(answer, Later):
            answer.begin(job.put)
            return
        job.put(answer)
    except Exception as error:  # noqa: BLE001  # it belongs to the caller; the worker lives on
        job.put(Failure(error))
    except BaseException as panic:  # noqa: BLE001  # of a Rust extension; the same, but readable
        job.put(Failure(RuntimeError(f"{type(panic).__name__}: {panic}")))
    else:
        job.put(Finished())


def open_host(
    config: EngineConfig, loader: Callable[[EngineConfig, Progress], Service] | None
) -> Host:
    """Where an engine's model runs: a thread, or a process of its own.

    Args:
        config: Says which.
        loader: Builds the service in place of the model that `config` names.

    Raises:
        ConfigurationError: A loader cannot cross to another process.
    """
    if config.isolation == "process":
        # Only who asks for it pays for the import.
        from dlite_agent.process.host import ProcessHost

        if loader is not None:
            raise ConfigurationError(
                'a loader cannot be given to isolation="process"; use isolation="thread"'
            )
        return ProcessHost(config)

    def load(progress: Progress) -> Service:
        if loader is not None:
            return loader(config, progress)
        # This imports torch, and constructing an engine must not.
        from dlite_agent.engine.service import load_service

        return load_service(config, progress)

    return Worker(load, name=config.model, max_queue=config.max_queue)


def close_dropped(host: Host) -> None:
    """Close the host of an engine that was collected, which may happen in an event loop's code."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        host.close()
    else:  # it waits for a forward to end, and for what is still to be saved
        threading.Thread(target=host.close, name="dlite closing").start()
