"""How often drafted tokens are right: decayed counts by how good the evidence for them was."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

__all__ = ["AcceptanceCounts", "evidence_cell"]

_NUM_RANKS = 8
# Upper ends of the buckets of a source's own confidence; bucket 0 holds tokens without one.
_CONFIDENCE_ENDS = (0.25, 0.5, 0.75, 0.9, 0.97)
_NUM_CONFIDENCES = len(_CONFIDENCE_ENDS) + 2
_NUM_CELLS = _NUM_RANKS * _NUM_CONFIDENCES
_UNKNOWN = 0.5

SESSION_MEMORY = 64.0
"""Outcomes of a cell after which one counts 1/e: a session's phases are short."""
ENGINE_MEMORY = 512.0


def evidence_cell(rank: int, confidence: float | None) -> int:
    """The bucket that a drafted token is counted in.

    Args:
        rank: Grows with the evidence: for the token in slot j (from 1) of a copy after a match of m
            tokens m + j - 1, since an accepted slot makes the match longer; without a match j.
            Buckets are powers of two.
        confidence: The source's own, in [0, 1], or None.
    """
    row = min(rank.bit_length(), _NUM_RANKS - 1)
    column = 0 if confidence is None else 1 + bisect_left(_CONFIDENCE_ENDS, confidence)
    return row * _NUM_CONFIDENCES + column


@dataclass(slots=True)
class AcceptanceCounts:
    """Hits and trials of each cell, decayed by an outcome at a time.

    Attributes:
        memory: Outcomes of a cell after which one counts 1/e.
        prior_weight: How many outcomes the prior of an estimate counts for.
        hits: Right tokens.
        trials: All tokens whose place was decided.
    """

    memory: float = SESSION_MEMORY
    prior_weight: float = 4.0
    hits: list[float] = field(default_factory=lambda: [0.0] * _NUM_CELLS)
    trials: list[float] = field(default_factory=lambda: [0.0] * _NUM_CELLS)

    @classmethod
    def of_engine(cls) -> AcceptanceCounts:
        """Counts for all sessions together: slow, and soon sure."""
        return cls(ENGINE_MEMORY, 2.0)

    @property
    def nbytes(self) -> int:
        """Bytes of the counts."""
        return 8 * (len(self.hits) + len(self.trials))

    def observe(self, cell: int, *, is_hit: bool) -> None:
        """Count one outcome."""
        keep = 1.0 - 1.0 / self.memory
        self.hits[cell] = self.hits[cell] * keep + is_hit
        self.trials[cell] = self.trials[cell] * keep + 1.0

    def copy(self) -> AcceptanceCounts:
        """An independent copy."""
        return AcceptanceCounts(
            self.memory, self.prior_weight, self.hits.copy(), self.trials.copy()
        )

    def estimate(self, cell: int, prior: float) -> float:
        """Share of right tokens of a cell."""
        weight = self.prior_weight
        return (self.hits[cell] + weight * prior) / (self.trials[cell] + weight)

    def prior(self, cell: int, confidence: float | None) -> float:
        """Share of right tokens of a cell, for sessions that have not seen it.

        Where nobody has: the source's own confidence, else that of the ranks below, which have less
        evidence, else one half.
        """
        if confidence is not None:
            return self.estimate(cell, confidence)
        known = _UNKNOWN
        for lower in range(cell % _NUM_CONFIDENCES, cell + 1, _NUM_CONFIDENCES):
            known = self.estimate(lower, known)
        return known
