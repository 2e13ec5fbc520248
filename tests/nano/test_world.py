from __future__ import annotations

import ast
from pathlib import Path

import pytest

from dlite_agent.nano.bugs import TEMPLATES
from dlite_agent.nano.names import split_of_word, words_of
from dlite_agent.nano.tools import RepairTools, SimulatedTools
from dlite_agent.nano.world import SIZES, Size, Task, make_task


def words_of_task(task: Task) -> set[str]:
    """Every word that names something in the repository."""
    words = {task.project}
    for path, functions in task.modules:
        words.add(Path(path).stem)
        for function in functions:
            words.update((function.name, *function.parameters))
    return words


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_name_of_a_task_is_of_its_split(split: str) -> None:
    for seed in range(60):
        task = make_task(seed, split=split, size="small")
        assert {split_of_word(word) for word in words_of_task(task)} == {split}


def test_the_splits_share_no_name_and_no_combination() -> None:
    tasks = {
        split: [make_task(seed, split=split, size="medium") for seed in range(80)]
        for split in ("train", "heldout")
    }
    names = {split: set().union(*map(words_of_task, found)) for split, found in tasks.items()}
    assert not names["train"] & names["heldout"]
    keys = {split: {task.key for task in found} for split, found in tasks.items()}
    assert not keys["train"] & keys["heldout"]
    for pool in ("word", "variable"):
        assert len(words_of(pool, "heldout")) > 10
        assert not set(words_of(pool, "train")) & set(words_of(pool, "heldout"))


def test_held_out_tasks_use_every_template() -> None:
    seen = {
        function.template.name
        for seed in range(40)
        for _, functions in make_task(seed, size="medium").modules
        for function in functions
    }
    assert seen == {template.name for template in TEMPLATES}


def test_a_seed_gives_the_same_task_again() -> None:
    assert make_task(7, size="medium") == make_task(7, size="medium")
    assert make_task(7).files() != make_task(8).files()


@pytest.mark.parametrize("size", SIZES)
def test_the_tests_fail_before_the_fix_and_pass_after(size: Size, tmp_path: Path) -> None:
    for seed in range(4):
        task = make_task(seed, size=size)
        root = task.materialise(tmp_path / str(seed))
        assert not task.solved(root)
        tools = RepairTools(root)
        broken = task.broken
        old, new = broken.line(broken.written), broken.line(broken.right)
        assert tools.edit_file(task.broken_path, old, new) == f"Edited {task.broken_path}"
        assert task.solved(root)


def test_simulated_tasks_fail_before_the_fix_and_pass_after() -> None:
    for seed in range(300):
        tools = SimulatedTools(task := make_task(seed, split="train", size="tiny"))
        assert f"FAIL {task.broken_path} {task.broken.name}: " in tools.run_tests()
        broken = task.broken
        old, new = broken.line(broken.written), broken.line(broken.right)
        tools.edit_file(task.broken_path, old, new)
        assert "FAIL" not in tools.run_tests()


def test_bodies_are_distinct_within_a_file() -> None:
    for seed in range(20):
        for _, functions in make_task(seed, size="large").modules:
            bodies = [function.right for function in functions]
            assert len(set(bodies)) == len(bodies)
            for function in functions:
                ast.parse(function.source())


def test_pristine_tests_decide_whatever_the_folder_says(tmp_path: Path) -> None:
    task = make_task(3)
    root = task.materialise(tmp_path)
    (root / "run_tests.py").write_text("print('all fine')\n")
    assert not task.solved(root)
