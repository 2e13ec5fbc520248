"""A thousand conversations with nano in memory for twenty: nothing grows, nothing is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
# What is no KV: journal, what is remembered of requests, segments of the renderer, n-grams of the
# drafters, and what allocators keep: 6 MiB in ten minutes (docs/benchmarks/soak.md), and some room.
BESIDE_BYTES = 16 * 2**20


@pytest.mark.parametrize(
    ("seconds", "min_turns"),
    [
        pytest.param(12.0, 10, id="sample", marks=pytest.mark.timeout(600)),
        pytest.param(600.0, 1000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_a_thousand_sessions_in_memory_for_twenty(seconds: float, min_turns: int) -> None:
    program = REPOSITORY / "tests" / "soak" / "many_sessions.py"
    done = subprocess.run(  # its resident memory is that of this traffic and nothing else
        [sys.executable, str(program), "1000", str(seconds), str(min_turns)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["most_kv_bytes"] <= told["budget_bytes"]
    assert told["grown_bytes"] <= 1.1 * told["budget_bytes"] + BESIDE_BYTES
    assert told["checked"] >= min_turns // 10
    assert told["left_bytes"] == 0
