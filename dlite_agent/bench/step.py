"""A step against transformers', and against the time to read the weights once.

A step is one target forward over M rows (the pending token and M - 1 drafted ones) behind a context
of S cached ones, with the logits of all rows. Its rows are never committed, so every repeat
computes the same. transformers runs the same weights with its own growing cache, and keys and
values that are not repeated for every query head (`TRANSFORMERS_SDPA_FORCE_GQA=1`). Both take
turns.

The floor is the bytes of the weights that a step reads over the read bandwidth, measured in memory
pages like those that the weights lie in. Keys and values are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlite_agent.bench.machine import bench_clock, package_version, read_bandwidth
from dlite_agent.bench.report import BenchResult, Samples, conditions
from dlite_agent.bench.step_models import Subject, filled_cache, open_subject
from dlite_agent.config import DType
from dlite_agent.errors import ConfigurationError

__all__ = ["CONTEXTS", "ROWS", "bench_step"]

CONTEXTS = (128, 1024, 8192)
ROWS = (1, 8)
_WARMUP = 2
_ABOUT = (
    "one target forward of M rows behind a context: ours and transformers' median; ratio = theirs "
    "over ours; floor_ratio = ours over the time to read the weights once; to_one_row = ours over "
    "ours of the first number of rows; spread = (third quartile - first) / median of ours"
)


def bench_step(
    model: str = "nano",
    *,
    dtype: DType = "auto",
    contexts: Sequence[int] = CONTEXTS,
    rows: Sequence[int] = ROWS,
    repeats: int = 20,
    with_transformers: bool = True,
) -> BenchResult:
    """Measure steps.

    Args:
        model: Names with commas: of `step_models.SHAPES` (random weights), or as for
            `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        contexts: Cached rows.
        rows: M.
        repeats: Timed forwards a figure.
        with_transformers: Measure transformers' too; needs its weights in memory beside ours.

    Raises:
        ConfigurationError: A context or a number of rows is below 1.
    """
    for kind, numbers in (("contexts", contexts), ("rows", rows)):
        if not numbers or min(numbers) < 1:
            raise ConfigurationError(f"{kind} are {list(numbers)!r}; use whole numbers from 1")
    bandwidth = read_bandwidth(torch.device("cpu"))
    found: list[dict[str, str | int | float | None]] = []
    has_kernels = False
    for name in model.split(","):
        subject = open_subject(name, dtype, max(contexts), with_theirs=with_transformers)
        has_kernels = subject.has_kernels
        with subject.target:
            for context in contexts:
                found += _measure(subject, context, rows, repeats, bandwidth / 1e3)
    told = conditions(
        model=model,
        transformers=package_version("transformers"),
        row_kernels=has_kernels,
        read_bandwidth_bytes_s=round(bandwidth),
        concurrency=1,
        warmup=_WARMUP,
        repeats=repeats,
    )
    return BenchResult("step", _ABOUT, told, found)


def _measure(
    subject: Subject, context: int, rows: Sequence[int], repeats: int, bytes_a_ms: float
) -> list[dict[str, str | int | float | None]]:
    """All numbers of rows at one context; ours and theirs take turns."""
    with filled_cache(subject.target, context) as kv:
        steps = [subject.our_step(kv, count) for count in rows]
        if subject.theirs is not None:
            cache = subject.their_cache(context)
            steps += [subject.their_step(cache, count) for count in rows]
        samples = [Samples() for _ in steps]
        clock, _ = bench_clock()
        for number in range(_WARMUP + repeats):
            for step, sample in zip(steps, samples, strict=True):
                started = clock()
                step()
                if number >= _WARMUP:
                    sample.times_s.append(clock() - started)
    ours = [sample.median_s * 1e3 for sample in samples]
    theirs: list[float | None] = [*ours[len(rows) :], *[None] * len(rows)][: len(rows)]
    return [
        {
            "model": subject.name,
            "dtype": str(subject.target.dtype).removeprefix("torch."),
            "context": context,
            "rows": count,
            "ours_ms": round(ours[i], 3),
            "transformers_ms": None if their is None else round(their, 3),
            "ratio": None if their is None else round(their / ours[i], 2),
            "floor_ratio": round(ours[i] * bytes_a_ms / subject.target.weight_bytes, 2),
            "to_one_row": round(ours[i] / ours[0], 2),
            "spread": round(samples[i].spread, 2),
        }
        for i, (count, their) in enumerate(zip(rows, theirs, strict=True))
    ]
