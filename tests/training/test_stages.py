"""Stages: a teacher, the drafter that starts from it, and what is written beside the weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from dlite_agent.errors import ConfigurationError, DrafterMismatchError
from dlite_agent.models.dlite_config import dlite_shapes
from dlite_agent.models.dlite_files import read_dlite, write_dlite
from dlite_agent.models.drafter_source import read_block_drafter
from dlite_agent.training.comparison import compare, contestants, equal_dspark
from dlite_agent.training.curve import Curve
from dlite_agent.training.devices import AcceleratedDevices
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.recipe import CaptureOptions, CompareOptions, Recipe
from dlite_agent.training.stages import train_stage
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.warm_start import taken_over, warm_start
from dlite_agent.training.windows import StoredWindows
from tests.dlite_models import random_weights
from tests.training.languages import (
    FAST,
    TARGET,
    make_config,
    make_ends,
    memorable,
    source,
    windows,
)

QUICK = replace(FAST, steps=3, batch_size=16, device="cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(
        model="tiny",
        transcripts=("nowhere",),
        work=str(tmp_path / "work"),
        out=str(tmp_path / "out"),
        capture=CaptureOptions(enable_thinking=False),
        teacher=QUICK,
        align=replace(QUICK, save_every_s=0.0, log_every_s=0.0),
        compare=CompareOptions(seeds=2, windows=(0, 4), num_taps=1, max_heldout=2),
    )


def test_drafter_starts_from_its_teacher_and_is_ready_for_a_hub(
    recipe: Recipe, tmp_path: Path
) -> None:
    ends, config = make_ends(), make_config()
    records, made = memorable(ends), windows(ends)
    model = (config, ends)
    with pytest.raises(ConfigurationError, match="run dlite-agent train teacher first"):
        train_stage(recipe, "align", model, (source(records), records))
    assert train_stage(recipe, "teacher", model, (StoredWindows(made, QUICK, 7), made))
    assert train_stage(recipe, "align", model, (source(records, QUICK), records))
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "config.json",
        "curve.png",
        "model.safetensors",
        "provenance.json",
    ]
    told = json.loads((out / "provenance.json").read_text())
    card = (out / "README.md").read_text()
    assert told["recipe"]["teacher"]["steps"] == 3
    assert f"τ {told['heldout']['tau']:.3f}" in card
    assert "base_model: tiny" in card
    assert read_dlite(out)[0] == config
    rows = Curve(tmp_path / "work" / "align" / "curve.jsonl", 3).rows
    taus = [row["heldout_tau"] for row in rows if "heldout_tau" in row]
    assert told["heldout"]["tau"] == max(taus)
    assert len(taus) == 4  # after each step, and at the end
    assert sum("loss" in row for row in rows) == 3


def test_rows_of_a_curve_behind_the_state_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    curve = Curve(path, 2)
    curve.add({"step": 3, "loss": 1.0})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "loss": 1.0}\n'


def test_comparison_gives_all_the_same_and_goes_on(recipe: Recipe, tmp_path: Path) -> None:
    ends, config = make_ends(), make_config(intermediate_size=128)
    made = windows(ends)
    entries = contestants(recipe, TARGET, config, ends)
    results = compare(recipe, entries, made, made)
    assert [result.name for result in results] == ["dlite", "dspark", "dspark-window-4"]
    sizes = [result.num_parameters for result in results]
    assert max(sizes) < 1.02 * min(sizes)
    assert [result.state_bytes for result in results] == [0, 128, 128]
    assert all(len(result.runs) == 2 for result in results)
    spark, weights = read_block_drafter(
        str(tmp_path / "work" / "compare" / "dspark-2" / "drafter"), TARGET
    )
    assert spark.taps == (1,)
    assert sum(weight.numel() for weight in weights.values()) == sizes[1]
    measured = tmp_path / "work" / "compare" / "dspark-2" / "measured.json"
    measured.write_text(json.dumps(asdict(results[0].runs[0]) | {"tau": 5.0}))
    again = compare(recipe, entries, made, made)
    assert again[1].runs[1].tau == 5.0  # was not measured again
    assert again[1].tau[0] == pytest.approx((again[1].runs[0].tau + 5.0) / 2)
    with pytest.raises(ConfigurationError, match="a DSpark drafter without its SwiGLU"):
        equal_dspark(make_config(head="none", rank=64, intermediate_size=8), TARGET, 2)


def test_dspark_of_the_right_shape_is_taken_over() -> None:
    config = make_config()
    layers = {
        name: torch.full(shape, 2.0)
        for name, shape in dlite_shapes(config).items()
        if name.startswith("layers.")
    }
    fuse = torch.cat([torch.full((64, 64), 1.0), torch.full((64, 64), 3.0)], dim=1)
    spark = layers | {"fc.weight": fuse, "markov_head.markov_w1.weight": torch.ones(64, 8)}
    found = taken_over(spark, config, "spark")
    assert set(found) == {*layers, "context_proj.weight"}
    assert torch.equal(found["context_proj.weight"], torch.full((64, 64), 2.0))
    learner = DLiteLearner(config, make_ends(), found)
    assert bool((learner.weights["layers.0.mlp.up_proj.weight"] == 2.0).all())
    with pytest.raises(
        DrafterMismatchError, match="no matrix of the layers of 'spark' has the shape"
    ):
        taken_over(spark, make_config(intermediate_size=32, head_dim=8), "spark")


def test_drafter_may_start_from_another(tmp_path: Path) -> None:
    config = make_config()
    weights = random_weights(config)
    write_dlite(tmp_path, config, weights, {})
    found = warm_start(str(tmp_path), config)
    assert set(found) == set(dlite_shapes(config))
    torch.testing.assert_close(
        found["context_proj.weight"], weights["context_proj.weight"].float(), atol=0.01, rtol=0.01
    )


def test_accelerate_computes_the_same_losses(tmp_path: Path) -> None:
    ends = make_ends()
    records = source(memorable(ends), QUICK)
    runs = []
    for name, devices in (("one", None), ("accelerated", AcceleratedDevices())):
        trainer = Trainer(tmp_path / name, DLiteLearner(make_config(), ends), QUICK, devices)
        trainer.run(records)
        runs.append(trainer.place.loss)
    assert runs[0] == runs[1]
