"""The demo's proof: a comparison that finds every difference, and excuses only near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dlite_agent.cli.comparison import NEAR_TIE, Margin, cold_margin, compare
from dlite_agent.models.weights import load_target
from tests.cli.scripted import agent_run
from tests.tiny_checkpoint import write_checkpoint

OURS = agent_run(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7, 8]))


def never(ids: Sequence[int], first: int, second: int) -> float:
    raise AssertionError("there is nothing to measure")


def apart(value: float) -> Margin:
    return lambda ids, first, second: value


def test_equal_runs_are_identical_and_every_token_is_counted() -> None:
    found = compare(OURS, OURS, "float32", never)
    assert found.identical
    assert (found.num_equal, found.near_ties, found.turn, found.same_prompts) == (5, 0, None, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_other_token_is_a_difference_in_every_dtype(dtype: str) -> None:
    other = agent_run(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 9, 8]))
    found = compare(OURS, other, dtype, apart(0.5))
    assert not found.identical
    assert (found.num_equal, found.turn, found.margin) == (3, 1, 0.5)


def test_the_margin_is_asked_where_the_runs_part() -> None:
    asked: list[object] = []

    def margin(ids: Sequence[int], first: int, second: int) -> float:
        asked.append((list(ids), first, second))
        return 1.0

    other = agent_run(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 9, 8]))
    compare(OURS, other, "float32", margin)
    assert asked == [([1, 2, 3, 4, 5, 6], 7, 9)]


@pytest.mark.parametrize(
    ("dtype", "margin", "identical"),
    [
        ("float32", NEAR_TIE / 2, True),
        ("float32", NEAR_TIE, False),
        ("float64", 0.0, False),
        ("bfloat16", 0.0, False),
    ],
)
def test_only_a_near_tie_in_float32_is_excused_and_it_is_counted(
    dtype: str, margin: float, identical: bool
) -> None:
    other = agent_run(([1, 2], [3, 9]), ([1, 2, 3, 9, 5], [6]))
    found = compare(OURS, other, dtype, apart(margin))
    assert found.identical is identical
    assert found.near_ties == int(identical)
    assert found.margin == margin


def test_other_prompts_with_the_same_answers_are_identical_but_told() -> None:
    other = agent_run(([1, 2], [3, 4]), ([1, 2, 4, 3, 5], [6, 7, 8]))
    found = compare(OURS, other, "float32", never)
    assert found.identical
    assert found.same_prompts == 1


def test_a_difference_behind_another_prompt_is_never_a_near_tie() -> None:
    other = agent_run(([1, 2], [3, 4]), ([1, 2, 4, 3, 5], [6, 7, 9]))
    found = compare(OURS, other, "float32", never)
    assert not found.identical
    assert (found.turn, found.margin, found.same_prompts) == (1, None, 1)


def test_an_answer_that_goes_on_is_a_difference_without_a_margin() -> None:
    other = agent_run(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]))
    found = compare(OURS, other, "float32", never)
    assert not found.identical
    assert (found.turn, found.num_equal) == (1, 4)


@pytest.mark.parametrize("turns", [1, 3])
def test_another_number_of_turns_is_a_difference(turns: int) -> None:
    more = ([1, 2, 3, 4, 5, 6, 7, 8], [9])
    other = agent_run(*[([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7, 8]), more][:turns])
    found = compare(OURS, other, "float64", never)
    assert not found.identical
    assert found.turn == min(turns, 2)


def test_a_cold_margin_is_the_distance_to_the_best_logit(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path))
    ids = [5, 6, 7, 8]
    with load_target(folder, dtype="float64") as target, target.new_cache() as kv:
        logits = target.forward(torch.tensor(ids), kv, logits_for=[3]).logits[0]
    best, second, third = (int(i) for i in logits.topk(3).indices)
    margin = cold_margin(folder, "float64")
    assert margin(ids, best, second) == pytest.approx(float(logits[best] - logits[second]))
    # Two tokens that are as good as each other, but not as the best one, are no near-tie.
    assert margin(ids, second, third) == pytest.approx(float(logits[best] - logits[third]))
