"""A target that only has a text and a price, and a source that is right by a given chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlite_agent.drafters.drafter import DraftBlock, Drafter, DraftState
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.cost_table import CostTable
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

NOISE = KeyedNoise(0)
Chance = Callable[[int], float]
"""Position of a token → probability that the source proposes it."""

# Shapes that were measured: memory-bound bf16, compute-bound float32, and kernels with tiles.
FLAT = CostTable((1, 2, 33), (1.0e-3, 1.02e-3, 1.2e-3))
LINEAR = CostTable((1, 33), (1.0e-3, 4.84e-3))
STEEP = CostTable((1, 33), (1.0e-3, 20e-3))
STEPS = CostTable((1, 2, 8, 9, 16, 17, 33), (1e-3, 1.3e-3, 1.35e-3, 1.9e-3, 1.95e-3, 3e-3, 3.1e-3))
TABLES = {"flat": FLAT, "linear": LINEAR, "steep": STEEP, "steps": STEPS}


def random_text(length: int, seed: int = 0) -> list[int]:
    """Even numbers without a pattern; odd ones are always wrong."""
    rng = random.Random(seed)
    return [2 * rng.randrange(10_000) for _ in range(length)]


def uniform(number: int) -> float:
    """A number in [0, 1) that looks random, the same for the same number."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) / 2**64


class ChancySource(NullDrafter):
    """Knows the text, and errs by chance: always in the same way for a position and a slot.

    Args:
        text: All ids.
        chance: Of a token to be right.
        match_length: What it says about its evidence.
        max_block: Most tokens to propose.
        seed: Of the errors.
    """

    def __init__(
        self,
        text: Sequence[int],
        chance: Chance,
        *,
        match_length: Chance = lambda position: 4,
        max_block: int = 32,
        seed: int = 0,
        name: str = "chancy",
    ) -> None:
        self.name = name
        self.num_asked = 0
        self.last_match = 0
        self._text = text
        self._chance = chance
        self._match_length = match_length
        self._max_block = max_block
        self._seed = seed

    def read(self, text: Sequence[int], seed: int) -> None:
        """Be asked about another text from now on."""
        self._text, self._seed = text, seed

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        self.num_asked += 1
        self.last_match = int(self._match_length(position))
        places = range(position + 1, position + 1 + min(budget, self._max_block))
        block = []
        for slot, place in enumerate(place for place in places if place < len(self._text)):
            luck = uniform((self._seed * 100_003 + position) * 64 + slot)
            block.append(self._text[place] + (luck >= self._chance(place)))
        return DraftBlock(tuple(block), source=self.name)


@dataclass(slots=True)
class Turn:
    """One turn of a drafter over a text, round by round, and what it would have cost.

    Attributes:
        drafter: Proposes.
        text: What the target samples; its first token is pending.
        seconds: Spent so far, by a cost table.
        lengths: Drafted tokens of each round.
        sources: Where each block came from.
    """

    drafter: Drafter
    text: Sequence[int]
    state: DraftState | None = None
    position: int = 0
    seconds: float = 0.0
    num_accepted: int = 0
    lengths: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.drafter.start(list(self.text[:1]))

    @property
    def is_over(self) -> bool:
        return self.position >= len(self.text) - 1

    def propose(self) -> DraftBlock:
        budget = len(self.text) - 2 - self.position
        pending = self.text[self.position]
        return self.drafter.propose(self.state, pending, None, self.position, NOISE, budget)

    def verify(self, block: DraftBlock) -> None:
        ahead = list(self.text[self.position + 1 : self.position + 2 + len(block.token_ids)])
        right = 0
        while right < len(block.token_ids) and block.token_ids[right] == ahead[right]:
            right += 1
        self.lengths.append(len(block.token_ids))
        self.sources.append(block.source)
        self.num_accepted += right
        self.position += right + 1
        self.drafter.commit(self.state, ahead[: right + 1])

    def run(self, costs: CostTable) -> Turn:
        while not self.is_over:
            block = self.propose()
            self.seconds += costs.round_s(1 + len(block.token_ids))
            self.verify(block)
        return self


class FixedLength(NullDrafter):
    """Always drafts the first k tokens of a source's block."""

    name = "fixed"

    def __init__(self, source: ChancySource, length: int) -> None:
        self._source = source
        self._length = length

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        budget = min(budget, self._length)
        return self._source.propose(state, pending, hidden, position, noise, budget)
