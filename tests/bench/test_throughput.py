from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.throughput import _all_decode, _gaps, _Reader, bench_throughput
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError
from tests.tiny_checkpoint import write_checkpoint


def test_turns_at_once_are_measured_with_and_without_drafts(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, max_positions=4096)
    heard: list[str] = []
    result = bench_throughput(
        EngineConfig(model=str(folder), dtype="float32"),
        concurrency=(1, 3),
        drafters=("null", "lookup"),
        repeats=1,
        is_quick=True,
        report=lambda stage, share: heard.append(stage),
    )
    assert heard == ["null, 1 turns", "null, 3 turns", "lookup, 1 turns", "lookup, 3 turns"]
    named = [(row["concurrency"], row["drafter"]) for row in result.rows]
    assert named == [(1, "null"), (3, "null"), (1, "lookup"), (3, "lookup")]
    for row in result.rows:
        for figure in ("tokens_per_s", "to_one", "to_null", "tau"):
            assert float(str(row[figure])) > 0.0
        assert float(str(row["wait"])) >= 1.0
        assert float(str(row["wait_prefill"])) > 0.0
    assert [row["tau"] for row in result.rows[:2]] == [1.0, 1.0]
    assert result.rows[0]["to_one"] == result.rows[0]["to_null"] == 1.0
    assert result.conditions["sampling"] == "greedy"


@pytest.mark.parametrize("concurrency", [(), (0,), (4, -1)])
def test_numbers_of_turns_are_positive(concurrency: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        bench_throughput(EngineConfig(), concurrency=concurrency)


def test_a_wait_counts_while_all_turns_decode() -> None:
    def reader(*times: float) -> _Reader:
        return _Reader(lambda: 0.0, rounds=[(time_s, 1) for time_s in times])

    # the first waits for the second to begin, the second for what follows the first one's end
    readers = [reader(0.0, 5.0, 6.0, 7.0, 8.0), reader(5.5, 6.5, 7.5, 12.0)]
    assert _all_decode(readers) == (5.5, 8.0)
    assert _gaps(readers, *_all_decode(readers)) == [1.0] * 4
