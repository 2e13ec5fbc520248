"""`isolation="process"`: a process of its own, so that a busy host does not slow the model down.

Every operator of a forward releases the interpreter lock and takes it again. A host's thread that
computes in Python holds that lock for 5 ms at a time, so a step of a hundred operators can wait
half a second. In a process of its own the model has an interpreter lock for itself.

The child is started by running an interpreter, not by `multiprocessing.Process`: that would import
the host's main module once more, which in a plain script without a `__main__` guard means to run it
once more. It ends with its parent.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Literal

from dlite_agent.config import EngineConfig
from dlite_agent.engine.tasks import (
    EngineInfo,
    Event,
    Failure,
    Finished,
    Progress,
    Sink,
    Task,
    closed_error,
    fresh,
    notify,
)
from dlite_agent.errors import CapacityError, ConfigurationError, DLiteError
from dlite_agent.process.channel import Channel

__all__ = ["ProcessHost"]

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_SAVE_S = 120.0  # for sessions that are not on disk yet
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from dlite_agent.process.child import serve; serve(int(sys.argv[1]))"
)


class ProcessHost:
    """A `Host` in a child process.

    A child that dies while it serves fails its turns with `CapacityError`, and the next call starts
    another one. A child that dies while it loads would die again: that is a `ConfigurationError`,
    and it stays.
    """

    def __init__(self, config: EngineConfig) -> None:
        if os.name != "posix":
            raise ConfigurationError(
                'isolation="process" needs Linux or macOS; use isolation="thread"'
            )
        self._config = config
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._is_closed = False

    @property
    def is_usable(self) -> bool:
        """See `Host.is_usable`."""
        child = self._child
        return not self._is_closed and (child is None or child.load_error is None)

    @property
    def is_started(self) -> bool:
        """See `Host.is_started`."""
        child = self._child
        return self._is_closed or (child is not None and not child.must_be_replaced)

    def start(self, progress: Progress | None = None) -> None:
        """See `Host.start`."""
        with self._lock:
            if self._is_closed:
                return
            if self._child is None or self._child.must_be_replaced:
                self._child = _Child(self._config)
            if progress is not None:
                self._child.listen(progress)

    def wait_ready(self) -> EngineInfo:
        """See `Host.wait_ready`."""
        return self._usable_child().wait_ready()

    def submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        """See `Host.submit`."""
        return self._usable_child().submit(task, sink)

    def close(self) -> None:
        """See `Host.close`."""
        if os.getpid() != self._pid:
            return  # a fork of the host: the child is not its own
        with self._lock:
            self._is_closed = True
            child = self._child
        if child is not None:
            child.close()

    def _usable_child(self) -> _Child:
        with self._lock:
            self.start()
            if self._is_closed or self._child is None:
                raise closed_error(self._config.model)
            return self._child


class _Child:
    """The parent's view of one child process."""

    def __init__(self, config: EngineConfig) -> None:
        self._name = config.model
        self._keeps_sessions = config.kv_disk != "off"
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # a host may speak a protocol on its own
                start_new_session=True,  # Ctrl-C in the terminal is the host's to handle
            )
        self._channel = Channel(Connection(ours.detach()), f"dlite {config.model}")
        self._changed = threading.Condition()
        self._sinks: dict[int, Sink] = {}
        self._next_id = 0
        self._listeners: list[Progress] = []
        self._info: EngineInfo | None = None
        self._is_closing = False
        self._has_ended = False
        self.load_error: BaseException | None = None
        level = logging.getLogger("dlite_agent").getEffectiveLevel()
        self._channel.send(("start", config, level, os.getpid()))
        self._reader = threading.Thread(
            target=self._read, name=f"dlite {config.model} reader", daemon=True
        )
        self._reader.start()

    @property
    def must_be_replaced(self) -> bool:
        return self._has_ended and self.load_error is None

    def listen(self, progress: Progress) -> None:
        with self._changed:
            if self._info is None:
                self._listeners.append(progress)

    def wait_ready(self) -> EngineInfo:
        with self._changed:
            self._changed.wait_for(lambda: self._info or self.load_error or self._has_ended)
            if self.load_error is not None:
                raise fresh(self.load_error)
            if self._info is None:
                raise closed_error(self._name)
            return self._info

    def submit(self, task: Task, sink: Sink) -> Callable[[], None]:
        with self._changed:
            if self.load_error is not None:
                raise fresh(self.load_error)
            if self._has_ended:
                raise self._death()
            task_id = self._next_id
            self._next_id += 1
            self._channel.send(("task", task_id, task))
            self._sinks[task_id] = sink

        def cancel() -> None:
            if self._sinks.pop(task_id, None) is not None:
                self._channel.send(("cancel", task_id))

        return cancel

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
        if self._keeps_sessions:
            self._channel.send(("close",))
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SAVE_S)
        self._process.terminate()  # it has nothing to save any more, and its memory goes with it
        self._reap()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _reap(self) -> None:
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # ---- below: the reader's thread --------------------------------------------------------

    def _read(self) -> None:
        self._channel.receive(self._handle, lambda: self._process.poll() is not None)
        self._channel.close()
        self._reap()
        with self._changed:
            self._has_ended = True
            if self._info is None and self.load_error is None and not self._is_closing:
                self.load_error = ConfigurationError(
                    f"the process that loads {self._name!r} ended with exit code "
                    f"{self._process.returncode}; -9 usually means too little memory: use a "
                    "smaller model or dtype, or lower max_kv_bytes"
                )
            error = self.load_error or self._death()
            sinks, self._sinks = self._sinks, {}
            self._changed.notify_all()
        for sink in sinks.values():
            _deliver(sink, Failure(error))

    def _death(self) -> DLiteError:
        if self._is_closing:
            return closed_error(self._name)
        return CapacityError(
            f"the process of {self._name!r} ended with exit code {self._process.returncode} "
            "during this turn; the next request starts it again, without its sessions; if it dies "
            "again, lower max_kv_bytes"
        )

    def _handle(self, message: object) -> None:
        match message:
            case ("event", int(task_id), event) if isinstance(event, Event):
                is_last = isinstance(event, Failure | Finished)
                sink = self._sinks.pop(task_id, None) if is_last else self._sinks.get(task_id)
                reader = _deliver(sink, event) if sink is not None else "here"
                if reader == "gone" and self._sinks.pop(task_id, None) is not None:
                    self._channel.send(("cancel", task_id))
                elif reader == "away" and not is_last:
                    self._channel.send(("park", task_id))
            case ("log", str(name), int(level), str(text)):
                logging.getLogger(name).log(level, "%s", text)
            case ("progress", str(stage), float(fraction)):
                notify(self._listeners, stage, fraction)
            case ("ready", EngineInfo() as info):
                with self._changed:
                    self._info = info
                    self._listeners.clear()
                    self._changed.notify_all()
            case ("failed", BaseException() as error):
                with self._changed:
                    self.load_error = error
                    self._changed.notify_all()


def _deliver(sink: Sink, event: Event) -> Literal["here", "away", "gone"]:
    """Where the reader is: a sink that raises has none any more."""
    try:
        return "away" if sink(event) else "here"
    except Exception:  # a reader's fault must not end the thread that serves the others
        logger.debug("reader is gone; its task is cancelled", exc_info=True)
        return "gone"
