"""The restore bench: what is timed comes back whole."""

from __future__ import annotations

import pytest

from dlite_agent.bench.restore import bench_restore
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError


def test_restored_sessions_answer_as_the_prefilled_one() -> None:
    result = bench_restore(EngineConfig(), 300, 1)
    assert [row["source"] for row in result.rows] == ["prefill", "memory", "disk"]
    assert {row["same_answer"] for row in result.rows} == {"true"}
    assert len({row["tau"] for row in result.rows}) == 1
    speedups = [row["speedup"] for row in result.rows]
    assert speedups[0] == 1.0
    assert all(isinstance(speedup, float) and speedup > 0.0 for speedup in speedups)


def test_a_session_needs_tokens() -> None:
    with pytest.raises(ConfigurationError, match="--tokens is 1; use at least 2"):
        bench_restore(EngineConfig(), 1)
