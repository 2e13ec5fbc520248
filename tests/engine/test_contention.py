from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dlite_agent.engine.contention import ContentionMeter


@contextmanager
def spinning() -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def wait(meter: ContentionMeter, seconds: float) -> None:
    meter.start()
    time.sleep(seconds)
    meter.stop()


def compute(meter: ContentionMeter, seconds: float) -> None:
    """Run for `seconds` of this thread's own time."""
    meter.start()
    ends = time.thread_time() + seconds
    while time.thread_time() < ends:
        pass
    meter.stop()


def test_a_verdict_needs_a_full_window() -> None:
    meter = ContentionMeter(window_s=10.0)
    with spinning():
        wait(meter, 0.05)
        assert meter.verdict() is None


def test_waiting_with_a_spinning_thread_is_contention() -> None:
    meter = ContentionMeter(window_s=0.05)
    with spinning():
        wait(meter, 0.2)
        share = meter.verdict()
    assert share is not None
    assert share > 0.5
    assert meter.verdict() is None  # a new window began


def test_waiting_alone_is_no_contention_and_is_looked_at_less_often() -> None:
    meter = ContentionMeter(window_s=0.05)
    wait(meter, 0.06)
    assert meter.verdict() is None
    assert meter._window_s == 0.1
    compute(meter, 0.11)
    assert meter.verdict() is None or meter._window_s > 0.1


def test_what_lies_between_two_pieces_of_work_does_not_count() -> None:
    meter = ContentionMeter(window_s=0.02)
    for _ in range(2):
        compute(meter, 0.02)
        time.sleep(1.0)
    assert meter._wall_s < 1.0
