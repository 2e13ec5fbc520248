from __future__ import annotations

from pathlib import Path

from dlite_agent.bench.step import bench_step
from tests.tiny_checkpoint import write_checkpoint


def test_steps_are_measured_against_one_row_and_the_floor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    result = bench_step(str(folder), dtype="float32", repeats=3, is_quick=True)
    assert [(row["cached"], row["rows"]) for row in result.rows] == [(256, 1), (256, 8)]
    for row in result.rows:
        assert isinstance(row["median_ms"], float)
        assert row["median_ms"] > 0
        if row["rows"] == 1:
            assert row["to_one_row"] == 1.0
    told = result.conditions
    on_disk = (folder / "model.safetensors").stat().st_size
    assert on_disk * 0.95 < int(str(told["weight_bytes"])) <= on_disk
    assert told["repeats"] == 3
    assert told["dtype"] == "float32"
