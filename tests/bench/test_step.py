from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlite_agent.bench import step_models
from dlite_agent.bench.step import bench_step
from dlite_agent.errors import ConfigurationError
from dlite_agent.testing import tiny_config
from tests.tiny_checkpoint import write_checkpoint

KEYS = ["model", "dtype", "context", "rows", "ours_ms", "transformers_ms", "ratio", "floor_ratio"]


def test_steps_are_measured_against_transformers_and_the_floor(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path))
    before = os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA")
    result = bench_step(folder, dtype="float32", contexts=[30, 300], rows=[1, 8], repeats=3)
    assert os.environ.get("TRANSFORMERS_SDPA_FORCE_GQA") == before
    shapes = [(row["context"], row["rows"]) for row in result.rows]
    assert shapes == [(30, 1), (30, 8), (300, 1), (300, 8)]
    for row in result.rows:
        assert list(row)[:8] == KEYS
        ours, theirs = float(str(row["ours_ms"])), float(str(row["transformers_ms"]))
        assert 0 < ours < theirs, "a tiny model is all overhead, and ours is less"
        assert float(str(row["ratio"])) == pytest.approx(theirs / ours, rel=0.05)
        assert float(str(row["floor_ratio"])) > 1
        if row["rows"] == 1:
            assert row["to_one_row"] == 1.0
    assert result.conditions["repeats"] == 3
    assert result.conditions["model"] == folder


def test_random_shapes_need_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_models, "SHAPES", {"tiny": tiny_config(), "other": tiny_config()})
    result = bench_step("tiny,other", contexts=[20], rows=[2], repeats=2, with_transformers=False)
    assert [row["model"] for row in result.rows] == ["tiny", "other"]
    assert [row["transformers_ms"] for row in result.rows] == [None, None]


def test_both_sides_compute_the_same(tmp_path: Path) -> None:
    subject = step_models.open_subject(
        str(write_checkpoint(tmp_path)), "float32", 64, with_theirs=True
    )
    with subject.target as target, target.new_cache() as kv:
        ids = step_models._ids(target, 12)
        mine = target.forward(ids, kv, logits_for=range(12)).logits
    difference = (subject.theirs(input_ids=ids[None]).logits[0].detach() - mine).abs().max()
    assert float(difference) < 1e-4


@pytest.mark.parametrize("contexts", [[], [0]])
def test_contexts_that_cannot_be_are_refused(contexts: list[int]) -> None:
    with pytest.raises(ConfigurationError, match="contexts"):
        bench_step("nano", contexts=contexts)
