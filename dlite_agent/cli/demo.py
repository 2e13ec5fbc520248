"""`dlite-agent demo`: an agent repairs a small repository, three times.

With our sessions, with plain longest-prefix caching and with no reuse at all. All three runs use
the same weights, the same drafter and greedy decoding, so what differs is what was prefilled. The
runs are compared token for token. Only the model's time is compared; tools take what they take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dlite_agent.cli.console import table, write
from dlite_agent.config import DType, EngineConfig, ReusePolicy
from dlite_agent.outputs import Generation, TurnStats

if TYPE_CHECKING:
    from dlite_agent.nano.agent import AgentRun
    from dlite_agent.nano.world import Task

__all__ = ["Comparison", "add_arguments", "compare", "run"]

NEAR_TIE = 1e-4
"""Margin of two logits below which float32 may choose either (docs/concepts/lossless.md)."""
POLICIES: tuple[tuple[ReusePolicy, str], ...] = (
    ("session", "dlite-agent sessions"),
    ("prefix", "longest prefix"),
    ("none", "no reuse"),
)
DEMO_SEED = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether two runs wrote the same tokens.

    Attributes:
        identical: Equal token for token, or up to a counted near-tie after which they may part.
        near_ties: 1 if the first difference is a near-tie, else 0.
        turn: Turn of the first difference, from 0; None when there is none.
        margin: Difference of the two best logits there; None where it was not computed.
        same_prompts: Number of leading turns whose prompts have equal ids.
    """

    identical: bool
    near_ties: int
    turn: int | None
    margin: float | None
    same_prompts: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--seed", type=int, default=DEMO_SEED, help="which held-out task")
    parser.add_argument(
        "--size",
        default="large",
        choices=("tiny", "small", "medium", "large"),
        help="of the repository",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument(
        "--drafter", default="auto", help="auto, lookup or null; the same in all three runs"
    )
    parser.add_argument("--think", action="store_true", help="let the model think before it acts")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the three agents; 0 when the task was solved and the tokens are the same."""
    from dlite_agent.nano.world import make_task

    task = make_task(arguments.seed, split="heldout", size=arguments.size)
    quiet = arguments.json
    if not quiet:
        write(f"A repository of {len(task.files())} files, one bug. The user says: {task.prompt}")
        write(f"nano, {arguments.dtype}, drafter {arguments.drafter}, greedy. Three runs.")
    runs: dict[ReusePolicy, AgentRun] = {}
    with tempfile.TemporaryDirectory(prefix="dlite-demo-") as scratch:
        for policy, title in POLICIES:
            if not quiet:
                write(f"\n=== {title}")
            runs[policy] = _run_policy(
                policy, arguments, task, Path(scratch) / policy, quiet=quiet or policy != "session"
            )
    report = _report(runs, arguments)
    if quiet:
        write(json.dumps(report))
    else:
        _print_summary(runs, report)
    return 0 if report["solved"] and report["identical"] else 1


def _run_policy(
    policy: ReusePolicy, arguments: argparse.Namespace, task: Task, folder: Path, *, quiet: bool
) -> AgentRun:
    from dlite_agent.engine import Engine
    from dlite_agent.nano.agent import run_repair

    def on_turn(generation: Generation) -> None:
        number[0] += 1
        if not quiet:
            _print_turn(number[0], generation)

    def log(name: str, call: Mapping[str, object], result: str) -> None:
        if not quiet:
            _print_tool(name, call, result)

    number = [0]
    config = EngineConfig(
        model="nano", drafter=arguments.drafter, dtype=cast(DType, arguments.dtype), reuse=policy
    )
    with Engine(config) as engine:
        engine.load()
        return run_repair(
            engine,
            task,
            folder,
            on_turn=on_turn,
            log=log,
            enable_thinking=None if arguments.think else False,
        )


def compare(reference: AgentRun, other: AgentRun, dtype: str) -> Comparison:
    """Find the first token in which two runs differ, and whether it is a near-tie.

    In float64 every difference counts. In float32 a first difference on equal prompts whose two
    best logits are closer than `NEAR_TIE` is a counted near-tie. bfloat16 only reports.
    """
    same_prompts = 0
    for index, (ours, theirs) in enumerate(zip(reference.turns, other.turns, strict=False)):
        if ours.prompt_token_ids == theirs.prompt_token_ids and same_prompts == index:
            same_prompts += 1
        if ours.token_ids == theirs.token_ids:
            continue
        margin = _margin(ours, theirs, dtype) if same_prompts == index + 1 else None
        near = dtype == "float32" and margin is not None and margin < NEAR_TIE
        return Comparison(near, int(near), index, margin, same_prompts)
    if len(reference.turns) != len(other.turns):
        return Comparison(False, 0, min(len(reference.turns), len(other.turns)), None, same_prompts)
    return Comparison(True, 0, None, None, same_prompts)


def _margin(ours: Generation, theirs: Generation, dtype: str) -> float:
    """Difference of the two tokens' logits at the first difference, from one cold forward."""
    import torch

    from dlite_agent.models.weights import load_target

    at = next(
        (
            i
            for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
            if a != b
        ),
        min(len(ours.token_ids), len(theirs.token_ids)),
    )
    ids = torch.tensor([*ours.prompt_token_ids, *ours.token_ids[:at]])
    with load_target("nano", dtype=cast(DType, dtype)) as target:
        logits = target.forward(ids, target.new_cache(), logits_for=[len(ids) - 1]).logits[0]
    best = logits.topk(2).values
    return float(best[0] - best[1])


def _report(
    runs: Mapping[ReusePolicy, AgentRun], arguments: argparse.Namespace
) -> dict[str, object]:
    ours = runs["session"]
    comparisons = {
        policy: compare(ours, runs[policy], arguments.dtype) for policy, _ in POLICIES[1:]
    }
    return {
        "solved": all(run.solved for run in runs.values()),
        "amplification": _amplification(ours),
        "identical": all(comparison.identical for comparison in comparisons.values()),
        "near_ties": sum(comparison.near_ties for comparison in comparisons.values()),
        "speedup": runs["none"].model_s / ours.model_s,
        "speedup_prefix": runs["prefix"].model_s / ours.model_s,
        "last_prompt_tokens": ours.turns[-1].stats.prompt_tokens,
        "dtype": arguments.dtype,
        "drafter": ours.turns[-1].stats.drafter,
        "seed": arguments.seed,
        "turns": [_turn_row(turn.stats) for turn in ours.turns],
        "runs": {
            policy: {
                "solved": run.solved,
                "num_turns": len(run.turns),
                "amplification": _amplification(run),
                "model_s": run.model_s,
                "prefill_s": sum(turn.stats.prefill_s for turn in run.turns),
                "decode_s": sum(turn.stats.decode_s for turn in run.turns),
                "prefilled": sum(turn.stats.prefilled_tokens for turn in run.turns),
                "sampled": sum(turn.stats.completion_tokens for turn in run.turns),
                "error": run.error,
            }
            for policy, run in runs.items()
        },
        "comparisons": {
            policy: {
                "identical": c.identical,
                "first_difference_turn": c.turn,
                "margin": c.margin,
                "turns_with_same_prompt": c.same_prompts,
            }
            for policy, c in comparisons.items()
        },
    }


def _amplification(run: AgentRun) -> float:
    """Rows prefilled over rows that had to be (new ones and the pending one), from turn 2 on."""
    later = [turn.stats for turn in run.turns[1:]]
    needed = sum(stats.new_tokens + 1 for stats in later)
    return sum(stats.prefilled_tokens for stats in later) / needed if needed else 1.0


def _turn_row(stats: TurnStats) -> dict[str, object]:
    return {
        "prompt": stats.prompt_tokens,
        "new": stats.new_tokens,
        "cached": stats.cached_tokens,
        "prefilled": stats.prefilled_tokens,
        "sampled": stats.completion_tokens,
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "rounds": stats.rounds,
        "ttft_s": stats.ttft_s,
        "model_s": stats.model_s,
    }


def _print_turn(number: int, generation: Generation) -> None:
    stats = generation.stats
    said = generation.message.content.strip() or (generation.message.reasoning or "").strip()
    if said:
        write(f"\n{said}")
    write(
        f"  turn {number}: {stats.new_tokens} new, {stats.cached_tokens} cached, "
        f"{stats.prefilled_tokens} prefilled, {stats.completion_tokens} written, "
        f"{stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted, "
        f"{stats.model_s * 1000:.0f} ms"
    )


def _print_tool(name: str, arguments: Mapping[str, object], result: str) -> None:
    shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    write(f"  > {name}({shown})")
    lines = result.splitlines()
    failures = [line for line in lines if "FAIL" in line]
    for line in (failures + lines[-1:] if failures else lines[:3])[:4]:
        write(f"    {line}")
    if len(lines) > 4:
        write(f"    ({len(lines)} lines)")


def _print_summary(runs: Mapping[ReusePolicy, AgentRun], report: Mapping[str, object]) -> None:
    ours = runs["session"].model_s
    rows = []
    for policy, title in POLICIES:
        run = runs[policy]
        prefill_s = sum(turn.stats.prefill_s for turn in run.turns)
        rows.append(
            [
                title,
                "yes" if run.solved else "no",
                str(len(run.turns)),
                str(sum(turn.stats.prefilled_tokens for turn in run.turns)),
                f"{_amplification(run):.2f}",
                f"{prefill_s:.2f} s",
                f"{run.model_s:.2f} s",
                f"{run.model_s / ours:.2f} x",
            ]
        )
    write("")
    write(table(["", "solved", "turns", "prefilled", "A", "prefill", "model", "to ours"], rows))
    write("")
    write("A = rows prefilled / rows that are new, from the second turn on.")
    write(f"History at the last turn: {report['last_prompt_tokens']} tokens.")
    comparisons = cast(Mapping[str, Mapping[str, object]], report["comparisons"])
    for policy, title in POLICIES[1:]:
        write(f"Tokens of '{title}' and ours: {_verdict(comparisons[policy])}")


def _verdict(comparison: Mapping[str, object]) -> str:
    if comparison["first_difference_turn"] is None:
        return "the same, every one."
    turn = cast(int, comparison["first_difference_turn"]) + 1
    if comparison["identical"]:
        return f"the same up to a near-tie in turn {turn} (margin {comparison['margin']:.1e})."
    return f"DIFFERENT from turn {turn} on (margin {comparison['margin']})."
