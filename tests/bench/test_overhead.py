"""The overhead bench: given texts are decoded whoever drafts, and medians come with an interval."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench import overhead
from dlite_agent.bench.overhead import bench_overhead
from dlite_agent.config import EngineConfig
from tests.tiny_checkpoint import write_checkpoint


def test_both_texts_are_decoded_with_and_without_drafts() -> None:
    heard: list[tuple[str, float]] = []
    result = bench_overhead(
        EngineConfig(),
        repeats=2,
        is_quick=True,
        report=lambda stage, share: heard.append((stage, share)),
    )
    assert heard == [("1 sessions", 0.0), ("1 sessions", 0.5)] * 2
    assert [row["text"] for row in result.rows] == ["random", "prose"]
    assert result.conditions["drafter"] == "auto(suffix+dlite)"
    for row in result.rows:
        assert row["sessions"] == 1
        assert row["pairs"] == 2
        low, ratio, high = (row[name] for name in ("low", "ratio", "high"))
        assert isinstance(low, float)
        assert isinstance(ratio, float)
        assert isinstance(high, float)
        assert 0.0 < low <= ratio <= high
        assert row["tau"] is not None


def test_interval_holds_the_median_and_narrows_where_runs_agree() -> None:
    low, high = overhead._interval([1.0, 1.1, 1.2, 1.3, 1.4] * 4)
    assert low <= 1.2 <= high
    assert high - low < 0.4
    assert overhead._interval([1.5] * 6) == (1.5, 1.5)


@pytest.mark.parametrize("drafter", ["suffix", "lookup"])
def test_a_named_drafter_can_be_measured(tmp_path: Path, drafter: str) -> None:
    config = EngineConfig(str(write_checkpoint(tmp_path)), drafter=drafter)
    result = bench_overhead(config, repeats=1, is_quick=True)
    assert result.conditions["drafter"] == drafter
