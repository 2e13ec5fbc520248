# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""EAGLE-3 as a chain: one token after the other, each from the state of the one before.

Trees are not drafted. What is kept of a session is the feature of every position and the keys and
values of every pair; see `models.eagle3_network`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlite_agent.drafters.block import in_order
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.drafter_rows import DrafterRows
from dlite_agent.models.eagle3_network import Eagle3Config, Eagle3Network, PairHistory
from dlite_agent.models.layer_weights import ReadWeight
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["Eagle3Drafter", "Eagle3State"]


@dataclass(slots=True)
class Eagle3State:
    """A session's history.

    Attributes:
        token_ids: Of the session; a pair needs the token behind its position.
        features: [S, E] of positions.
        pairs: Keys and values [K, S, D] of pairs whose token is known.
    """

    token_ids: list[int]
    features: DrafterRows
    pairs: DrafterRows

    @property
    def nbytes(self) -> int:
        """Memory of features, keys and values, room to grow included, and 8 bytes a token."""
        return self.features.nbytes + self.pairs.nbytes + 8 * len(self.token_ids)


class Eagle3Drafter:
    """Proposes a chain of up to `config.block_size` tokens, greedily.

    Args:
        config: Its shape.
        read: Gives a tensor by its name (`eagle3_shapes`).
        ends: Embedding and head, `DrafterEnds.of(target)` where they are the target's.
        window: Pairs of the history that are kept and seen; 0: all.
    """

    name = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        read: ReadWeight,
        ends: DrafterEnds,
        *,
        window: int = 0,
    ) -> None:
        self.config = config
        self.window = window
        self._device = ends.device
        self._ends = ends
        self._network = Eagle3Network(config, read, dtype=ends.dtype, device=ends.device)

    @property
    def requires(self) -> Requires:
        """The taps of all positions."""
        return Requires(tuple(sorted(self.config.taps)), "all")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer's matrices, which every drafted token reads."""
        return self._network.weight_bytes

    def variant(self, taps: tuple[int, ...]) -> Eagle3Drafter:
        """The same weights over other taps: what `drafters.self_test` compares with."""
        other = copy.copy(self)
        other.config = replace(self.config, taps=taps)
        return other

    def start(self, token_ids: list[int]) -> DraftState | None:
        """A history without positions."""
        return Eagle3State(list(token_ids), DrafterRows(self.window), DrafterRows(self.window))

    @torch.no_grad()
    def read_rows(
        self, state: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """Add positions, and the pairs whose token is there."""
        own = _own(state)
        features = self._network.features(in_order(hidden, self.config.taps))
        own.features.append(features, first_position=first_position)
        start = max(own.pairs.end, own.features.first) if len(own.pairs) else own.features.first
        end = min(own.features.end, len(own.token_ids) - 1)
        if start >= end:
            return
        first, (kept,) = own.features.all()
        ids = torch.tensor(own.token_ids[start + 1 : end + 1], device=self._device)
        keys, values = self._network.keys_values(
            kept[start - first : end - first], self._ends.embed(ids), start
        )
        own.pairs.append(keys, values, first_position=start)

    @torch.no_grad()
    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """The best chain by the drafter's own probabilities.

        Nothing where the feature before `pending` is not there: after an error, until the next
        forward brings taps.
        """
        own = _own(state)
        count = min(budget, self.config.block_size)
        if count < 1 or not len(own.features) or own.features.end != position:
            return DraftBlock(source=self.name)
        first, (kept,) = own.features.all()
        feature = kept[position - 1 - first : position - first]
        history = self._history(own, position - 1)
        token = torch.tensor([pending], device=self._device)
        chosen: list[Tensor] = []
        shares: list[Tensor] = []
        for pair in range(position - 1, position - 1 + count):
            state_, feature = self._network.step(feature, self._ends.embed(token), pair, history)
            share, row = self._ends.project(state_).softmax(dim=-1).max(dim=-1)
            token = row if self._ends.target_ids is None else self._ends.target_ids[row]
            chosen.append(token)
            shares.append(share)
        token_ids: list[int] = torch.cat(chosen).tolist()
        return DraftBlock(tuple(token_ids), tuple(torch.cat(shares).tolist()), self.name)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids; their positions come with their taps."""
        _own(state).token_ids.extend(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget positions from `length` on, and the pair of the last token."""
        own = _own(state)
        del own.token_ids[length:]
        own.features.truncate_to(length)
        own.pairs.truncate_to(length - 1)

    def fork(self, state: DraftState | None) -> DraftState | None:
        """A history of its own: a copy."""
        own = _own(state)
        return Eagle3State(own.token_ids.copy(), own.features.fork(), own.pairs.fork())

    def saved(self, state: DraftState | None) -> dict[str, Tensor]:
        """The history as tensors, for a file."""
        own = _own(state)
        tensors: dict[str, Tensor] = {}
        for name, rows in (("features", own.features), ("pairs", own.pairs)):
            if len(rows):
                first, parts = rows.all()
                tensors[f"{name}.first"] = torch.tensor([first])
                tensors |= {f"{name}.{number}": part for number, part in enumerate(parts)}
        return tensors

    def restored(self, token_ids: list[int], tensors: Mapping[str, Tensor]) -> DraftState:
        """The state that `saved` was given, for a session of the same tokens."""
        state = Eagle3State(list(token_ids), DrafterRows(self.window), DrafterRows(self.window))
        for name, rows, count in (("features", state.features, 1), ("pairs", state.pairs, 2)):
            if f"{name}.first" in tensors:
                parts = (tensors[f"{name}.{number}"].to(self._device) for number in range(count))
                rows.append(*parts, first_position=int(tensors[f"{name}.first"]))
        return state

    def _history(self, own: Eagle3State, end: int) -> PairHistory:
        """The pairs before `end`."""
        if len(own.pairs) and own.pairs.first < end:
            return PairHistory(*own.pairs.before(end)[1])
        empty = torch.empty(
            (self.config.num_kv_heads, 0, self.config.head_dim),
            dtype=self._network.dtype,
            device=self._device,
        )
        return PairHistory(empty, empty)


def _own(state: DraftState | None) -> Eagle3State:
    assert isinstance(state, Eagle3State), "the state of another drafter"
    return state
