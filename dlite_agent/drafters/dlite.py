# ruff: noqa: ARG002 - the Drafter protocol has these arguments
"""DLite: drafts from the target's own hidden states of one position.

What it needs of the history is in the taps of the row whose logits gave the pending token, which
every forward yields: after a restore, a fork or a rewind the first block is like any other. It
remembers nothing, but for a copying head, which looks into the session's ids (ours).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dlite_agent.drafters.block_head import (
    DEFAULT_SHORTLIST,
    BlockHead,
    CopyGate,
    RecurrentCell,
    TokenCell,
    token_rows,
)
from dlite_agent.drafters.copy_hint import TokenHistory
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.native_head import NativeHead
from dlite_agent.errors import ConfigurationError, DrafterMismatchError
from dlite_agent.kernels.row_kernels import RowKernels
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import read_dlite
from dlite_agent.models.dlite_network import DLiteNetwork
from dlite_agent.models.target import TargetConfig, TargetHidden, TargetModel
from dlite_agent.sampling import KeyedNoise

__all__ = ["DLiteDrafter", "check_dlite_fits", "load_dlite"]

_NOTHING = DraftBlock(source="dlite")
_SMALL_VOCABULARY = 2_048
"""All of its rows are corrected sooner than the best ones are found."""


class DLiteDrafter:
    """Proposes a block of `block_size` tokens, greedily.

    Its state is None, 0 bytes; with `head="copy"` the session's ids, 4 bytes each.

    A round costs the backbone over the block, one product with the target's packed head, and a few
    numbers a slot; nothing of it depends on the length of the history.

    Args:
        config: Its shape.
        tensors: All of `dlite_shapes(config)`.
        target: What it drafts for; its embedding and head are used in place.
        shortlist: As in `BlockHead`.
        min_chance: A block ends where the chance of all its tokens to be right, as the drafter sees
            it, falls below; 0 never cuts.
        kernels: As in `DLiteNetwork`.

    Raises:
        DrafterMismatchError: It was made for a target of another shape.
        ConfigurationError: It reads more than one position, which the loop does not keep yet.
    """

    name = "dlite"

    def __init__(
        self,
        config: DLiteConfig,
        tensors: Mapping[str, Tensor],
        target: TargetModel,
        *,
        shortlist: int | None = DEFAULT_SHORTLIST,
        min_chance: float = 0.0,
        kernels: RowKernels | None = None,
    ) -> None:
        _check_shape(config, target.config)
        if config.context_positions > 1:
            raise ConfigurationError(
                f"the drafter reads context_positions={config.context_positions} positions, and "
                "the decode loop keeps the taps of one; train one with context_positions=1"
            )
        self.config = config
        self._min_chance = min_chance
        self.requires = Requires(config.taps, "last")
        self._target = target
        self._network = DLiteNetwork(
            config,
            tensors.__getitem__,
            dtype=target.dtype,
            device=target.device,
            kernels=kernels,
        )
        self.head, self._native = _make_head(config, tensors, target, shortlist, kernels)

    @property
    def block_bytes(self) -> int:
        """Bytes of the matrices that a block reads: the backbone's, and the target's head once."""
        config, itemsize = self._target.config, self._target.dtype.itemsize
        return self._network.weight_bytes + config.vocab_size * config.hidden_size * itemsize

    def start(self, token_ids: list[int]) -> DraftState | None:
        """The ids of a copying head; else nothing."""
        return TokenHistory(token_ids) if self.config.head == "copy" else None

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        """The best block by the drafter's own probabilities; nothing where there are no taps.

        There are none in the round after a rewind to within a turn; its forward brings them.
        """
        count = min(budget, self.config.block_size)
        if hidden is None or count < 1:
            return _NOTHING
        anchor = self._target.embed(torch.tensor([pending], device=self._target.device))
        states = self._network.block_states(hidden.states, anchor, position)[:count]
        base = self._target.project(states)
        if self._native is not None:
            history = TokenHistory([pending]) if state is None else _own(state)
            drafted = self._native.draft(base, states, history, self._min_chance)
            return DraftBlock(*drafted, self.name)
        cursor = None if state is None else _own(state).cursor(self.config.block_size)
        token_ids, confidence = self.head.draft(base, states, pending, self._min_chance, cursor)
        return DraftBlock(token_ids, confidence, self.name)

    def commit(self, state: DraftState | None, token_ids: list[int]) -> None:
        """Append ids where they are read."""
        if state is not None:
            _own(state).append(token_ids)

    def truncate_to(self, state: DraftState | None, length: int) -> None:
        """Forget ids from `length` on."""
        if state is not None:
            _own(state).truncate_to(length)

    def fork(self, state: DraftState | None) -> DraftState | None:
        """An independent copy."""
        return None if state is None else _own(state).fork()


def _own(state: DraftState) -> TokenHistory:
    assert isinstance(state, TokenHistory), "the state of another drafter"
    return state


def load_dlite(
    folder: Path,
    target: TargetModel,
    fingerprint: str,
    *,
    shortlist: int | None = DEFAULT_SHORTLIST,
    min_chance: float = 0.0,
    kernels: RowKernels | None = None,
) -> DLiteDrafter:
    """Load a drafter from its folder.

    Args:
        folder: With `config.json` and `model.safetensors`.
        target: What it is to draft for.
        fingerprint: Of the target's checkpoint, as it is stored (`models.weights.fingerprint`).
        shortlist: As in `BlockHead`.
        min_chance: As in `DLiteDrafter`.
        kernels: As in `DLiteNetwork`.

    Raises:
        DrafterMismatchError: It was trained for another target.
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: A file is damaged.
    """
    config, tensors = read_dlite(folder)
    check_dlite_fits(config, target.config, fingerprint)
    if config.vocab_size <= _SMALL_VOCABULARY:
        shortlist = None
    return DLiteDrafter(
        config, tensors, target, shortlist=shortlist, min_chance=min_chance, kernels=kernels
    )


def check_dlite_fits(config: DLiteConfig, target: TargetConfig, fingerprint: str) -> None:
    """See that a drafter was made for a target.

    Args:
        config: The drafter's.
        target: Shape of the target.
        fingerprint: Of the target's checkpoint, as it is stored.

    Raises:
        DrafterMismatchError: It was trained for another one; the message says in what they differ.
    """
    _check_shape(config, target)
    if config.target_fingerprint not in ("", fingerprint):
        raise DrafterMismatchError(
            f"the drafter was trained for the checkpoint {config.target_fingerprint!r}, and this "
            f"one is {fingerprint!r}: of the same shape, with other weights; train one for it "
            "(dlite-agent train), or use drafter='auto'"
        )


def _check_shape(config: DLiteConfig, target: TargetConfig) -> None:
    """See that a drafter reads and writes in the target's dimensions.

    Raises:
        DrafterMismatchError: It does not; the message names the first that differs.
    """
    for name, drafts_for, has in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_layers", config.num_target_layers, target.num_layers),
    ):
        if drafts_for != has:
            raise DrafterMismatchError(
                f"the drafter was trained for a target with {name}={drafts_for}, and this one "
                f"({target.architecture}) has {has}; name a drafter for this target, or use "
                "drafter='auto'"
            )


def _make_head(
    config: DLiteConfig,
    tensors: Mapping[str, Tensor],
    target: TargetModel,
    shortlist: int | None,
    kernels: RowKernels | None,
) -> tuple[BlockHead, NativeHead | None]:
    if config.head == "none":
        return BlockHead(None, None, shortlist=shortlist), None

    def load(name: str) -> Tensor:
        return tensors[f"head.{name}"].to(target.device, torch.float32)

    # W·U by the target's own packed head: r rows of E through it, [r, V]
    factor = target.project(load("out_proj.weight").t().to(target.dtype).contiguous()).t()
    token_row = token_rows(load("token_proj.weight"), target.embed, config.vocab_size)
    gate = None
    if config.head == "copy":
        gate = CopyGate(
            token_rows(load("copy_proj.weight"), target.embed, config.vocab_size),
            load("copy_length.weight").cpu().numpy(),
            load("copy_gain.weight")[0].cpu().numpy(),
            load("copy_bias").tolist(),
        )
    cell = (
        TokenCell(token_row)
        if config.head == "token"
        else RecurrentCell(
            token_row, load("hidden_proj.weight"), load("state_proj.weight"), load("bias"), gate
        )
    )
    kept = factor.contiguous() if target.dtype == torch.float64 else factor.to(target.dtype)
    is_native = config.head != "token" and NativeHead.fits(config.vocab_size, config.rank)
    native = None
    if kernels is not None and shortlist is None and is_native and target.dtype == torch.float32:
        embedding = target.embed(torch.arange(config.vocab_size))
        is_copying = config.head == "copy"
        native = NativeHead(kernels, load, factor, embedding, is_copying=is_copying)
    return BlockHead(kept.contiguous(), cell, shortlist=shortlist), native
