from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.history import bench_history, plot_history
from tests.tiny_checkpoint import write_checkpoint


def test_every_history_has_a_row_and_the_curve_is_an_image(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    result = bench_history(model, histories=(16, 600), repeats=2)
    assert [row["history"] for row in result.rows] == [16, 600]
    for row in result.rows:
        assert row["state_bytes"] == 0
        assert min(float(row[f"{part}_ms"] or 0) for part in ("draft", "verify", "step")) > 0
    assert result.rows[0]["to_shortest"] == 1.0
    pytest.importorskip("matplotlib")
    assert plot_history(result.rows, tmp_path).read_bytes().startswith(b"\x89PNG")
