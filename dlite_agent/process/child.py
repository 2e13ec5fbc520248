"""The child behind `isolation="process"`: a worker, and the pipe to the host that started it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

from dlite_agent.config import EngineConfig
from dlite_agent.engine.tasks import (
    Event,
    Failure,
    Finished,
    Progress,
    Service,
    Task,
)
from dlite_agent.engine.worker import Worker
from dlite_agent.errors import DLiteError
from dlite_agent.process.channel import Channel

__all__ = ["serve"]


class _LogForwarder(logging.Handler):
    """Sends our log records to the host, whose handlers decide what becomes of them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(("log", record.name, record.levelno, record.getMessage()))


def serve(descriptor: int) -> None:
    """Be the child: load and run what the parent asks for until it is gone, or ends us.

    Args:
        descriptor: File descriptor of our end of the socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(Connection(descriptor), "dlite child")
    server = _Server(channel)
    channel.receive(server.handle, server.is_orphan)
    os._exit(0)  # the parent died: nobody waits for a clean end, and a forward may take long


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._worker: Worker | None = None
        self._cancels: dict[int, Callable[[], None]] = {}
        self._parked: set[int] = set()
        self._parent_pid = os.getppid()

    def is_orphan(self) -> bool:
        """Whether the parent ended although a fork of it still holds its end of the socket."""
        return os.getppid() != self._parent_pid

    def handle(self, message: object) -> None:
        match message:
            case ("start", EngineConfig() as config, int(level), int(parent_pid)):
                self._parent_pid = parent_pid
                self._start(config, level)
            case ("task", int(task_id), task) if isinstance(task, Task):
                self._submit(task_id, task)
            case ("close",):
                if self._worker is not None:
                    self._worker.close()
                os._exit(0)
            case ("cancel", int(task_id)):
                if cancel := self._cancels.pop(task_id, None):
                    cancel()
            case ("park", int(task_id)) if task_id in self._cancels:
                self._parked.add(task_id)

    def _start(self, config: EngineConfig, level: int) -> None:
        root = logging.getLogger("dlite_agent")
        root.setLevel(min(level, logging.INFO))  # the host's own loggers decide once more
        root.addHandler(_LogForwarder(self._channel))
        root.propagate = False

        def load(progress: Progress) -> Service:
            import torch  # here, so that the main thread reads cancels while it is imported

            from dlite_agent.engine.service import load_service

            if config.threads is not None:
                torch.set_num_threads(config.threads)
            return load_service(config, progress)

        self._worker = Worker(load, name=config.model, max_queue=config.max_queue)
        self._worker.start(
            lambda stage, fraction: self._channel.send(("progress", stage, float(fraction)))
        )
        threading.Thread(
            target=self._announce, args=(self._worker,), name="dlite announcer", daemon=True
        ).start()

    def _announce(self, worker: Worker) -> None:
        try:
            self._channel.send(("ready", worker.wait_ready()))
        except Exception as error:  # noqa: BLE001  # the parent raises it, with its class
            self._channel.send(("failed", _portable(error)))

    def _submit(self, task_id: int, task: Task) -> None:
        is_over = threading.Event()

        def sink(event: Event) -> bool:
            if isinstance(event, Failure):
                event = Failure(_portable(event.error))
            if isinstance(event, Failure | Finished):
                is_over.set()
                self._cancels.pop(task_id, None)
                self._parked.discard(task_id)
            self._channel.send(("event", task_id, event))
            return task_id in self._parked

        assert self._worker is not None, "the parent sends `start` first"
        try:
            self._cancels[task_id] = self._worker.submit(task, sink)
        except Exception as error:  # noqa: BLE001  # the parent raises it, with its class
            sink(Failure(error))
        if is_over.is_set():  # it ended before we noted how to cancel it
            self._cancels.pop(task_id, None)


def _portable(error: BaseException) -> BaseException:
    """The error as it is, where it and its class surely exist at the other end; else its text."""
    if isinstance(error, DLiteError):
        return error.with_traceback(None)
    details = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
        error.add_note(details)
        return error.with_traceback(None)
    except Exception:  # noqa: BLE001  # a class of somebody else's may do anything
        return RuntimeError(f"{type(error).__qualname__}: {error}\n{details}")
