# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""Drafters with a known accuracy, for lossless tests."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlite_agent.drafters.drafter import DraftBlock, DraftState
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["AdversarialDrafter", "NoisyDrafter", "OracleDrafter", "ScriptedDrafter"]


class _DrafterDouble(NullDrafter):
    """Needs no taps and remembers no tokens; subclasses say what they propose."""

    name = "double"

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """The double's block."""
        return DraftBlock(tuple(self._block(state, position, budget)), source=self.name)

    def _block(self, state: DraftState | None, position: int, budget: int) -> Sequence[int]:
        return ()


class OracleDrafter(_DrafterDouble):
    """Always right: it is told the session's tokens, prompt and answer, beforehand.

    Args:
        token_ids: All ids, from position 0.
        max_block: Most tokens to propose.
    """

    name = "oracle"

    def __init__(self, token_ids: Sequence[int], *, max_block: int = 7) -> None:
        self._token_ids = tuple(token_ids)
        self._max_block = max_block

    def _block(self, state: DraftState | None, position: int, budget: int) -> Sequence[int]:
        count = min(budget, self._max_block)
        return self._token_ids[position + 1 : position + 1 + count]


class NoisyDrafter(_DrafterDouble):
    """Right, except for some tokens, chosen at random but always the same ones.

    Args:
        token_ids: All ids, from position 0.
        vocab_size: V of the target.
        error_rate: Share of wrong tokens.
        seed: Of the errors.
        max_block: Most tokens to propose.
    """

    name = "noisy"

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        vocab_size: int,
        error_rate: float = 0.3,
        seed: int = 0,
        max_block: int = 7,
    ) -> None:
        rng = random.Random(seed)
        wrong = [(t + rng.randrange(1, vocab_size)) % vocab_size for t in token_ids]
        mixed = [
            w if rng.random() < error_rate else t for t, w in zip(token_ids, wrong, strict=True)
        ]
        self._token_ids = tuple(mixed)
        self._max_block = max_block

    def _block(self, state: DraftState | None, position: int, budget: int) -> Sequence[int]:
        count = min(budget, self._max_block)
        return self._token_ids[position + 1 : position + 1 + count]


class AdversarialDrafter(_DrafterDouble):
    """Breaks the rules: blocks beyond the budget, ids that do not exist, stop ids in between.

    Args:
        vocab_size: V of the target.
        favourites: Ids to propose often, e.g. stop ids.
        seed: Of the choice.
    """

    name = "adversarial"

    def __init__(self, *, vocab_size: int, favourites: Sequence[int] = (0,), seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._favourites = tuple(favourites)
        self._seed = seed

    def _block(self, state: DraftState | None, position: int, budget: int) -> Sequence[int]:
        rng = random.Random(self._seed * 1_000_003 + position)
        choices = (*self._favourites, rng.randrange(self._vocab_size))
        block = [rng.choice(choices) for _ in range(budget % 100 + 3)]
        if rng.random() < 0.5:
            block[rng.randrange(len(block))] = rng.choice((-1, self._vocab_size, 1 << 40))
        return block


@dataclass(slots=True)
class _Cursor:
    next_block: int = 0

    @property
    def nbytes(self) -> int:
        return 0


class ScriptedDrafter(_DrafterDouble):
    """Proposes given blocks, one a round and session, then nothing.

    Args:
        blocks: What to propose; a block is cut to the round's budget.
    """

    name = "scripted"

    def __init__(self, blocks: Iterable[Sequence[int]]) -> None:
        self._blocks = [tuple(block) for block in blocks]

    def start(self, token_ids: list[int]) -> DraftState | None:
        """The first block is next."""
        return _Cursor()

    def fork(self, state: DraftState | None) -> DraftState | None:
        """A cursor of its own."""
        assert isinstance(state, _Cursor), "the state of another drafter"
        return _Cursor(state.next_block)

    def _block(self, state: DraftState | None, position: int, budget: int) -> Sequence[int]:
        assert isinstance(state, _Cursor), "the state of another drafter"
        number, state.next_block = state.next_block, state.next_block + 1
        return self._blocks[number][:budget] if number < len(self._blocks) else ()
