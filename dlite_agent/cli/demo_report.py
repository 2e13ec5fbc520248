"""What the demo says in the end: one object for programs, one table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlite_agent.cli.comparison import Comparison
from dlite_agent.cli.console import styled, table
from dlite_agent.config import ReusePolicy
from dlite_agent.outputs import TurnStats, prefill_amplification

if TYPE_CHECKING:
    from dlite_agent.nano.agent import AgentRun

__all__ = ["POLICIES", "amplification", "demo_report", "demo_summary"]

POLICIES: Mapping[ReusePolicy, str] = {
    "session": "dlite-agent sessions",
    "prefix": "longest prefix",
    "none": "no reuse",
}
"""How the three runs reuse earlier turns, ours first, and what each is called."""

Runs = Mapping[ReusePolicy, "AgentRun"]
Comparisons = Mapping[ReusePolicy, Comparison]


def amplification(run: AgentRun) -> float:
    """The run's prefill amplification A; see `outputs.prefill_amplification`."""
    return prefill_amplification([turn.stats for turn in run.turns])


def demo_report(runs: Runs, comparisons: Comparisons) -> dict[str, object]:
    """Everything that was measured, ready for JSON.

    Args:
        runs: The three runs.
        comparisons: Of each other run with ours.
    """
    ours = runs["session"]
    return {
        "solved": all(run.solved for run in runs.values()),
        "amplification": amplification(ours),
        "identical": all(comparison.identical for comparison in comparisons.values()),
        "near_ties": sum(comparison.near_ties for comparison in comparisons.values()),
        "speedup": _speedup(runs["none"], ours, comparisons.get("none")),
        "speedup_prefix": _speedup(runs["prefix"], ours, comparisons.get("prefix")),
        "last_prompt_tokens": ours.turns[-1].stats.prompt_tokens if ours.turns else 0,
        "turns": [_turn_row(turn.stats) for turn in ours.turns],
        "runs": {policy: _run_row(run) for policy, run in runs.items()},
        "comparisons": {
            policy: {
                "identical": c.identical,
                "num_equal": c.num_equal,
                "first_difference_turn": c.turn,
                "margin": c.margin,
                "turns_with_same_prompt": c.same_prompts,
            }
            for policy, c in comparisons.items()
        },
    }


def demo_summary(runs: Runs, comparisons: Comparisons) -> str:
    """The last table, and what it means."""
    ours = runs["session"]
    rows = []
    for policy, title in POLICIES.items():
        run, ratio = runs[policy], _speedup(runs[policy], ours, comparisons.get(policy))
        prefill_s = sum(turn.stats.prefill_s for turn in run.turns)
        rows.append(
            [
                title,
                "yes" if run.solved else "no",
                str(len(run.turns)),
                str(_prefilled(run)),
                f"{amplification(run):.2f}",
                f"{prefill_s:.2f} s",
                f"{run.model_s:.2f} s",
                "-" if ratio is None else f"{ratio:.2f} x",
            ]
        )
    history = ours.turns[-1].stats.prompt_tokens if ours.turns else 0
    lines = [
        table(["", "solved", "turns", "prefilled", "A", "prefill", "model", "to ours"], rows),
        "",
        "A = rows prefilled / (new tokens + the pending one), from the second turn on.",
        "model = prefill and decoding; to ours = its ratio, in the turns with the same tokens.",
        f"The last turn's prompt has {history} tokens.",
    ]
    lines += [
        f"Tokens of '{POLICIES[policy]}' and ours: {_verdict(comparison)}"
        for policy, comparison in comparisons.items()
    ]
    failed = {policy: run.error for policy, run in runs.items() if run.error}
    lines += [styled(f"{POLICIES[policy]}: {error}") for policy, error in failed.items()]
    return "\n".join(lines)


def _verdict(comparison: Comparison) -> str:
    if comparison.turn is None:
        return f"all {comparison.num_equal} are the same."
    turn = comparison.turn + 1
    if comparison.identical:
        return (
            f"{comparison.num_equal} are the same, up to a near-tie in turn {turn} "
            f"(logits {comparison.margin:.1e} apart)."
        )
    if comparison.margin is not None:
        why = f"logits {comparison.margin:.1e} apart"
    elif comparison.same_prompts <= comparison.turn:
        why = "its prompt there is another one: it renders again what was sampled"
    else:
        why = "one of them just ends"
    return f"DIFFERENT in turn {turn} after {comparison.num_equal} equal ones ({why})."


def _speedup(run: AgentRun, ours: AgentRun, comparison: Comparison | None) -> float | None:
    """Model time of a run over ours, in the leading turns that wrote the same tokens.

    After a difference the two do other work, so that their times say nothing about each other. None
    when nothing was measured.
    """
    same = None if comparison is None else comparison.turn
    theirs_s, ours_s = (sum(t.stats.model_s for t in each.turns[:same]) for each in (run, ours))
    return theirs_s / ours_s if ours_s else None


def _prefilled(run: AgentRun) -> int:
    return sum(turn.stats.prefilled_tokens for turn in run.turns)


def _run_row(run: AgentRun) -> dict[str, object]:
    return {
        "solved": run.solved,
        "num_turns": len(run.turns),
        "amplification": amplification(run),
        "model_s": run.model_s,
        "prefill_s": sum(turn.stats.prefill_s for turn in run.turns),
        "decode_s": sum(turn.stats.decode_s for turn in run.turns),
        "prefilled": _prefilled(run),
        "sampled": sum(turn.stats.completion_tokens for turn in run.turns),
        "error": run.error,
    }


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
