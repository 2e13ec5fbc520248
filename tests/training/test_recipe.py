"""A recipe is read strictly: what it does not know, it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.errors import ConfigurationError
from dlite_agent.training.recipe import find_recipe, read_recipe

RECIPE = """
model: nano
transcripts: [a.jsonl, b]
work: work
out: out
capture: {max_records: 100, temperature: 1, enable_thinking: false}
drafter: {num_layers: 1}
align: {steps: 10, learning_rate: 1.0e-3}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_recipe_with_overrides(path: Path) -> None:
    recipe = read_recipe(
        path, ["align.steps=7", "out=there", "drafter.head=token", "transcripts=c"]
    )
    assert recipe.align.steps == 7
    assert recipe.align.learning_rate == 1e-3
    assert recipe.out == "there"
    assert recipe.transcripts == ("c",)
    assert recipe.drafter == {"num_layers": 1, "head": "token"}
    assert recipe.capture.temperature == 1.0
    assert recipe.capture.enable_thinking is False
    assert read_recipe(path).transcripts == ("a.jsonl", "b")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("colour=red", "unknown key 'colour'"),
        ("align.stepz=1", r"unknown key 'align\.stepz'; did you mean 'steps'"),
        ("drafter.num_layer=1", r"unknown key 'drafter\.num_layer'; did you mean 'num_layers'"),
        ("teacher={step: 1}", r"unknown key 'teacher\.step'; did you mean 'steps'"),
        ("capture.store=tape", r"store is 'tape'; use one of"),
        ("compare={windows: [a]}", r"compare\.windows is \['a'\]; use a list of type int"),
        ("align.steps=many", r"align\.steps is 'many'; use a value of type int"),
        ("align.steps=1.5", r"align\.steps is 1\.5"),
        ("align.autocast=1", r"align\.autocast is 1; use a value of type bool"),
        ("align=3", "align is 3; it is a section"),
        ("align.steps.a=1", "holds a value, not a section"),
        ("transcripts=[1]", "transcripts is"),
        ("capture.heldout=1", "heldout=1"),
        ("capture.max_records=0", "max_records is 0"),
        ("model=", "model is None"),
        ("steps", "no override"),
        ("out={", "no YAML"),
    ],
)
def test_wrong_override_is_named(path: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        read_recipe(path, [override])


@pytest.mark.parametrize("name", ["nano", "smollm2", "qwen3-0.6b", "qwen3-4b", "qwen3-8b"])
def test_recipes_of_the_package_are_read(name: str) -> None:
    recipe = read_recipe(find_recipe(name), ["align.steps=3", "teacher=null"])
    assert recipe.align.steps == 3
    assert recipe.teacher is None


def test_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    with pytest.raises(ConfigurationError, match="there is no recipe"):
        read_recipe(file)
    file.write_text("- 1")
    with pytest.raises(ConfigurationError, match="is no mapping"):
        read_recipe(file)
    file.write_text("model: nano")
    with pytest.raises(ConfigurationError, match="lacks 'transcripts'"):
        read_recipe(file)
    file.write_text("model: {")
    with pytest.raises(ConfigurationError, match="no YAML"):
        read_recipe(file)
