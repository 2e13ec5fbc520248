"""The cost table: monotone, robust to a busy machine, and measured without a trace."""

from __future__ import annotations

import itertools
import random

import pytest

from dlite_agent.errors import CapacityError
from dlite_agent.models.cost_table import (
    MAX_ROWS,
    CostTable,
    frozen_cost_table,
    measure_cost_table,
)
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.testing import tiny_config, tiny_qwen3

LINEAR = CostTable(rows=(1, 2, 8, 33), seconds=(1.0, 1.5, 4.5, 17.0))


class ScriptedClock:
    """Time that stands still except while a forward runs, which is told what it costs."""

    def __init__(self, target: DenseTransformer, noise: float = 0.0) -> None:
        self.now = 0.0
        self._rng = random.Random(0)
        self._noise = noise
        self._forward_batch = target.forward_batch
        target.forward_batch = self._timed  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    def _timed(self, batch):  # type: ignore[no-untyped-def]
        rows = sum(part.token_ids.shape[0] for part in batch)
        cost = 0.010 + 0.002 * rows + 0.003 * (len(batch) - 1)
        cost += sum(part.kv.length * (1e-6 + 1e-7 * part.token_ids.shape[0]) for part in batch)
        self.now += cost * (1.0 + self._noise * self._rng.expovariate(1.0))
        return self._forward_batch(batch)


def test_between_points_it_is_linear_and_beyond_them_it_goes_on() -> None:
    assert [LINEAR.round_s(rows) for rows in (1, 2, 5, 8, 33)] == [1.0, 1.5, 3.0, 4.5, 17.0]
    assert LINEAR.round_s(65) == pytest.approx(33.0)
    assert LINEAR.step_s == 1.0
    assert CostTable((1,), (2.0,)).round_s(7) == 2.0


def test_turns_and_context_add_what_they_were_measured_to_add() -> None:
    table = CostTable((1, 2), (1.0, 1.0), context_turn_s=0.01, context_row_s=0.001, turn_s=0.25)
    assert table.round_s(2, turns=2) == 1.25
    assert table.round_s(3, context=100, turns=2) == pytest.approx(1.25 + 2.0 + 0.3)
    curve = table.curve(3, 4, context=100, turns=2)
    assert curve == pytest.approx([table.round_s(3 + n, context=100, turns=2) for n in range(5)])


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        ((), ()),
        ((2, 3), (1.0, 1.0)),
        ((1, 2), (1.0, 0.5)),
        ((1, 1), (1.0, 1.0)),
        ((1, 2), (0.0, 1.0)),
        ((1, 2), (1.0, float("inf"))),
        ((1, 2), (1.0, float("nan"))),
        ((1, 2), (1.0,)),
    ],
)
def test_figures_that_are_no_costs_are_refused(
    rows: tuple[int, ...], seconds: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="no cost table"):
        CostTable(rows, seconds)


def test_measured_table_is_what_the_forwards_took() -> None:
    target = tiny_qwen3()
    table = measure_cost_table(target, budget_s=1e9, clock=ScriptedClock(target))
    for rows in (1, 2, 5, 8, 20, 33):
        base = 0.010 + 0.002 * rows + 64 * (1e-6 + 1e-7 * rows)
        assert table.round_s(rows) == pytest.approx(base)
    assert table.context_turn_s == pytest.approx(1e-6)
    assert table.context_row_s == pytest.approx(1e-7)
    assert table.turn_s == pytest.approx(0.003 + 64 * 1e-6)
    assert table.origin == "measured"


def test_a_busy_machine_changes_little_and_never_the_order() -> None:
    target = tiny_qwen3()
    table = measure_cost_table(target, budget_s=1e9, clock=ScriptedClock(target, noise=0.5))
    assert all(a <= b for a, b in itertools.pairwise(table.seconds))
    for rows in (1, 8, 33):
        true_s = 0.010 + 0.002 * rows + 64 * (1e-6 + 1e-7 * rows)
        assert true_s <= table.round_s(rows) < 1.4 * true_s


def test_no_budget_ends_early_with_a_usable_table() -> None:
    target = tiny_qwen3()
    table = measure_cost_table(target, budget_s=0.0, clock=ScriptedClock(target))
    assert table.rows == (1, 8)
    assert table.round_s(33) > table.round_s(8)


def test_a_small_model_is_measured_up_to_the_most_rows() -> None:
    target = tiny_qwen3()
    table = measure_cost_table(target, budget_s=0.5)
    assert table.rows[-1] == MAX_ROWS
    assert table.step_s > 0


def test_measuring_leaves_no_trace() -> None:
    target = tiny_qwen3()
    with target.new_cache() as kv:
        kv.reserve(3)
        kv.commit(3)
        used, rows_before = target.pool.used_bytes, target.rows_computed
        measure_cost_table(target, budget_s=0.0)
        assert target.rows_computed == rows_before
        assert target.pool.used_bytes == used
        assert kv.length == 3


@pytest.mark.parametrize("num_pages", [1, 2, 4, 5])
def test_small_pool_is_measured_with_what_it_has(num_pages: int) -> None:
    page_bytes = PAGE_ROWS * tiny_config().kv_bytes_per_token(4)
    target = tiny_qwen3(max_kv_bytes=num_pages * page_bytes)
    table = measure_cost_table(target, budget_s=1e9, clock=ScriptedClock(target))
    assert table.rows[-1] == MAX_ROWS
    assert (table.turn_s > 0) == (num_pages > 1)
    assert (table.context_turn_s > 0) == (num_pages > 3)
    assert target.pool.used_bytes == 0


def test_full_pool_says_so_and_leaves_no_trace() -> None:
    page_bytes = PAGE_ROWS * tiny_config().kv_bytes_per_token(4)
    target = tiny_qwen3(max_kv_bytes=page_bytes)
    with target.new_cache() as kv:
        kv.reserve(1)
        with pytest.raises(CapacityError):
            measure_cost_table(target)
        assert target.pool.used_bytes == page_bytes


def test_frozen_table_depends_on_the_shape_alone() -> None:
    table = frozen_cost_table(tiny_config(), 4)
    assert table == frozen_cost_table(tiny_config(), 4)
    assert table.origin == "frozen"
    assert table.round_s(8) < 1.5 * table.step_s
    assert frozen_cost_table(tiny_config(num_layers=8), 4).step_s > table.step_s
