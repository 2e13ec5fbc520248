"""Run a target over answers and keep what a drafter will be given of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.drafters.copy_hint import copy_hints
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.target import TargetModel
from dlite_agent.training.records import Records

__all__ = ["Transcript", "capture"]


@dataclass(frozen=True, slots=True)
class Transcript:
    """Token ids, and which of them the assistant wrote.

    Attributes:
        token_ids: All ids, in order.
        answers: Half-open ranges of ids that the assistant sampled, ascending; each begins behind
            at least one id of the prompt.
    """

    token_ids: Sequence[int]
    answers: Sequence[tuple[int, int]]

    @classmethod
    def of_turn(cls, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Transcript:
        """One prompt and what was sampled behind it."""
        start, end = len(prompt_ids), len(prompt_ids) + len(answer_ids)
        return cls([*prompt_ids, *answer_ids], [(start, end)])


def capture(
    target: TargetModel,
    transcript: Transcript,
    taps: Sequence[int],
    *,
    kv: KVCache | None = None,
    first_row: int | None = None,
    chunk: int = 512,
) -> Records | None:
    """Forward a transcript once, and keep the positions of its answers.

    Of an answer [s, e) the positions s - 1 to e - 2 are kept: the one whose logits gave its first
    token, the boundary, is the most important of all.

    Args:
        target: Computes.
        transcript: What to forward; behind the last answer nothing is computed.
        taps: Layers to keep, ascending; the last one must be the target's last.
        kv: Holds a prefix of the ids that ends before the first kept position, and is extended;
            None: a cache of its own, which is given back.
        first_row: From here on every position is kept, for a window; None: those of answers only.
        chunk: Most rows of a forward.

    Returns:
        Taps in bfloat16 (float64 of a float64 target); None where no answer has two tokens.

    Raises:
        ConfigurationError: The last tap is not the last layer.
    """
    if not taps or taps[-1] != target.config.num_layers - 1:
        raise ConfigurationError(
            f"taps end at layer {taps[-1] if taps else None}, but alignment needs the last one, "
            f"{target.config.num_layers - 1}; add it"
        )
    ranges = [(start - 1, end - 1) for start, end in transcript.answers if end - start >= 2]
    if not ranges:
        return None
    kept_ranges = ranges if first_row is None else [(first_row, ranges[-1][1])]
    ids = torch.tensor(transcript.token_ids, dtype=torch.int64)
    if kv is None:
        with target.new_cache() as own:
            kept = _forward(target, ids, own, (kept_ranges, tuple(taps)), chunk)
    else:
        kept = _forward(target, ids, kv, (kept_ranges, tuple(taps)), chunk)
    numbers = torch.cat([torch.arange(low, high) for low, high in kept_ranges])
    left = torch.zeros(len(ids), dtype=torch.int32)
    for low, high in ranges:
        left[low:high] = torch.arange(high - low, 0, -1)
    hints = copy_hints(transcript.token_ids, numbers.tolist())
    return Records(
        taps=torch.cat([states for states, _ in kept]),
        next_ids=ids[numbers + 1].to(torch.int32),
        best_ids=torch.cat([best for _, best in kept]).to(torch.int32),
        left=left[numbers],
        positions=(numbers + 1).to(torch.int32),
        hints=torch.from_numpy(hints),
    )


def _forward(
    target: TargetModel,
    ids: Tensor,
    kv: KVCache,
    wanted: tuple[list[tuple[int, int]], tuple[int, ...]],
    chunk: int,
) -> list[tuple[Tensor, Tensor]]:
    """Taps [R, T, E] and best ids [R] of the rows in some ranges, chunk by chunk."""
    ranges, taps = wanted
    assert kv.length <= ranges[0][0], "the first kept row is still to be computed"
    kept: list[tuple[Tensor, Tensor]] = []
    last = ranges[-1][1]
    for start in range(kv.length, last, chunk):
        end = min(start + chunk, last)
        rows = [
            row - start for low, high in ranges for row in range(max(low, start), min(high, end))
        ]
        output = target.forward(
            ids[start:end].to(target.device), kv, logits_for=rows, taps=taps if rows else ()
        )
        kv.commit(end - start)
        if rows:
            assert output.hidden is not None, "taps were asked for"
            states = output.hidden.states.transpose(0, 1)[rows]  # [R, T, E]
            kept.append((_narrow(states).cpu(), output.logits.argmax(dim=-1).cpu()))
    return kept


def _narrow(states: Tensor) -> Tensor:
    return states if states.dtype == torch.float64 else states.to(torch.bfloat16)
