"""How many held-out tasks nano solves, with the real engine, real agents and real tools.

`python -m dlite_agent.nano.evaluate --tasks N --seed S [--dialect repair|mini] --json` prints one
JSON object: `solved` is the share of tasks whose pristine tests pass afterwards. How far it is goes
to standard error, where that is a terminal or `--progress` asks for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from dlite_agent.backend import ChatBackend
from dlite_agent.engine.engine import Engine
from dlite_agent.nano.agent import AgentRun, run_repair
from dlite_agent.nano.mini_agent import run_mini
from dlite_agent.nano.world import Size, Task, make_task

__all__ = ["evaluate", "main"]

MIXED: tuple[Size, ...] = ("tiny", "small", "medium", "small", "large")
SEED_STRIDE = 1_000_003


def evaluate(
    backend: ChatBackend,
    tasks: Sequence[Task],
    *,
    dialect: str = "repair",
    enable_thinking: bool | None = None,
    on_task: Callable[[AgentRun], None] | None = None,
) -> dict[str, object]:
    """Run every task once, greedily, each in a folder of its own.

    Args:
        backend: The model.
        tasks: What to solve, at least one.
        dialect: `repair` (LangChain's `create_agent`) or `mini` (mini-swe-agent's loop).
        enable_thinking: Passed to the chat template; None leaves its default.
        on_task: Called after each task.

    Returns:
        The share solved, with counts, failures by kind of bug, and times.
    """
    run = run_mini if dialect == "mini" else run_repair
    runs: list[AgentRun] = []
    failures: list[dict[str, object]] = []
    for task in tasks:
        with tempfile.TemporaryDirectory() as folder:
            done = run(backend, task, Path(folder), enable_thinking=enable_thinking)
        runs.append(done)
        if not done.solved:
            failures.append(_failure(task, done))
        if on_task is not None:
            on_task(done)
    num_solved = sum(done.solved for done in runs)
    turn_s = [turn.stats.model_s for done in runs for turn in done.turns]
    return {
        "solved": num_solved / len(runs),
        "num_tasks": len(runs),
        "num_solved": num_solved,
        "num_stopped_early": sum(done.error is not None for done in runs),
        "by_size": _shares(tasks, runs),
        "failed_bugs": dict(Counter(str(failure["bug"]) for failure in failures)),
        "failures": failures,
        "num_turns": len(turn_s),
        "wall_s": round(sum(done.wall_s for done in runs), 2),
        "turn_s_median": round(statistics.median(turn_s), 4) if turn_s else None,
    }


def _shares(tasks: Sequence[Task], runs: Sequence[AgentRun]) -> dict[str, str]:
    total, solved = Counter[str](), Counter[str]()
    for task, done in zip(tasks, runs, strict=True):
        total[task.size] += 1
        solved[task.size] += done.solved
    return {size: f"{solved[size]}/{total[size]}" for size in total}


def _failure(task: Task, done: AgentRun) -> dict[str, object]:
    return {
        "seed": task.seed,
        "size": task.size,
        "template": task.broken.template.name,
        "bug": f"{task.broken.template.name}/{task.bug}",
        "num_turns": len(done.turns),
        "error": done.error,
    }


class _Progress:
    """One line for all tasks on a terminal, one line a task elsewhere."""

    def __init__(self, num_tasks: int) -> None:
        self._num_tasks = num_tasks
        self._start_s = time.perf_counter()
        self._num_done = self._num_solved = self._num_turns = 0

    def __call__(self, done: AgentRun) -> None:
        self._num_done += 1
        self._num_solved += done.solved
        self._num_turns += len(done.turns)
        line = (
            f"{self._num_done} of {self._num_tasks} tasks, {self._num_solved} solved, "
            f"{self._num_turns} turns, {time.perf_counter() - self._start_s:.0f} s"
        )
        is_last = self._num_done == self._num_tasks
        in_place = sys.stderr.isatty()
        sys.stderr.write("\r" * in_place + line + "\n" * (is_last or not in_place))
        sys.stderr.flush()


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dlite_agent.nano.evaluate", description=__doc__
    )
    parser.add_argument("--tasks", type=_count, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dialect", choices=("repair", "mini"), default="repair")
    parser.add_argument("--thinking", choices=("on", "off", "default"), default="default")
    parser.add_argument("--size", choices=(*get_args(Size), "mixed"), default="mixed")
    parser.add_argument("--model", default="nano", help="nano or a folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--progress",
        action="store_true",
        help="a line a task on standard error; a terminal shows it anyway",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate and print."""
    options = _parse(arguments)
    sizes: tuple[Size, ...] = MIXED if options.size == "mixed" else (options.size,)
    first = options.seed * SEED_STRIDE
    tasks = [
        make_task(first + i, split="heldout", size=sizes[i % len(sizes)])
        for i in range(options.tasks)
    ]
    thinking = {"on": True, "off": False, "default": None}[options.thinking]
    start = time.perf_counter()
    is_shown = options.progress or sys.stderr.isatty()
    with Engine(options.model) as engine:
        engine.load()
        report = evaluate(
            engine,
            tasks,
            dialect=options.dialect,
            enable_thinking=thinking,
            on_task=_Progress(len(tasks)) if is_shown else None,
        )
    chosen = {key: vars(options)[key] for key in ("dialect", "thinking", "size", "seed", "model")}
    report = {**chosen, **report, "total_s": round(time.perf_counter() - start, 2)}
    if options.json:
        print(json.dumps(report))
    else:
        print(f"{options.dialect}: {report['num_solved']} of {report['num_tasks']} solved")
        for size, share in dict(report["by_size"]).items():  # type: ignore[call-overload]
            print(f"  {size}: {share}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
