"""What a decode forward costs: seconds by rows, cached tokens and turns, measured on this machine.

A draft pays when the tokens that it is expected to add are worth the rows that it adds, and what a
row costs differs by an order of magnitude between devices, types and sizes: a step that reads
weights is nearly flat, one that multiplies is linear, and small models jump at the second row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from dlite_agent.models.kv_pool import PAGE_ROWS, KVCache
from dlite_agent.models.target import ForwardRows, TargetConfig, TargetModel

__all__ = [
    "FROZEN_BYTES_PER_S",
    "MAX_ROWS",
    "CostTable",
    "cost_clock",
    "frozen_cost_table",
    "measure_cost_table",
]

MAX_ROWS = 33
"""Rows of the largest round: the pending token and 32 drafted ones."""

# The most informative first, so that a large model's budget ends with a usable table.
_ROWS = (1, 8, 33, 2, 4, 16, 3, 6, 12, 24)
_SHORT_CONTEXT = 64
_LONG_CONTEXT = 1024
_LONG_ROWS = 8
_MAX_SCRATCH_BYTES = 32 * 2**20
_MAX_PASSES = 7

FROZEN_BYTES_PER_S = 10e9
"""Of the frozen table's machine; the shape of its costs lies between a flat and a linear one."""
_SECOND_ROW_SHARE = 0.10
_ROW_SHARE = 0.04


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a decode forward over rows of one or several turns.

    The model is separable: what the linears and the head take for all rows, plus attention, plus
    what every turn adds by being there. Seconds grow with every argument.

    Attributes:
        rows: Measured row counts, ascending from 1.
        seconds: Of a forward of one turn with so many rows behind a short context.
        context_turn_s: Seconds that a turn adds for each cached token.
        context_row_s: Seconds that a row adds for each cached token of its turn.
        turn_s: Seconds that a further turn adds at the same number of rows.
        origin: `measured`, `cached` (measured by an earlier process) or `frozen`.

    Raises:
        ValueError: The figures are no such table.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context_turn_s: float = 0.0
    context_row_s: float = 0.0
    turn_s: float = 0.0
    origin: str = "measured"
    _dense: tuple[float, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        extras = (self.context_turn_s, self.context_row_s, self.turn_s)
        is_sound = (
            len(self.rows) == len(self.seconds) >= 1
            and self.rows[0] == 1
            and all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
            and self.seconds[0] > 0.0
            and all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
            and self.seconds[-1] < float("inf")
            and all(0.0 <= extra < float("inf") for extra in extras)
        )
        if not is_sound:
            raise ValueError(f"{self!r} is no cost table; rows from 1, seconds that never fall")
        dense = np.interp(np.arange(self.rows[-1] + 1), self.rows, self.seconds)
        object.__setattr__(self, "_dense", tuple(dense.tolist()))  # frozen, and being made

    @property
    def step_s(self) -> float:
        """Seconds of a plain step of one turn."""
        return self.seconds[0]

    def round_s(self, rows: int, *, context: int = 0, turns: int = 1) -> float:
        """Seconds of a forward.

        Args:
            rows: Of all turns together, at least `turns`.
            context: Cached tokens of a turn, on average.
            turns: How many share the forward.
        """
        attention = context * (turns * self.context_turn_s + rows * self.context_row_s)
        return self._of_rows(rows) + (turns - 1) * self.turn_s + attention

    def curve(self, rows: int, count: int, *, context: int = 0, turns: int = 1) -> list[float]:
        """`round_s` of `rows`, `rows + 1`, ... `rows + count`."""
        dense = self._dense
        fixed = (turns - 1) * self.turn_s + context * turns * self.context_turn_s
        slope = context * self.context_row_s
        if rows + count < len(dense):
            return [dense[n] + fixed + n * slope for n in range(rows, rows + count + 1)]
        return [self._of_rows(n) + fixed + n * slope for n in range(rows, rows + count + 1)]

    def _of_rows(self, rows: int) -> float:
        """Linear between points; beyond the last one, on with the mean slope of all."""
        dense = self._dense  # entry 0 is no row
        last = len(dense) - 1
        if rows <= last:
            return dense[rows]
        slope = (dense[last] - dense[1]) / (last - 1) if last > 1 else 0.0
        return dense[last] + (rows - last) * slope


def frozen_cost_table(config: TargetConfig, itemsize: int) -> CostTable:
    """A table from the shape alone, the same on every machine; for `reproducible=True`.

    Args:
        config: Shape of the target.
        itemsize: Bytes of a weight.
    """
    per_layer = config.hidden_size * (
        3 * config.intermediate_size
        + (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    )
    num_weights = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    step_s = num_weights * itemsize / FROZEN_BYTES_PER_S
    context_s = config.kv_bytes_per_token(itemsize) / FROZEN_BYTES_PER_S
    points = tuple(range(1, MAX_ROWS + 1))
    return CostTable(
        rows=points,
        seconds=tuple(
            step_s * (1.0 + _SECOND_ROW_SHARE * (n > 1) + _ROW_SHARE * (n - 1)) for n in points
        ),
        context_turn_s=context_s,
        context_row_s=context_s * _ROW_SHARE,
        origin="frozen",
    )


def measure_cost_table(
    target: TargetModel,
    *,
    budget_s: float = 1.0,
    clock: Callable[[], float] | None = None,
) -> CostTable:
    """Time forwards of a target on scratch caches; between turns, in the thread that owns it.

    Passes over all points are interleaved and each point keeps its minimum, since whatever else
    runs on the machine only adds. The minima are then made monotone. Sessions, the KV pool and
    `rows_computed` are afterwards as they were.

    Args:
        target: The model.
        budget_s: Stop after about so many seconds; one forward of 1 and one of 8 rows are always
            timed.
        clock: Seconds; None is the time of the wall, or of this thread's own work where it is the
            only one that computes, which others on the same core do not change.

    Raises:
        CapacityError: The pool has not a single free page.
    """
    rows_before = target.rows_computed
    num_long = _long_context(target)
    with ExitStack() as scratch:
        try:
            best = _best_times(
                _probes(target, num_long, scratch), budget_s, clock or cost_clock(target)
            )
        finally:
            target.rows_computed = rows_before
    points = sorted(rows for kind, rows in best if kind == "rows")
    fitted = dict(zip(points, _monotone([best["rows", n] for n in points]), strict=True))

    def context_s(rows: int) -> float:
        known = best.get(("long", rows))
        return (
            max(0.0, (known - fitted[rows]) / (num_long - _SHORT_CONTEXT))
            if known is not None
            else 0.0
        )

    few, many = context_s(1), context_s(_LONG_ROWS)
    row_s = max(0.0, (many - few) / (_LONG_ROWS - 1))
    pair_s = best.get(("turns", 2))
    return CostTable(
        rows=tuple(points),
        seconds=tuple(fitted.values()),
        context_turn_s=max(0.0, few - row_s),
        context_row_s=row_s,
        turn_s=max(0.0, pair_s - fitted[2]) if pair_s is not None and 2 in fitted else 0.0,
    )


_Key = tuple[str, int]
_Probe = Callable[[], None]


def _probes(target: TargetModel, num_long: int, scratch: ExitStack) -> dict[_Key, _Probe]:
    """What to time, most informative first; what the pool has no room for is left out."""
    short = _filled(target, _SHORT_CONTEXT, scratch)
    probes: dict[_Key, _Probe] = {("rows", rows): _forward(target, [short], rows) for rows in _ROWS}
    if num_long > _SHORT_CONTEXT:
        long = _filled(target, num_long, scratch)
        for rows in (1, _LONG_ROWS):
            probes["long", rows] = _forward(target, [long], rows)
    if _num_free_rows(short) >= PAGE_ROWS:
        other = _filled(target, _SHORT_CONTEXT, scratch)
        probes["turns", 2] = _forward(target, [short, other], 1)
    return probes


def _best_times(
    probes: dict[_Key, _Probe], budget_s: float, clock: Callable[[], float]
) -> dict[_Key, float]:
    """The shortest time of each probe, in as many passes as the budget allows.

    The first pass only warms up, unless nothing else fits.
    """
    warm: dict[_Key, float] = {}
    best: dict[_Key, float] = {}
    began = time.perf_counter()
    for number in range(_MAX_PASSES + 1):
        for key, probe in probes.items():
            has_enough = ("rows", _LONG_ROWS) in warm
            expected_s = warm.get(key, 0.0)
            if has_enough and time.perf_counter() - began + expected_s > budget_s:
                return warm | best
            started = clock()
            probe()
            took = clock() - started
            kept = best if number else warm
            kept[key] = min(took, kept.get(key, took))
    return best


def cost_clock(target: TargetModel) -> Callable[[], float]:
    """The clock that a table is measured with, for whoever compares with it.

    The time of the wall, or of this thread's own work where it is the only one that computes.
    """
    is_alone = target.device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def _monotone(values: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in squares (pool adjacent violators).

    Source: Barlow, Bartholomew, Bremner and Brunk 1972, Statistical Inference under Order
        Restrictions, chapter 1.
    """
    pools: list[tuple[float, int]] = []  # mean, members
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, num = pools.pop()
            mean, count = (mean * count + other * num) / (count + num), count + num
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _long_context(target: TargetModel) -> int:
    """Cached tokens of the longer context: what memory, model and pool allow, at most 1,024."""
    config, itemsize = target.config, target.dtype.itemsize
    with target.new_cache() as cache:
        num_free = _num_free_rows(cache)
    limits = (
        _LONG_CONTEXT,
        _MAX_SCRATCH_BYTES // config.kv_bytes_per_token(itemsize),
        config.max_position_embeddings - MAX_ROWS,
        num_free - 3 * PAGE_ROWS,  # beside two short caches, and the rows behind this one
    )
    return max(0, min(limits))


def _num_free_rows(cache: KVCache) -> int:
    pool = cache.pool
    return pool.free_bytes // pool.page_bytes * PAGE_ROWS


def _filled(target: TargetModel, num_cached: int, scratch: ExitStack) -> KVCache:
    """A cache of zeros, which cost no forward; attention takes its time over any numbers."""
    cache = scratch.enter_context(target.new_cache())
    cache.reserve(num_cached)
    config = target.config
    zeros = torch.zeros(
        config.num_kv_heads, num_cached, config.head_dim, dtype=target.dtype, device=target.device
    )
    for layer in range(config.num_layers):
        cache.write(layer, zeros, zeros)
    cache.commit(num_cached)
    return cache


def _forward(target: TargetModel, caches: Sequence[KVCache], rows: int) -> _Probe:
    """A forward of some rows behind each cache, and a greedy choice for each of them."""
    ids = torch.arange(rows, device=target.device) * 7919 % target.config.vocab_size
    batch = [ForwardRows(ids, cache, range(rows)) for cache in caches]

    def probe() -> None:
        for output in target.forward_batch(batch):
            output.logits.argmax(-1).tolist()  # waits for the device
        for cache in caches:
            cache.commit(0)

    return probe
