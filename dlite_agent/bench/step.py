"""How far a decode step is from the floor, and what more rows and a longer history cost.

The floor of a step is the time in which the weights can be read once: their bytes over the measured
read bandwidth. A step is one target forward over M rows (the pending token and M - 1 drafted ones)
behind S cached ones, with the logits of all rows. Its rows are never committed, so every repeat
computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dlite_agent.bench.machine import read_bandwidth
from dlite_agent.bench.report import BenchResult, conditions, measure
from dlite_agent.config import DType
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import fingerprint, load_target, resolve_checkpoint

__all__ = ["bench_step"]

_CHUNK = 256
_WARMUP = 2
_CACHED = (256, 1024, 4096)
_ROWS = (1, 2, 8, 33, 256)
_ABOUT = (
    "one target forward: rows = M, cached = S; to_one_row = over the step of one row; "
    "to_floor = over the time to read the weights once"
)


def bench_step(
    model: str = "nano",
    *,
    dtype: DType = "auto",
    repeats: int = 20,
    is_quick: bool = False,
) -> BenchResult:
    """Measure steps and prefill chunks of a model.

    Args:
        model: As for `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        repeats: Timed forwards a figure.
        is_quick: Only one and eight rows behind a short history.
    """
    cached, rows = (_CACHED[:1], (1, 8)) if is_quick else (_CACHED, _ROWS)
    folder = resolve_checkpoint(model)
    found: list[dict[str, str | int | float | None]] = []
    with load_target(model, dtype=dtype) as target, torch.no_grad():
        bandwidth = read_bandwidth(target.device)
        num_weights = sum(math.prod(shape) for shape in weight_shapes(target.config).values())
        weight_bytes = num_weights * target.dtype.itemsize
        for num_cached in cached:
            with target.new_cache() as kv:
                _fill(target, kv, num_cached)
                first_s = None
                for num_rows in rows:
                    samples = measure(_step(target, kv, num_rows), repeats=repeats, warmup=_WARMUP)
                    median_s = samples.median_s
                    first_s = first_s or median_s
                    found.append(
                        {
                            "cached": num_cached,
                            "rows": num_rows,
                            "median_ms": round(median_s * 1e3, 3),
                            "spread": round(samples.spread, 2),
                            "to_one_row": round(median_s / first_s, 2),
                            "to_floor": round(median_s * bandwidth / weight_bytes, 2),
                            "rows_per_s": round(num_rows / median_s),
                        }
                    )
        told = conditions(
            model=model,
            fingerprint=fingerprint(folder),
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            weight_bytes=weight_bytes,
            read_bandwidth_bytes_s=round(bandwidth),
            concurrency=1,
            warmup=_WARMUP,
            repeats=repeats,
        )
    return BenchResult("step", _ABOUT, told, found)


def _fill(target: DenseTransformer, kv: KVCache, num_cached: int) -> None:
    while kv.length < num_cached:
        count = min(_CHUNK, num_cached - kv.length)
        target.forward(_ids(target, count, kv.length), kv, logits_for=[])
        kv.commit(count)


def _step(target: DenseTransformer, kv: KVCache, num_rows: int) -> Callable[[], None]:
    """One forward of M rows that leaves the cache as it was."""
    ids, all_rows = _ids(target, num_rows, kv.length), list(range(num_rows))

    def step() -> None:
        output = target.forward(ids, kv, logits_for=all_rows)
        output.logits[0, 0].item()  # waits for the device
        kv.commit(0)

    return step


def _ids(target: DenseTransformer, count: int, start: int) -> torch.Tensor:
    """Ids without a pattern, the same at every call."""
    positions = torch.arange(start, start + count, device=target.device)
    return positions * 7919 % target.config.vocab_size
