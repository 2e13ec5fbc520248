"""What a round costs behind 100 to 30,000 tokens: DLite's draft, and the target's rows.

The drafter has random weights, since its work does not depend on them. It reads the taps of a real
forward behind each history; the histories themselves are filled with numbers that cost no prefill.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlite_agent.bench.figure import new_figure, save_figure
from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.bench.step_models import SHAPES, filled_cache, open_subject
from dlite_agent.config import EngineConfig
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise

__all__ = ["HISTORIES", "bench_history", "plot_history", "random_dlite"]

HISTORIES = (100, 300, 1_000, 3_000, 10_000, 30_000)
_WARMUP = 2
_PARTS = ("draft", "verify", "step")
_ABOUT = (
    "draft_ms: one block of DLite; verify_ms: the target's forward of that block and the pending "
    "token; step_ms: its forward of one row; medians, histories interleaved; to_shortest: draft_ms "
    "over that of the shortest history; state_bytes: what the drafter keeps of the history"
)


def random_dlite(target: DenseTransformer, *, num_taps: int = 14) -> DLiteDrafter:
    """A DLite drafter of the default shape with random weights, the same for the same target."""
    config = DLiteConfig.for_target(target.config, "", num_taps=num_taps)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in dlite_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_gain = name.endswith("norm.weight")
        weights[name] = torch.ones(shape) if is_gain else noise * shape[-1] ** -0.5
    kernels = load_row_kernels(EngineConfig().cache_folder())
    return DLiteDrafter(config, weights, target, kernels=kernels)


def bench_history(
    model: str = "random-20M",
    *,
    dtype: str = "auto",
    histories: Sequence[int] = HISTORIES,
    repeats: int = 20,
) -> BenchResult:
    """Time a draft and its verification behind each history.

    Args:
        model: As for `bench step`.
        dtype: As for `EngineConfig.dtype`.
        histories: Cached tokens.
        repeats: Timed calls a figure.
    """
    subject = open_subject(model, dtype, max(histories), with_theirs=False)
    target = subject.target
    drafter = random_dlite(target)
    calls: dict[tuple[int, str], Callable[[], object]] = {}
    for history in histories:
        calls[history, "draft"] = _draft(target, drafter, history)
        kv = filled_cache(target, history)
        calls[history, "verify"] = subject.our_step(kv, drafter.config.block_size + 1)
        calls[history, "step"] = subject.our_step(kv, 1)
    times = _interleaved(calls, repeats)
    first_s = times[min(histories), "draft"]
    rows: list[dict[str, Value]] = [
        {
            "history": history,
            **{f"{part}_ms": round(times[history, part] * 1e3, 3) for part in _PARTS},
            "to_shortest": round(times[history, "draft"] / first_s, 3),
            "state_bytes": _state_bytes(drafter, history),
        }
        for history in histories
    ]
    told = conditions(
        model=model,
        shape="random weights" if model in SHAPES else "trained weights",
        drafter=f"DLite, random weights, {len(drafter.config.taps)} taps, "
        f"{drafter.config.num_layers} layers, rank {drafter.config.rank}",
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        row_kernels=subject.has_kernels,
        concurrency=1,
        warmup=_WARMUP,
        repeats=repeats,
    )
    target.close()
    return BenchResult("history", _ABOUT, told, rows)


def _draft(target: DenseTransformer, drafter: DLiteDrafter, history: int) -> Callable[[], object]:
    """A block behind a history, from the taps of its last row."""
    with filled_cache(target, history - 1) as kv:
        last = torch.ones(1, dtype=torch.int64, device=target.device)
        output = target.forward(last, kv, logits_for=[0], taps=drafter.requires.layer_ids)
    assert output.hidden is not None, "taps were asked for"
    hidden, noise = output.hidden, KeyedNoise(0)
    budget = drafter.config.block_size
    return lambda: drafter.propose(None, 1, hidden, history, noise, budget)


def _state_bytes(drafter: DLiteDrafter, history: int) -> int:
    state = drafter.start([0] * history)
    return 0 if state is None else state.nbytes


def _interleaved(
    calls: Mapping[tuple[int, str], Callable[[], object]], repeats: int
) -> dict[tuple[int, str], float]:
    """Median seconds of each call, all of them once a repeat."""
    clock, _ = bench_clock()
    times: dict[tuple[int, str], list[float]] = {key: [] for key in calls}
    for number in range(_WARMUP + repeats):
        for key, call in calls.items():
            began_s = clock()
            call()
            if number >= _WARMUP:
                times[key].append(clock() - began_s)
    return {key: statistics.median(found) for key, found in times.items()}


def plot_history(rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write `history-cost.png`: milliseconds over tokens of history.

    Args:
        rows: As `bench_history` gives them.
        folder: Exists.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows = list(rows)
    figure, (axes,) = new_figure(1)
    labels = {
        "draft_ms": "DLite's block",
        "step_ms": "the target's step",
        "verify_ms": "the target's verification",
    }
    for column, label in labels.items():
        axes.plot(
            [row["history"] for row in rows], [row[column] for row in rows], marker="o", label=label
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("tokens of history")
    axes.set_ylabel("ms")
    axes.legend()
    return save_figure(figure, folder / "history-cost.png")
