"""Why each shape of attention takes its path: every path measured, the chosen one marked.

A shape is M query rows against S cached ones. `repeated` is what a model library does: keys and
values repeated for every query head, then torch's attention. Keys and values are slices of a larger
pool, as in a session, and rotate through several layers, so that they do not stay in the core's own
cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.report import BenchResult, conditions
from dlite_agent.kernels.attention import AttentionPath, attend, plan_attention

__all__ = ["Figure", "Heads", "bench_attention", "measure_shape"]

_PATHS: tuple[AttentionPath, ...] = ("matmul", "folded", "grouped", "blocks")
_NUM_LAYERS = 4
_MAX_SECONDS = 0.2  # of timed calls, per path and shape
_MIN_CALLS = 5
_ABOUT = (
    "attention of a layer: rows = M, cached = S; microseconds by path; repeated = keys and values "
    "repeated for every query head; to_fastest = the chosen path over the fastest one"
)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a model: K kv heads, G query heads each, D elements."""

    name: str
    num_kv_heads: int
    num_groups: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One shape, measured.

    Attributes:
        heads: Whose heads.
        dtype: Type of queries, keys and values.
        num_rows: M.
        num_cached: S, the queries' own rows included.
        chosen: The path that `plan_attention` takes.
        chosen_over_best: Time of the chosen path over the fastest one's; 1 is right.
        median_us: Microseconds a layer, by path.
        spread: (Third quartile − first) / median, the largest of all paths.
    """

    heads: str
    dtype: str
    num_rows: int
    num_cached: int
    chosen: str
    chosen_over_best: float
    median_us: dict[str, float]
    spread: float


_MODELS = (Heads("nano", 2, 2, 56), Heads("Qwen3-0.6B", 8, 2, 128), Heads("Qwen3-4B", 8, 4, 128))
_ROWS = (1, 2, 8, 33, 256)
_CACHED = (256, 1024, 4096)


def measure_shape(
    heads: Heads, dtype: torch.dtype, num_rows: int, num_cached: int, *, repeats: int
) -> Figure:
    """Measure every path for one shape.

    Args:
        heads: K, G and D.
        dtype: Type of everything.
        num_rows: M.
        num_cached: S >= M.
        repeats: Timed calls a path at most; fewer when they take longer than 0.2 s.
    """
    generator = torch.Generator().manual_seed(0)
    num_heads = heads.num_kv_heads * heads.num_groups
    q = torch.randn(num_rows, num_heads, heads.head_dim, generator=generator).to(dtype)
    q *= heads.head_dim**-0.5
    pool_shape = (_NUM_LAYERS, 2, heads.num_kv_heads, num_cached + 256, heads.head_dim)
    pool = torch.randn(pool_shape, generator=generator).to(dtype)
    layers = [tuple(layer[:, :, 128 : 128 + num_cached].unbind(0)) for layer in pool]
    query_shape = (num_rows, num_heads, heads.num_kv_heads)
    samples: dict[str, list[float]] = {}
    for path in _PATHS:
        plan = plan_attention(query_shape, [num_cached], q, path)
        samples[path] = _time([partial(attend, q, [kv], plan) for kv in layers], repeats)
    mask = torch.ones(num_rows, num_cached, dtype=torch.bool).tril(num_cached - num_rows)
    samples["repeated"] = _time([partial(_repeated, q, kv, mask) for kv in layers], repeats)
    medians = {name: statistics.median(times) * 1e6 for name, times in samples.items()}
    chosen = plan_attention(query_shape, [num_cached], q).path
    return Figure(
        heads=heads.name,
        dtype=str(dtype).removeprefix("torch."),
        num_rows=num_rows,
        num_cached=num_cached,
        chosen=chosen,
        chosen_over_best=round(medians[chosen] / min(medians[path] for path in _PATHS), 2),
        median_us={name: round(value, 1) for name, value in medians.items()},
        spread=round(max(_spread(times) for times in samples.values()), 2),
    )


def bench_attention(*, repeats: int = 50, is_quick: bool = False) -> BenchResult:
    """Measure all shapes.

    Args:
        repeats: Timed calls a path at most; fewer when they take longer than 0.2 s.
        is_quick: Only nano's heads and a short history.
    """
    rows: list[dict[str, str | int | float | None]] = []
    with torch.no_grad():
        for heads, dtype, num_cached, num_rows in _shapes(is_quick=is_quick):
            figure = measure_shape(heads, dtype, num_rows, num_cached, repeats=repeats)
            times = {f"{name}_us": value for name, value in figure.median_us.items()}
            rows.append(
                {
                    "heads": figure.heads,
                    "dtype": figure.dtype,
                    "cached": figure.num_cached,
                    "rows": figure.num_rows,
                    **times,
                    "chosen": figure.chosen,
                    "to_fastest": figure.chosen_over_best,
                    "spread": figure.spread,
                }
            )
    return BenchResult("attention", _ABOUT, conditions(warmup=1, repeats=repeats), rows)


def _shapes(*, is_quick: bool) -> list[tuple[Heads, torch.dtype, int, int]]:
    return [
        (heads, dtype, num_cached, num_rows)
        for heads in (_MODELS[:1] if is_quick else _MODELS)
        for dtype in (torch.float32, torch.bfloat16)
        for num_cached in (_CACHED[:1] if is_quick else _CACHED)
        for num_rows in _ROWS
    ]


def _time(calls: Sequence[Callable[[], Tensor]], repeats: int) -> list[float]:
    """Seconds of each call; the calls take turns."""
    clock, _ = bench_clock()
    calls[0]()
    times: list[float] = []
    while len(times) < repeats and (len(times) < _MIN_CALLS or sum(times) < _MAX_SECONDS):
        call = calls[len(times) % len(calls)]
        started = clock()
        call()
        times.append(clock() - started)
    return times


def _repeated(q: Tensor, kv: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    keys, values = (half.repeat_interleave(q.shape[1] // half.shape[0], dim=0)[None] for half in kv)
    return functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=1.0
    )


def _spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle if middle else 0.0
