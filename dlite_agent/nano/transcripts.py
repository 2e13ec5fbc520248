"""Transcripts of nano's world, in the form that `dlite-agent train` reads.

`python -m dlite_agent.nano.transcripts OUT.jsonl --count 400` writes what the oracle did in so many
tasks, half of them in mini-swe-agent's dialect; with `train capture` nano answers their turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.mini import mini_conversation
from dlite_agent.nano.names import Split
from dlite_agent.nano.oracle import repair_conversation
from dlite_agent.nano.world import Size

__all__ = ["draw_task", "main", "write_transcripts"]

_SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large")


def write_transcripts(path: Path, count: int, *, seed: int = 1, split: Split = "train") -> None:
    """Write conversations as JSON lines of OpenAI messages and tools.

    Args:
        path: Of the file; folders are made.
        count: Of conversations.
        seed: The same one gives the same file.
        split: Whose names they use.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            drawn = draw_task(number, seed, split)
            file.write(json.dumps({"messages": drawn.messages, "tools": drawn.tools}) + "\n")


def draw_task(number: int, seed: int, split: Split) -> Conversation:
    """One task, with thoughts; odd ones in mini-swe-agent's dialect."""
    key = f"transcripts/{seed}/{split}/{number}".encode()
    rng = random.Random(hashlib.sha256(key).digest())
    size = rng.choice(_SIZES)
    if number % 2:
        return mini_conversation(rng, split=split, size=size, thinking=True, keep=1.0)
    return repair_conversation(rng, split=split, size=size, thinking=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a file."""
    parser = argparse.ArgumentParser(
        prog="python -m dlite_agent.nano.transcripts", description=__doc__
    )
    parser.add_argument("out", type=Path, help="a .jsonl file")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    write_transcripts(options.out, options.count, seed=options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
