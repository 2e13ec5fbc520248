"""A process that forks a writer of sessions for every folder that it is told.

Run as a program: folders on standard input, a line each. A writer prints its process id, then
`begin N` before it saves state N of its session in the background, and `durable N` once that state
is on the disk. It does not stop by itself. `gone` says that it ended. One interpreter imports torch
for all writers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sessions import segments
from dlite_agent.sessions.disk_tier import DiskTier
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_qwen3

ROWS = 16
NAME = "session"


def state_ids(number: int) -> list[int]:
    """The ids of a state: each grows by a few, and every third one is another text from a point."""
    length, unchanged, text = 30 + 9 * number, 20 + 3 * number, number // 3
    return [(i * 7 + (text if i >= unchanged else 0)) % 512 for i in range(length)]


def write(folder: Path, target: DenseTransformer) -> None:
    """Save one state after the other until killed."""
    tier = DiskTier(folder, target, 2**30)
    session = Session(target, NullDrafter(), session_id=NAME)
    number = 0
    while True:
        session.sync(state_ids(number % 40))
        print(f"begin {number}", flush=True)
        tier.save(session)
        tier.flush()
        print(f"durable {number}", flush=True)
        number += 1


def main() -> None:
    """Fork a writer a line."""
    segments.SEGMENT_ROWS = ROWS
    target = tiny_qwen3(dtype="float64")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print(f"pid {os.getpid()}", flush=True)
            write(Path(line.strip()), target)
        os.waitpid(pid, 0)
        print("gone", flush=True)
    os._exit(0)  # nothing is left to be put away


if __name__ == "__main__":
    main()
