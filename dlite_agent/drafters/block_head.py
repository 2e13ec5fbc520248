# ruff: noqa: ARG002, ARG005 - every cell is asked with the same arguments
"""The sequential head of a block, folded: the vocabulary matrix is read once for all slots.

A head that adds `U·g_k` to the hidden state of slot k before the vocabulary projection W, with
nothing nonlinear behind it, adds `(W·U)·g_k` to the logits. So the base logits of all slots are one
product with W, and a slot costs one with the factor `P = W·U`, [V, r]: of all rows, or of the few
that were best before the correction. DSpark's Markov head is the same form with a free P.

Arithmetic of a slot is numpy on the host: a dozen operators on a few hundred numbers, which take
torch three times as long. On an accelerator the shortlist is copied over once a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlite_agent.drafters.copy_hint import CopyCursor, Hint

__all__ = ["BlockHead", "Cell", "CopyGate", "RecurrentCell", "TokenCell", "token_rows"]

Numbers = npt.NDArray[np.float32]
Names = npt.NDArray[np.int64]
TokenRow = Callable[[int], Numbers]

_MAX_TABLE_BYTES = 64 * 2**20
"""A table of what every token brings to a cell is made once if it is no larger."""
DEFAULT_SHORTLIST = 512
"""Of SmolLM2-135M's drafter 32 lost a seventh of what slot 0 has right; 512 lost nothing."""
_LINEAR = 30.0
"""Above it softplus(x) is x in float32."""


class Cell(Protocol):
    """What a slot knows of the tokens before it: g_k of rank r."""

    def start(self, hidden: Tensor) -> Callable[[int, int, Numbers | None], Numbers]:
        """Begin a block.

        Args:
            hidden: [B, E], the slots' states.

        Returns:
            `step(slot, previous_id, g)`: g_k [r] from the slot's number, the token before it and
            g_{k-1}, which is None for slot 0.
        """
        ...


class TokenCell:
    """g_k depends on the previous token alone: DSpark's, and the ablation of ours.

    Args:
        token_row: [r] of a token.
    """

    def __init__(self, token_row: TokenRow) -> None:
        self._token_row = token_row

    def start(self, hidden: Tensor) -> Callable[[int, int, Numbers | None], Numbers]:
        """Nothing to prepare."""
        return lambda slot, previous_id, previous: self._token_row(previous_id)


@dataclass(frozen=True, slots=True)
class CopyGate:
    """How a recurrent head copies what the history suggests (ours).

    A hint is a candidate and how many tokens agree there. It brings `K·E(candidate) + l(agree)` to
    the cell, and `softplus(v·g_k + b(agree))` to the candidate's logit, which is never lowered.

    Attributes:
        token_row: [2r] of a candidate: K·E(token).
        length_rows: l, [lengths, 2r].
        gain: v, [r].
        bias: b, a number for each length.
    """

    token_row: TokenRow
    length_rows: Numbers
    gain: Numbers
    bias: Sequence[float]

    def brings(self, hint: Hint) -> Numbers:
        """What a hint brings to the cell, [2r]."""
        row: Numbers = self.length_rows[hint.matched]
        return row + self.token_row(hint.token_id) if hint.matched else row

    def bonus(self, hint: Hint, state: Numbers) -> float:
        """What is added to the candidate's logit."""
        raised = float(self.gain @ state) + self.bias[hint.matched]
        return raised if raised > _LINEAR else math.log1p(math.exp(raised))


class RecurrentCell:
    """A gated step (ours): `g' = z·g + (1 - z)·c`.

    z = σ(a_z) and c = tanh(a_c), where a = A·E(previous token) + C·h_k + R·g + b, and what a hint
    brings.

    Args:
        token_row: [2r] of a token: A·E(token), gate before candidate.
        hidden_proj: C, [2r, E].
        state_proj: R, [2r, r].
        bias: b, [2r].
        gate: Reads hints; None: there are none.
    """

    def __init__(
        self,
        token_row: TokenRow,
        hidden_proj: Tensor,
        state_proj: Tensor,
        bias: Tensor,
        gate: CopyGate | None = None,
    ) -> None:
        rank = state_proj.shape[1]
        # σ(x) = (1 + tanh(x / 2)) / 2, so that one tanh serves both halves
        half = torch.ones(2 * rank, 1, device=bias.device)
        half[:rank] = 0.5
        self._token_row = token_row
        self.gate = gate
        self._half = _host(half)[:, 0]
        self._hidden_proj = (hidden_proj * half).t().contiguous()
        self._bias = bias * half[:, 0]
        self._state_proj = np.ascontiguousarray(_host(state_proj * half).T)  # [r, 2r]
        self._rank = rank

    def start(
        self, hidden: Tensor, cursor: CopyCursor | None = None
    ) -> Callable[[int, int, Numbers | None], Numbers]:
        """C·h + b of all slots in one product.

        Args:
            hidden: As for any cell.
            cursor: Hints of the history for the slot that is asked for, of a cell with a gate.
        """
        gate = self.gate
        assert (gate is None) == (cursor is None), "hints are for a head that reads them"
        kind = self._hidden_proj.dtype
        of_hidden = _host(torch.addmm(self._bias, hidden.to(kind), self._hidden_proj))
        rank, half = self._rank, self._half

        def step(slot: int, previous_id: int, previous: Numbers | None) -> Numbers:
            total = self._token_row(previous_id) * half
            if gate is not None and cursor is not None:
                total += gate.brings(cursor.hint) * half
            total += of_hidden[slot]
            if previous is not None:
                total += previous @ self._state_proj
            np.tanh(total, out=total)
            keep, candidate = total[:rank], total[rank:]  # keep = 2z - 1
            if previous is None:
                keep *= candidate
                candidate -= keep
            else:
                keep *= previous - candidate
                candidate += keep
                candidate += previous
            candidate *= 0.5
            return candidate

        return step


class BlockHead:
    """From the slots' states to tokens, one slot after the other.

    Args:
        factor: P = W·U, [V, r]; None: every slot's best token by itself.
        cell: Gives g_k; None with `factor` None.
        shortlist: How many of a slot's best base logits are corrected; None: all of them.
        target_ids: The target's id of each row, where the base logits are not of its vocabulary.
    """

    def __init__(
        self,
        factor: Tensor | None,
        cell: Cell | None,
        *,
        shortlist: int | None = DEFAULT_SHORTLIST,
        target_ids: npt.NDArray[np.int64] | None = None,
    ) -> None:
        assert (factor is None) == (cell is None), "a correction needs both"
        self._factor = factor
        self._cell = cell
        self._gate = cell.gate if isinstance(cell, RecurrentCell) else None
        self._shortlist = shortlist
        self._target_ids = target_ids

    def draft(
        self,
        base: Tensor,
        hidden: Tensor,
        anchor_id: int,
        min_chance: float = 0.0,
        cursor: CopyCursor | None = None,
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Choose the best token of each slot, greedily. One host sync, and one for each hint.

        Args:
            base: Base logits [k, V] = W·h_k.
            hidden: [k, E].
            anchor_id: The token before slot 0.
            min_chance: The block ends before the first token with which the product of all shares
                is below.
            cursor: Hints of the history; the chosen tokens are pushed.

        Returns:
            At most k token ids, and the probability of each among its shortlist.
        """
        scores, ids_of, factors = self._listed(base)
        if factors is None or self._cell is None:
            places = scores.argmax(axis=1, keepdims=True)
            ids = np.take_along_axis(ids_of, places, axis=1)[:, 0].tolist()
            return _cut(ids, _shares(scores), min_chance)
        if isinstance(self._cell, RecurrentCell):
            step = self._cell.start(hidden, cursor)
        else:
            step = self._cell.start(hidden)
        previous_id, state, chance = anchor_id, None, 1.0
        chosen: list[int] = []
        shares: list[float] = []
        for slot in range(base.shape[0]):
            state = step(slot, previous_id, state)
            row = factors[slot] @ state
            row += scores[slot]
            names = ids_of[slot]
            if cursor is not None and cursor.hint.matched:
                row, names = self._copied(row, names, base[slot], cursor.hint, state)
            at = int(row.argmax())
            previous_id = int(names[at])
            if cursor is not None:
                cursor.push(previous_id)
            row -= row[at]
            share = 1.0 / float(np.exp(row, out=row).sum())
            chance *= share
            if chance < min_chance:
                break
            chosen.append(previous_id)
            shares.append(share)
        return tuple(chosen), tuple(shares)

    def _named(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the vocabulary projection as ids of the target."""
        return rows if self._target_ids is None else self._target_ids[rows]

    def _listed(self, base: Tensor) -> tuple[Numbers, Names, Sequence[Numbers] | None]:
        """Scores [k, n] of the rows that each slot may choose, their ids, and their factors."""
        if self._factor is not None and not self._shortlist:  # in the order of its rows
            ids = np.broadcast_to(self._named(np.arange(base.shape[1])), base.shape)
            return _host(base), ids, [_host(self._factor)] * base.shape[0]
        count = min(self._shortlist or base.shape[1], base.shape[1])
        best = torch.topk(base, count, dim=-1, sorted=False)
        ids = self._named(best.indices.cpu().numpy())
        if self._factor is None:
            return _host(best.values), ids, None
        rows = self._factor.index_select(0, best.indices.view(-1))
        return _host(best.values), ids, list(_host(rows).reshape(*ids.shape, -1))

    def _copied(
        self, row: Numbers, names: Names, base: Tensor, hint: Hint, state: Numbers
    ) -> tuple[Numbers, Names]:
        """Scores and ids of a slot with what copying adds to the hint's, which may be a new one."""
        assert self._gate is not None, "hints are for a head that reads them"
        bonus = self._gate.bonus(hint, state)
        if not self._shortlist:
            row[hint.token_id] += bonus
            return row, names
        assert self._factor is not None, "a gate is part of a correction"
        known = float(_host(self._factor[hint.token_id]) @ state) + float(base[hint.token_id])
        row[names == hint.token_id] = -math.inf
        return np.append(row, np.float32(known + bonus)), np.append(names, hint.token_id)

    def logits(self, base: Tensor, hidden: Tensor, previous_ids: Sequence[int]) -> Tensor:
        """Corrected logits [k, V] float32 where the tokens before each slot are given.

        What a copying head adds to the hints is left out, and there are none.
        """
        if self._factor is None or self._cell is None:
            return base.to(torch.float32)
        step, state = self._cell.start(hidden), None
        states: list[Numbers] = []
        for slot, previous_id in enumerate(previous_ids):
            state = step(slot, previous_id, state)
            states.append(state)
        corrections = torch.from_numpy(np.stack(states)) @ self._factor.to("cpu", torch.float32).t()
        return base.to("cpu", torch.float32) + corrections


def token_rows(weight: Tensor, embed: Callable[[Tensor], Tensor], vocab_size: int) -> TokenRow:
    """`A·E(token)` as a function of the token: from a table where that is small enough.

    Args:
        weight: A, [n, E].
        embed: The target's embedding, ids [m] to [m, E].
        vocab_size: V.
    """
    transposed = weight.t().contiguous()
    if 4 * vocab_size * weight.shape[0] <= _MAX_TABLE_BYTES:
        all_ids = torch.arange(vocab_size, device=weight.device)
        table = _host(embed(all_ids).to(weight.dtype) @ transposed)
        return table.__getitem__

    def row(token_id: int) -> Numbers:
        ids = torch.tensor([token_id], device=weight.device)
        return _host(torch.mm(embed(ids).to(transposed.dtype), transposed)[0])

    return row


def _shares(scores: Numbers) -> list[float]:
    """Probability of the best of each row, among the row."""
    scores = scores - scores.max(axis=1, keepdims=True)
    shares: list[float] = (1.0 / np.exp(scores).sum(axis=1)).tolist()
    return shares


def _cut(
    token_ids: list[int], shares: list[float], min_chance: float
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The tokens before the first with which the product of all shares is below `min_chance`."""
    chance = 1.0
    for count, share in enumerate(shares):
        chance *= share
        if chance < min_chance:
            return tuple(token_ids[:count]), tuple(shares[:count])
    return tuple(token_ids), tuple(shares)


def _host(tensor: Tensor) -> Numbers:
    """The same numbers, on the host, in float32."""
    array: Numbers = tensor.to("cpu", torch.float32).numpy()
    return array
