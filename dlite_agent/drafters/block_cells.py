# ruff: noqa: ARG001, ARG005 - every cell is asked with the same arguments
"""What the heads of public block drafters know of the tokens before a slot, slot by slot.

All are of the form that `BlockHead` folds: base logits and P·g. `models.block_sequential` has the
same for given tokens, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dlite_agent.drafters.block_head import BlockHead, Cell, Numbers, TokenCell, TokenRow
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.layer_weights import ReadWeight

__all__ = ["GatedCell", "RnnCell", "SelectorCell", "make_block_head"]

Step = Callable[[int, int, Numbers | None], Numbers]


class GatedCell:
    """DSpark's `gated`: g = σ(W·[h_k ; e] + b) ⊙ e, where e is the previous token's row.

    Args:
        token_row: [r] of a token.
        weight: W, [r, E + r].
        bias: b, [r].
    """

    def __init__(self, token_row: TokenRow, weight: Tensor, bias: Tensor) -> None:
        rank = weight.shape[0]
        self._token_row = token_row
        self._of_hidden, of_token = weight.split([weight.shape[1] - rank, rank], dim=1)
        self._of_token = np.ascontiguousarray(_host(of_token).T)
        self._bias = bias

    def start(self, hidden: Tensor) -> Step:
        """The state's part of all slots in one product."""
        of_hidden = _product(hidden, self._of_hidden, self._bias)

        def step(slot: int, previous_id: int, previous: Numbers | None) -> Numbers:
            token = self._token_row(previous_id)
            return _sigmoid(of_hidden[slot] + token @ self._of_token) * token

        return step


class RnnCell:
    """DSpark's `rnn`: z, c, o = W·[s ; e ; h_k] + b, s' = σ(z)·s + (1 - σ(z))·tanh(c), g = tanh(o).

    s is 0 before slot 0.

    Args:
        token_row: [r] of a token.
        weight: W, [3r, 2r + E].
        bias: b, [3r].
    """

    def __init__(self, token_row: TokenRow, weight: Tensor, bias: Tensor) -> None:
        rank = weight.shape[0] // 3
        self._rank = rank
        self._token_row = token_row
        of_known, self._of_hidden = weight.split([2 * rank, weight.shape[1] - 2 * rank], dim=1)
        self._of_known = np.ascontiguousarray(_host(of_known).T)  # [2r, 3r]
        self._bias = bias

    def start(self, hidden: Tensor) -> Step:
        """The state's part of all slots in one product."""
        of_hidden = _product(hidden, self._of_hidden, self._bias)
        rank = self._rank
        state = np.zeros(rank, dtype=np.float32)

        def step(slot: int, previous_id: int, previous: Numbers | None) -> Numbers:
            nonlocal state
            known = np.concatenate([state, self._token_row(previous_id)])
            total = of_hidden[slot] + known @ self._of_known
            keep = _sigmoid(total[:rank])
            state = keep * state + (1 - keep) * np.tanh(total[rank : 2 * rank])
            output: Numbers = np.tanh(total[2 * rank :])
            return output

        return step


class SelectorCell:
    """DFlash2's: g = e ⊙ W·h_k.

    Args:
        token_row: [r] of a token.
        weight: W, [r, E].
    """

    def __init__(self, token_row: TokenRow, weight: Tensor) -> None:
        self._token_row = token_row
        self._weight = weight

    def start(self, hidden: Tensor) -> Step:
        """W·h of all slots in one product."""
        of_hidden = _product(hidden, self._weight, None)
        return lambda slot, previous_id, previous: self._token_row(previous_id) * of_hidden[slot]


def make_block_head(
    config: BlockConfig,
    read: ReadWeight,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shortlist: int | None,
    target_ids: Tensor | None,
) -> BlockHead:
    """The head of a block drafter, folded.

    Args:
        config: Its shape.
        read: Gives a tensor by its name.
        dtype: That the factor is kept in.
        device: Where the factor is kept.
        shortlist: As in `BlockHead`; a selector has its own.
        target_ids: The target's id of each row of a vocabulary of its own, [rows]; else None.
    """
    ids = None if target_ids is None else target_ids.cpu().numpy()
    if config.head == "none":
        return BlockHead(None, None, shortlist=1, target_ids=ids)
    if config.head == "selector":
        prefix, tokens, factor = "candidate_selector.", "predecessor_codebook", "successor_codebook"
    else:
        prefix, tokens, factor = "markov_head.", "markov_w1.weight", "markov_w2.weight"
    table = read(f"{prefix}{tokens}")

    def row(token_id: int) -> Numbers:
        return _host(table[token_id])

    def load(name: str) -> Tensor:
        return read(f"{prefix}{name}").to(device, torch.float32)

    cell: Cell
    if config.head == "selector":
        cell, shortlist = SelectorCell(row, load("hidden_projection.weight")), config.shortlist
    elif config.head == "gated":
        cell = GatedCell(row, load("gate_proj.weight"), load("gate_proj.bias"))
    elif config.head == "rnn":
        cell = RnnCell(row, load("joint_proj.weight"), load("joint_proj.bias"))
    else:
        cell = TokenCell(row)
    kept = read(f"{prefix}{factor}").to(device, dtype).contiguous()
    return BlockHead(kept, cell, shortlist=shortlist, target_ids=ids)


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Numbers:
    return _host(torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias))


def _sigmoid(x: Numbers) -> Numbers:
    half: Numbers = 0.5 * np.tanh(0.5 * x) + 0.5
    return half


def _host(tensor: Tensor) -> Numbers:
    """The same numbers, on the host, in float32."""
    array: Numbers = tensor.detach().to("cpu", torch.float32).numpy()
    return array
