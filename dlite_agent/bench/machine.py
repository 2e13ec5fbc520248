"""What a figure was measured on: processor, packages, revision, and how fast memory is read."""

from __future__ import annotations

import importlib.metadata
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dlite_agent.kernels.large_pages import prefer_large_pages
from dlite_agent.models.device import processor_name

__all__ = [
    "BUFFER_BYTES",
    "bench_clock",
    "git_revision",
    "package_version",
    "processor_name",
    "read_bandwidth",
]

BUFFER_BYTES = 512 * 2**20
"""Larger than the caches of any processor that we know."""
_PIECE_BYTES = 16 * 2**20
_PASSES = 4


def package_version(package: str) -> str | None:
    """Version of an installed package; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, `-dirty` with changes; None elsewhere."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def bench_clock() -> tuple[Callable[[], float], str]:
    """The clock that benches read, in seconds, and what it is called.

    With one compute thread on a CPU it is that thread's processor time, so that other work on the
    machine counts little; else the clock on the wall.
    """
    if torch.get_num_threads() == 1 and not torch.cuda.is_available():
        return time.thread_time, "processor time of the thread"
    return time.perf_counter, "wall"


def read_bandwidth(device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> float:
    """Bytes that a matrix-vector product reads a second, with torch's current threads.

    The product is what a decode step does with its weights. A buffer that is larger than the caches
    is read in pieces, several times, the first to warm up; the result is that of the fastest tenth
    of the pieces, so that other work on the machine hardly counts.

    Args:
        device: Where the buffer lies.
        buffer_bytes: Its size.
    """
    width = 4096
    pieces = max(1, buffer_bytes // _PIECE_BYTES)
    rows = _PIECE_BYTES // (4 * width)
    buffer = torch.empty(pieces, rows, width, device=device)
    prefer_large_pages(buffer)  # as the weights do
    buffer.fill_(1.0)
    vector = torch.ones(width, device=device)
    clock, _ = bench_clock()
    times: list[float] = []
    for number in range(_PASSES):
        for piece in buffer:
            started = clock()
            torch.mv(piece, vector)[0].item()  # waits for the device
            if number:
                times.append(clock() - started)
    return _PIECE_BYTES / statistics.quantiles(times, n=10)[0]
