"""Whether two runs of an agent wrote the same tokens, and how close a difference was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from dlite_agent.config import DType
from dlite_agent.outputs import Generation

if TYPE_CHECKING:
    from dlite_agent.nano.agent import AgentRun

__all__ = ["NEAR_TIE", "Comparison", "Margin", "cold_margin", "compare"]

NEAR_TIE = 1e-4
"""Margin of two logits below which float32 may choose either (docs/concepts/lossless.md)."""

Margin = Callable[[Sequence[int], int, int], float]
"""Ids so far and two next tokens → how far the worse of the two is from the best logit."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, token by token.

    Attributes:
        identical: Every sampled token is equal, or every one up to a near-tie, after which the runs
            may part.
        num_equal: Sampled tokens that were compared and are equal.
        near_ties: 1 if the first difference is a near-tie, else 0.
        turn: Turn of the first difference, from 0; None when there is none.
        margin: How far apart the two tokens' logits are there; None where the prompts differ, or
            one answer just goes on.
        same_prompts: Number of leading turns whose prompts have equal ids.
    """

    identical: bool
    num_equal: int
    near_ties: int
    turn: int | None
    margin: float | None
    same_prompts: int


def compare(reference: AgentRun, other: AgentRun, dtype: str, margin: Margin) -> Comparison:
    """Find the first token in which two runs differ, and whether it is a near-tie.

    Only in float32, and only after equal ids, a difference may be a near-tie. In float64 every
    difference counts, and bfloat16 promises nothing.

    Args:
        reference: Our run.
        other: The run that must be equal.
        dtype: What both computed in.
        margin: Asked at the first difference, if it can be.
    """
    num_equal = same_prompts = 0
    for turn, (ours, theirs) in enumerate(zip(reference.turns, other.turns, strict=False)):
        same_prompts += same_prompts == turn and ours.prompt_token_ids == theirs.prompt_token_ids
        at = _first_difference(ours.token_ids, theirs.token_ids)
        if at is None:
            num_equal += len(ours.token_ids)
            continue
        apart = _margin_at(ours, theirs, at, margin) if same_prompts == turn + 1 else None
        near = dtype == "float32" and apart is not None and apart < NEAR_TIE
        return Comparison(near, num_equal + at, int(near), turn, apart, same_prompts)
    num_turns = len(reference.turns), len(other.turns)
    turn_of_end = None if num_turns[0] == num_turns[1] else min(num_turns)
    return Comparison(turn_of_end is None, num_equal, 0, turn_of_end, None, same_prompts)


def cold_margin(model: str, dtype: str) -> Margin:
    """A `Margin` from one forward without any cache; it loads the model when it is asked.

    Args:
        model: As for `EngineConfig.model`.
        dtype: What the runs computed in.
    """

    def margin(ids: Sequence[int], first: int, second: int) -> float:
        import torch

        from dlite_agent.models.weights import load_target

        with load_target(model, dtype=cast(DType, dtype)) as target, target.new_cache() as kv:
            tokens = torch.tensor(list(ids), dtype=torch.int64, device=target.device)
            logits = target.forward(tokens, kv, logits_for=[len(ids) - 1]).logits[0]
        return float(logits.max() - torch.minimum(logits[first], logits[second]))

    return margin


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=False))
    shorter = None if len(ours) == len(theirs) else min(len(ours), len(theirs))
    return next((i for i, (a, b) in pairs if a != b), shorter)


def _margin_at(ours: Generation, theirs: Generation, at: int, margin: Margin) -> float | None:
    if at == min(len(ours.token_ids), len(theirs.token_ids)):
        return None  # one answer goes on where the other ended: no two tokens to compare
    ids = [*ours.prompt_token_ids, *ours.token_ids[:at]]
    return margin(ids, ours.token_ids[at], theirs.token_ids[at])
