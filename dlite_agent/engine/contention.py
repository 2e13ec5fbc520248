"""Notice when the host's own Python threads slow the model down.

Every operator of a forward releases the interpreter lock and takes it again. A host's thread that
computes in Python holds the lock for a switch interval (5 ms) whenever it gets it, so a decode step
becomes several times slower, on any number of cores.
"""

from __future__ import annotations

import resource
import select
import sys
import time

__all__ = ["ContentionMeter"]

_MIN_WAIT_SHARE = 1 / 3  # a step that waits for a third of its time is 1.5 times slower
_TRIAL_CPU_INTERVALS = 2
_TRIAL_WALL_INTERVALS = 200
_TRIAL_WAITS = 2


class ContentionMeter:
    """Compares wall time with this thread's own processor time, and tries the lock when they part.

    A share of waiting alone does not say what was waited for: another process on the same core
    looks the same. So the lock is tried: this thread gives it up and takes it back for some switch
    intervals. Waits that the system did not force on it are waits for the lock. A round costs two
    clock reads. The trial takes 10 ms of this thread's time, is made only under suspicion and once
    a window; when it finds nothing, the window doubles.

    Used by one thread.

    Args:
        window_s: Seconds of work that a verdict is about.
    """

    def __init__(self, window_s: float = 0.25) -> None:
        self._window_s = window_s
        self._wall_s = 0.0
        self._cpu_s = 0.0
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """A piece of work begins."""
        self._started = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        """It ends. Only what lies between counts, so a reader's pause does not."""
        wall, cpu = self._started
        self._wall_s += time.perf_counter() - wall
        self._cpu_s += time.thread_time() - cpu

    def verdict(self) -> float | None:
        """Share of the last window's work that was waiting, if it waited for the interpreter lock.

        None while the window is not full, when the work hardly waited, or when nobody else wants
        the lock now. A new window begins with each verdict.
        """
        if self._wall_s < self._window_s:
            return None
        share = 1.0 - self._cpu_s / self._wall_s
        self._wall_s = self._cpu_s = 0.0
        if share < _MIN_WAIT_SHARE:
            return None
        if _others_hold_the_lock():
            return share
        self._window_s *= 2
        return None


def _others_hold_the_lock() -> bool:
    interval_s = sys.getswitchinterval()
    cpu_end = time.thread_time() + _TRIAL_CPU_INTERVALS * interval_s
    wall_end = time.perf_counter() + _TRIAL_WALL_INTERVALS * interval_s
    num_waits = 0
    while time.thread_time() < cpu_end and (began := time.perf_counter()) < wall_end:
        switches = _voluntary_switches()
        select.select((), (), (), 0)  # releases the lock, takes it back, and keeps the processor
        is_long = time.perf_counter() - began >= interval_s / 2
        num_waits += is_long and _voluntary_switches() != switches
        if num_waits >= _TRIAL_WAITS:
            return True
    return False


def _voluntary_switches() -> int:
    """How often this thread gave the processor up by itself; to be preempted does not count."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # the thread's own is Linux's
    return resource.getrusage(who).ru_nvcsw
