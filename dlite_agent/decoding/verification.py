"""Which tokens of a draft the target would have chosen itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from dlite_agent.drafters.drafter import DraftBlock
from dlite_agent.sampling import RowMasks, Sampler, TokenHistory, TokenLogprobs, token_logprobs

__all__ = ["RowContext", "Verification", "verify"]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What the rows of one verification depend on beside their logits.

    Attributes:
        stop_token_ids: Ids that end the turn.
        masks: Allowed tokens of R rows with 1 <= R <= k + 1, or None. Row i holds after
            `draft[:i]`; a grammar that refuses `draft[R - 1]` has no mask behind it, and no such
            row is evaluated.
        history: What penalties count, as it was before row 0; row i counts `draft[:i]` as well.
        forced: Tokens that the first rows commit whatever their logits say; not evaluated.
        num_top_logprobs: How many of the best tokens to report beside each committed one; None
            reports no log-probabilities.
    """

    stop_token_ids: frozenset[int] = frozenset()
    masks: RowMasks | None = None
    history: TokenHistory | None = None
    forced: tuple[int, ...] = ()
    num_top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What one round commits.

    Attributes:
        token_ids: Between 1 and k + 1 ids, the target's own choice.
        num_accepted: How many of them were drafted.
        is_terminal: The last one ends the turn.
        logprobs: Of each, raw; empty unless asked for.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    is_terminal: bool
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def hidden_row(self) -> int:
        """Input row that stays last in the KV: the one whose logits gave the last committed token.

        Row 0 is the pending token and row i is `draft[i - 1]`, so c committed tokens keep c rows,
        and the last committed token is the next pending one, in no KV yet.
        """
        return len(self.token_ids) - 1


def verify(
    draft: DraftBlock,
    logits: Tensor,
    sampler: Sampler,
    first_position: int,
    rows: RowContext | None = None,
) -> Verification:
    """Accept the longest prefix of a draft that the target would have sampled itself.

    Row i of the logits is sampled with the noise keyed to position `first_position + i`; the draft
    is accepted while it names that token, and the first token that it misses (or the one after a
    full draft) is added. The committed tokens are therefore those of plain decoding with the same
    seed, and each has the target's distribution. Nothing is evaluated past the first terminal
    token. Pure.

    Args:
        draft: k >= 0 proposed tokens.
        logits: Target logits, [k + 1, V]; row i predicts the token after `draft[:i]`.
        sampler: Turns logits and keyed noise into a token.
        first_position: Absolute position of the token that row 0 predicts.
        rows: Stop ids, masks and whatever else a row depends on; None for nothing.

    Raises:
        ValueError: `logits` does not have k + 1 rows, there are no masks or too many, or penalties
            without a history.
        FloatingPointError: The logits of a row that is evaluated are not finite.

    Source: Gumbel-max sampling with shared noise; compare Leviathan et al. 2023 (arXiv:2211.17192),
        algorithm 1.
    """
    rows = rows or RowContext()
    drafted = draft.token_ids
    if logits.shape[0] != len(drafted) + 1:
        raise ValueError(
            f"{len(drafted)} drafted tokens need one row of logits more, not {logits.shape[0]}"
        )
    num_rows = _num_reachable_rows(drafted, rows)
    forced = rows.forced[:num_rows]
    sampled = sampler.sample_each(
        logits[:num_rows], first_position, rows.history, drafted, len(forced), rows.masks
    )
    committed: list[int] = []
    num_accepted = 0
    for token_id in chain(forced, sampled):
        is_match = len(committed) < len(drafted) and token_id == drafted[len(committed)]
        committed.append(token_id)
        num_accepted += is_match
        if not is_match:
            break
    return Verification(
        tuple(committed),
        num_accepted,
        committed[-1] in rows.stop_token_ids,
        _logprobs(logits, committed, rows.num_top_logprobs),
    )


def _logprobs(
    logits: Tensor, committed: list[int], num_top: int | None
) -> tuple[TokenLogprobs, ...]:
    if num_top is None:
        return ()
    return token_logprobs(logits[: len(committed)], committed, num_top)


def _num_reachable_rows(drafted: tuple[int, ...], rows: RowContext) -> int:
    """Rows that no terminal token of the draft precedes and that have a mask, if any has."""
    num_rows = next(
        (i + 1 for i, token_id in enumerate(drafted) if token_id in rows.stop_token_ids),
        len(drafted) + 1,
    )
    if rows.masks is None:
        return num_rows
    if not 1 <= len(rows.masks) <= len(drafted) + 1:
        raise ValueError(
            f"{len(drafted)} drafted tokens take 1 to {len(drafted) + 1} masks, "
            f"not {len(rows.masks)}"
        )
    return min(num_rows, len(rows.masks))
