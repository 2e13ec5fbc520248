# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""Prompt lookup: what followed the last time that the session held the same few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.suffix_index import SuffixIndex
from dlite_agent.errors import ConfigurationError
from dlite_agent.kernels.ngram_kernels import NgramKernels
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["LookupDrafter", "LookupState"]

_NOTHING = DraftBlock(source="lookup")


@dataclass(slots=True)
class LookupState:
    """One session's tokens and their index.

    Attributes:
        index: Holds the tokens.
    """

    index: SuffixIndex

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.index.length

    @property
    def nbytes(self) -> int:
        """Bytes of the index; what forks share counts in each."""
        return self.index.nbytes


class LookupDrafter:
    """Drafts what followed the newest earlier occurrence of the session's last tokens.

    The longest n-gram wins, and a match of n tokens is continued for at most 2n - 1. Costs no
    forward of its own and no memory of another session. The simple baseline; `suffix` finds more.

    On three SWE-agent transcripts (Qwen3's tokenizer, 4-, 3- and 2-grams) the slots after a 4-gram
    hit at 0.66, 0.46, 0.36, 0.35, and those after a 2-gram at 0.37, 0.22, 0.17, 0.12. Against seven
    tokens for every match, 2n - 1 forwards a quarter fewer rows for 3 % less acceptance length.

    Args:
        sizes: n-gram sizes to look for, in descending order.
        max_block: Most tokens to propose.
        max_probes: Most chain entries to follow for each size.
        kernels: Of the index; None for Python's.

    Raises:
        ConfigurationError: A value is out of range.
    """

    name = "lookup"
    requires = Requires()

    def __init__(
        self,
        *,
        sizes: tuple[int, ...] = (4, 3, 2),
        max_block: int = 7,
        max_probes: int = 8,
        kernels: NgramKernels | None = None,
    ) -> None:
        if not sizes or min(sizes) < 1 or tuple(sorted(set(sizes), reverse=True)) != sizes:
            raise ConfigurationError(
                f"sizes is {sizes!r}; use positive n-gram sizes in descending order, e.g. (4, 3, 2)"
            )
        if max_block < 1 or max_probes < 1:
            raise ConfigurationError(
                f"max_block is {max_block!r} and max_probes {max_probes!r}; use at least 1"
            )
        self._sizes = sizes
        self._max_block = max_block
        self._max_probes = max_probes
        self._kernels = kernels

    def start(self, token_ids: list[int]) -> LookupState:
        """Index a session's tokens; about half a microsecond a token."""
        state = LookupState(SuffixIndex(self._sizes, self._kernels))
        state.index.append(token_ids)
        return state

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """A continuation, or nothing where the last tokens are new to the session."""
        index = _own(state).index
        matches = index.search(self._max_probes, self._sizes[0])
        if not matches or budget < 1:
            return _NOTHING
        newest = matches[0]
        size = max(size for size in self._sizes if size <= newest.length)
        count = min(budget, self._max_block, 2 * size - 1)
        return DraftBlock(tuple(index.continuation(newest.position, count)), source=self.name)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids."""
        _own(state).index.append(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on."""
        _own(state).index.truncate_to(length)

    def fork(self, state: DraftState | None) -> LookupState:
        """An independent copy that shares the index so far."""
        return LookupState(_own(state).index.fork())


def _own(state: DraftState | None) -> LookupState:
    assert isinstance(state, LookupState), "the state of another drafter"
    return state
