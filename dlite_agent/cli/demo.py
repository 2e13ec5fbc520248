"""`dlite-agent demo`: an agent repairs a small repository, three times.

With our sessions, with plain longest-prefix caching and with no reuse at all. All three runs use
the same weights, the same drafter and greedy decoding, so what differs is what was prefilled. The
runs are compared token for token. Only the model's time is compared; tools take what they take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dlite_agent.backend import ChatBackend
from dlite_agent.cli.comparison import Comparison, Margin, cold_margin, compare
from dlite_agent.cli.console import styled, write
from dlite_agent.cli.demo_report import POLICIES, demo_report, demo_summary
from dlite_agent.config import DType, EngineConfig, ReusePolicy
from dlite_agent.errors import ConfigurationError
from dlite_agent.outputs import Generation

if TYPE_CHECKING:
    from dlite_agent.nano.agent import AgentRun
    from dlite_agent.nano.world import Task

__all__ = ["add_arguments", "run", "run_demo"]

MODEL = "nano"
DEMO_SEED = 4
MAX_SHOWN = 400
"""Characters of what the model said; one that repeats itself would fill the screen."""

OpenBackend = Callable[[ReusePolicy], AbstractContextManager[ChatBackend]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--seed", type=int, default=DEMO_SEED, help="which held-out task")
    parser.add_argument("--bugs", type=int, default=3, help="in the repository")
    parser.add_argument(
        "--size",
        default="large",
        choices=("tiny", "small", "medium", "large"),
        help="of the repository",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float64"),
        help="of weights and KV",
    )
    parser.add_argument(
        "--drafter", default="auto", help="auto, suffix, lookup or null; the same in all three runs"
    )
    parser.add_argument("--no-think", action="store_true", help="switch thinking off")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the three agents; 0 when the task was solved and the tokens are the same."""
    from dlite_agent.nano.agent import require_langchain

    if arguments.bugs < 1:
        raise ConfigurationError(f"--bugs is {arguments.bugs}; use at least 1")
    require_langchain()
    open_backend = _opener(arguments)
    _warm_up(arguments, open_backend)
    report = run_demo(arguments, open_backend, cold_margin(MODEL, arguments.dtype))
    if arguments.json:
        from dlite_agent.bench.report import conditions

        write(json.dumps(report | {"conditions": conditions()}))
    return 0 if report["solved"] and report["identical"] else 1


def _warm_up(arguments: argparse.Namespace, open_backend: OpenBackend) -> None:
    """Do the task once, unshown.

    A process's first call with each number of rows costs more, which no policy owes.
    """
    task, thinking = _task(arguments), _thinking(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="dlite-demo-") as scratch,
        open_backend("session") as backend,
    ):
        _run_agent(backend, task, Path(scratch) / "first", thinking, _Show(quiet=True))


def _task(arguments: argparse.Namespace) -> Task:
    from dlite_agent.nano.world import make_task

    return make_task(arguments.seed, split="heldout", size=arguments.size, num_bugs=arguments.bugs)


def _thinking(arguments: argparse.Namespace) -> bool | None:
    return False if arguments.no_think else None


def run_demo(
    arguments: argparse.Namespace, open_backend: OpenBackend, margin: Margin
) -> dict[str, object]:
    """Run one task under every policy, compare, and (unless `--json`) show all of it.

    Args:
        arguments: The verb's.
        open_backend: Opens the model under a policy; closed before the next one is opened.
        margin: See `comparison.compare`.

    Returns:
        The report.
    """
    task = _task(arguments)
    show = _Show(quiet=arguments.json)
    bugs = "one bug" if task.num_bugs == 1 else f"{task.num_bugs} bugs"
    show.line(f"A repository of {len(task.files())} files with {bugs}. The user: {task.prompt}")
    show.line(f"{MODEL}, {arguments.dtype}, drafter {arguments.drafter}, greedy; three runs.")
    thinking = _thinking(arguments)
    runs: dict[ReusePolicy, AgentRun] = {}
    with tempfile.TemporaryDirectory(prefix="dlite-demo-") as scratch:
        for policy, title in POLICIES.items():
            show.line(styled(f"\n=== {title}", "bold"))
            with open_backend(policy) as backend:
                runs[policy] = _run_agent(backend, task, Path(scratch) / policy, thinking, show)
            show.only_turns = True  # what the agent does is the same again
    ours = runs["session"]
    comparisons: dict[ReusePolicy, Comparison] = {
        policy: compare(ours, run, arguments.dtype, margin)
        for policy, run in runs.items()
        if policy != "session"
    }
    show.line("\n" + demo_summary(runs, comparisons))
    options = {
        name: getattr(arguments, name) for name in ("seed", "size", "bugs", "dtype", "drafter")
    }
    return demo_report(runs, comparisons) | options


def _opener(arguments: argparse.Namespace) -> OpenBackend:
    from dlite_agent.engine.engine import Engine

    def open_backend(policy: ReusePolicy) -> AbstractContextManager[ChatBackend]:
        config = EngineConfig(
            model=MODEL,
            drafter=arguments.drafter,
            dtype=cast(DType, arguments.dtype),
            reuse=policy,
        )
        engine = Engine(config)
        engine.start()
        return engine

    return open_backend


def _run_agent(
    backend: ChatBackend, task: Task, folder: Path, thinking: bool | None, show: _Show
) -> AgentRun:
    from dlite_agent.nano.agent import run_repair

    show.turn_number = 0
    return run_repair(
        backend, task, folder, on_turn=show.turn, log=show.tool, enable_thinking=thinking
    )


class _Show:
    """Writes what happens.

    Args:
        quiet: Write nothing at all.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.only_turns = False
        self.turn_number = 0

    def line(self, text: str) -> None:
        """Write a line, which is harmless."""
        if not self.quiet:
            write(text)

    def turn(self, generation: Generation) -> None:
        """Write what the model said, and what the turn cost."""
        self.turn_number += 1
        stats, message = generation.stats, generation.message
        said = message.content.strip() or (message.reasoning or "").strip()
        if said and not self.only_turns:
            self.line(styled(f"\n{_shortened(said)}"))
        figures = (
            f"  turn {self.turn_number}: {stats.new_tokens} new, {stats.cached_tokens} cached, "
            f"{stats.prefilled_tokens} prefilled, {stats.completion_tokens} written, "
            f"{stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted, "
            f"{stats.model_s * 1000:.0f} ms"
        )
        self.line(styled(figures, "dim"))

    def tool(self, name: str, arguments: Mapping[str, object], result: str) -> None:
        """Write a call and the part of its result that matters."""
        if self.only_turns:
            return
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        self.line(styled(f"  > {name}({shown})"))
        lines = result.splitlines()
        failures = [line for line in lines if "FAIL" in line]
        filled = [line for line in lines if line.strip()]
        for line in (failures + lines[-1:] if failures else filled[:3])[:4]:
            self.line(styled(f"    {line}", "red" if "FAIL" in line else ""))
        if len(lines) > 4:
            self.line(f"    ({len(lines)} lines)")


def _shortened(text: str) -> str:
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]} … ({len(text)} characters)"
