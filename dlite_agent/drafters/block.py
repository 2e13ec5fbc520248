# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""DSpark, DFlash and DFlash2: a block at a time, from a history of the target's taps.

The history is the drafter's own: keys and values of every position that the session has computed
since its state began. It grows with the session, is cut and copied with it, and is not there after
a restore; see `docs/guides/public-drafters.md`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlite_agent.drafters.block_cells import make_block_head
from dlite_agent.drafters.block_head import DEFAULT_SHORTLIST
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.block_network import BlockHistory, BlockNetwork
from dlite_agent.models.block_sequential import confidence_logits
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.drafter_rows import DrafterRows
from dlite_agent.models.layer_weights import ReadWeight
from dlite_agent.models.target import TargetConfig, TargetHidden
from dlite_agent.sampling import KeyedNoise

__all__ = ["BlockDrafter", "BlockState", "check_block_fits", "in_order"]


@dataclass(slots=True)
class BlockState:
    """A session's history.

    Attributes:
        rows: Keys [n, K, S, D] and values [n, K, S, D] of its positions.
    """

    rows: DrafterRows

    @property
    def nbytes(self) -> int:
        """Memory of keys and values, room to grow included."""
        return self.rows.nbytes


class BlockDrafter:
    """Proposes a block of `config.num_drafts` tokens, greedily.

    A round costs the backbone over the block, attention to the history, and one product with the
    head; a prompt costs a feature and its keys and values for every token.

    Args:
        config: Its shape.
        read: Gives a tensor by its name (`block_shapes`).
        ends: Embedding and head, `DrafterEnds.of(target)` where they are the target's.
        window: Positions of the history that are kept and seen; 0: all.
        shortlist: As in `BlockHead`; DFlash2 has its own.
        min_confidence: A block ends before the first token with less, by DSpark's own predictor of
            acceptance; 0 never cuts.
    """

    def __init__(
        self,
        config: BlockConfig,
        read: ReadWeight,
        ends: DrafterEnds,
        *,
        window: int = 0,
        shortlist: int | None = DEFAULT_SHORTLIST,
        min_confidence: float = 0.0,
    ) -> None:
        self.config = config
        self.window = window
        self._device = ends.device
        self._ends = ends
        self._min_confidence = min_confidence
        self._network = BlockNetwork(config, read, dtype=ends.dtype, device=ends.device)
        self._head = make_block_head(
            config,
            read,
            dtype=ends.dtype,
            device=ends.device,
            shortlist=shortlist,
            target_ids=ends.target_ids,
        )
        self._confidence: dict[str, Tensor] = {}
        if config.confidence != "none":
            names = ["confidence_head.proj.weight", "confidence_head.proj.bias"]
            if config.confidence == "token":
                names.append("markov_head.markov_w1.weight")
            self._confidence = {name: read(name).to(ends.device) for name in names}
            for name in names[:2]:  # a product of few numbers, whose sigmoid is compared
                self._confidence[name] = self._confidence[name].to(torch.float32)
        masks = torch.full((config.block_size,), config.mask_token_id, device=ends.device)
        self._block = self._ends.embed(masks)  # [B, E]

    @property
    def name(self) -> str:
        """The family."""
        return self.config.family

    @property
    def requires(self) -> Requires:
        """The taps of all positions."""
        return Requires(tuple(sorted(self.config.taps)), "all")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the backbone's matrices, which every block reads; the head is the target's."""
        return self._network.weight_bytes

    def variant(self, taps: tuple[int, ...], *, is_anchor_drafted: bool) -> BlockDrafter:
        """The same weights, read in another way: what `drafters.self_test` compares with."""
        other = copy.copy(self)
        other.config = replace(self.config, taps=taps, is_anchor_drafted=is_anchor_drafted)
        return other

    def start(self, token_ids: list[int]) -> DraftState | None:
        """A history without positions."""
        return BlockState(DrafterRows(self.window))

    @torch.no_grad()
    def read_rows(
        self, state: DraftState | None, hidden: TargetHidden, first_position: int
    ) -> None:
        """Add positions to the history."""
        history = self._network.history(in_order(hidden, self.config.taps), first_position)
        _own(state).rows.append(history.keys, history.values, first_position=first_position)

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
        """The best block by the drafter's own probabilities.

        Nothing where the history does not reach up to `pending`: after an error, until the next
        forward brings taps.
        """
        config, rows = self.config, _own(state).rows
        count = min(budget, config.num_drafts)
        if count < 1 or not len(rows) or rows.end != position:
            return DraftBlock(source=self.name)
        first, (keys, values) = rows.before(position)
        block = self._block.clone()
        block[:1] = self._ends.embed(torch.tensor([pending], device=self._device))
        states = self._network.states(
            block.unsqueeze(0), torch.tensor([position]), BlockHistory(keys, values, first)
        )[0]
        start = 0 if config.is_anchor_drafted else 1
        states = states[start : start + count]
        token_ids, shares = self._head.draft(self._project(states), states, pending)
        if config.confidence != "none":
            token_ids, shares = self._confident(states, pending, token_ids)
        return DraftBlock(token_ids, shares, self.name)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Nothing: positions come with their taps."""

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget positions from `length` on."""
        _own(state).rows.truncate_to(length)

    def fork(self, state: DraftState | None) -> DraftState | None:
        """A history of its own: a copy."""
        return BlockState(_own(state).rows.fork())

    def saved(self, state: DraftState | None) -> dict[str, Tensor]:
        """The history as tensors, for a file: `keys`, `values`, and `first` of its positions."""
        rows = _own(state).rows
        if not len(rows):
            return {}
        first, (keys, values) = rows.all()
        return {"keys": keys, "values": values, "first": torch.tensor([first])}

    def restored(self, token_ids: list[int], tensors: Mapping[str, Tensor]) -> DraftState:
        """The state that `saved` was given, for a session of the same tokens."""
        rows = DrafterRows(self.window)
        if tensors:
            kept = (tensors[name].to(self._device) for name in ("keys", "values"))
            rows.append(*kept, first_position=int(tensors["first"]))
        return BlockState(rows)

    def _project(self, states: Tensor) -> Tensor:
        base = self._ends.project(states)
        if self.config.output_multiplier != 1.0:
            base = base * self.config.output_multiplier
        if self.config.softcap:
            base = torch.tanh(base / self.config.softcap) * self.config.softcap
        return base

    def _confident(
        self, states: Tensor, pending: int, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens before the first of too little confidence, and the confidence of each."""
        previous_ids = torch.tensor([[pending, *token_ids[:-1]]], device=self._device)
        logits = confidence_logits(
            self.config, self._confidence.__getitem__, previous_ids, states.unsqueeze(0)
        )
        shares: list[float] = logits[0].sigmoid().tolist()
        low = (slot for slot, share in enumerate(shares) if share < self._min_confidence)
        count = next(low, len(shares))
        return token_ids[:count], tuple(shares[:count])


def in_order(hidden: TargetHidden, taps: tuple[int, ...]) -> Tensor:
    """The states of some taps, [T, S, E], in the order of `taps`."""
    if hidden.layer_ids == taps:
        return hidden.states
    return hidden.states[[hidden.layer_ids.index(tap) for tap in taps]]


def _own(state: DraftState | None) -> BlockState:
    assert isinstance(state, BlockState), "the state of another drafter"
    return state


def check_block_fits(config: BlockConfig, target: TargetConfig, fingerprint: str) -> None:
    """See that a drafter was made for a target.

    Args:
        config: The drafter's.
        target: Shape of the target.
        fingerprint: Of the target's checkpoint, as it is stored.

    Raises:
        DrafterMismatchError: It was trained for another one; the message says in what they differ.
    """
    for name, drafts_for, has in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_layers", config.num_target_layers, target.num_layers),
        ("fingerprint", config.target_fingerprint, fingerprint),
    ):
        if drafts_for and drafts_for != has:
            raise DrafterMismatchError(
                f"the drafter was trained for a target with {name}={drafts_for}, and this one "
                f"({target.architecture}) has {has}; name a drafter for this target"
            )
    if max(config.taps) >= target.num_layers or not 0 <= config.mask_token_id < target.vocab_size:
        raise DrafterMismatchError(
            f"the drafter reads layers {config.taps} and masks with id {config.mask_token_id}, and "
            f"this target ({target.architecture}) has {target.num_layers} layers and "
            f"{target.vocab_size} ids; name a drafter for this target"
        )
