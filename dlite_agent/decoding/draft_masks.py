"""Which tokens each row of a draft may choose, as far as it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from dlite_agent.sampling import TokenMask

__all__ = ["DraftMasks"]


class DraftMasks:
    """The masks of a draft's rows, for one round.

    Rows are evaluated in order and the first miss ends the round, so that a mask is made when its
    row is read. A token is looked up without one: a greedy row most often takes a token that the
    grammar allows. The matcher is where it was after each of these.

    Args:
        matcher: At row 0; borrowed.
        ahead: k tokens that it allows; row i holds after `ahead[:i]`.
        bits: Room for one mask, [W] int32, where bit j of word i stands for id 32 i + j.
        num_tokens: Ids that the tokenizer has; others would break the matcher.
        vocab_size: Columns of the logits.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        ahead: Sequence[int],
        bits: NDArray[np.int32],
        num_tokens: int,
        vocab_size: int,
    ) -> None:
        self._matcher = matcher
        self._ahead = list(ahead)
        self._bits = bits
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._ahead) + 1

    def allows(self, row: int, token_id: int) -> bool:
        """Whether a row may choose a token; where bytes are forced, only their first token."""
        if token_id >= self._num_tokens:
            return False
        with self._at(row) as matcher:
            forced = matcher.compute_ff_tokens() if matcher.compute_ff_bytes() else []
            if forced:
                return token_id == forced[0]
            return matcher.validate_tokens([token_id]) == 1

    def row(self, row: int) -> TokenMask:
        """The mask of a row; good until the next one is asked for."""
        with self._at(row) as matcher:
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return TokenMask(self._bits, self._vocab_size)

    @contextmanager
    def _at(self, row: int) -> Iterator[LLMatcher]:
        self._matcher.consume_tokens(self._ahead[:row])
        try:
            yield self._matcher
        finally:
            self._matcher.rollback(row)
