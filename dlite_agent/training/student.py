"""DLite while it learns: the computation of `models.dlite_network`, batched, with gradients.

Tensors carry the checkpoint's names. `tests/training` holds this forward equal to the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.dlite_config import COPY_LENGTHS, DLiteConfig, dlite_shapes
from dlite_agent.models.dlite_network import position_waves
from dlite_agent.training.block_layers import BlockLayers, BlockShape, History, rms_norm
from dlite_agent.training.frozen import FrozenEnds, rows_among
from dlite_agent.training.records import RecordBatch

__all__ = ["Student", "StudentInput", "new_weights"]

Embed = Callable[[Tensor], Tensor]


class StudentInput(NamedTuple):
    """N records.

    Attributes:
        taps: [N, T, P, E], raw residual streams, the newest position last.
        anchor_ids: [N] int64.
        previous_ids: [N, B] int64: the token before each slot; the first is the anchor.
        positions: [N] int64, of the anchors.
        hints: [N, B, 2] int64, as of `RecordBatch`; read by a copying head.
    """

    taps: Tensor
    anchor_ids: Tensor
    previous_ids: Tensor
    positions: Tensor
    hints: Tensor | None = None

    @classmethod
    def of(cls, batch: RecordBatch) -> StudentInput:
        """What a student reads of a batch, float32."""
        return cls(
            batch.taps.float(),
            batch.anchor_ids,
            batch.previous_ids,
            batch.positions,
            batch.hints,
        )


def new_weights(
    config: DLiteConfig, generator: torch.Generator, final_norm: Tensor | None = None
) -> dict[str, Tensor]:
    """Initial weights, float32.

    Outputs of layers and of the head start at zero, so that at first the final norm sees the
    embedding and nothing else.

    Args:
        config: Shape.
        generator: Source of all randomness.
        final_norm: Gain of the target's final norm, [E]: the scale that its head expects.
    """
    weights: dict[str, Tensor] = {}
    for name, shape in dlite_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith(_ZERO):
            weights[name] = torch.zeros(shape)
        elif name == "head.copy_bias":  # a longer match is worth more
            weights[name] = 0.5 * torch.arange(COPY_LENGTHS)
        else:
            std = 0.5 if name.endswith("embedding.weight") else shape[-1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * std
    if final_norm is not None:
        weights["norm.weight"] = final_norm.detach().to(torch.float32).clone()
    return weights


_ZERO = ("o_proj.weight", "down_proj.weight", "head.bias", "out_proj.weight", "copy_gain.weight")


class Student:
    """The network over named tensors.

    Args:
        config: Its shape.
        weights: All of `dlite_shapes`; used in place.
        embed: The target's embedding, frozen; ids of any shape to [..., E].
    """

    def __init__(self, config: DLiteConfig, weights: Mapping[str, Tensor], embed: Embed) -> None:
        self.config = config
        self.weights = weights
        self._embed = embed
        names = (field.name for field in fields(BlockShape))
        shape = BlockShape(**{name: getattr(config, name) for name in names})
        self._layers = BlockLayers(shape, weights)

    def logits(
        self,
        given: StudentInput,
        ends: FrozenEnds,
        history: History | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of all slots, [N, B, V], or of some ascending tokens [R] only, [N, B, R]."""
        hidden = self.backbone(given, history)
        if self.config.head == "none":
            return ends.logits(hidden, token_ids)
        known = self.head_states(hidden, given)
        logits = ends.logits(hidden + self.correction(known), token_ids)
        hints = given.hints
        if hints is not None and token_ids is not None:
            rows, is_there = rows_among(token_ids, hints[..., 0])
            hints = torch.stack([rows, hints[..., 1] * is_there], dim=-1)
        return self.add_copies(logits, known, hints)

    def backbone(self, given: StudentInput, history: History | None = None) -> Tensor:
        """Slots' states before the head, [N, B, E]; only a teacher has a history."""
        context = self._context(given)
        anchors = self._embed(given.anchor_ids).unsqueeze(1)  # [N, 1, E]
        slots = self.weights["slot_embedding.weight"]
        x = torch.cat(
            [slots[:1] + anchors, slots[1:].expand(anchors.shape[0], -1, -1)], dim=1
        )  # [N, B, E]
        return self._norm(self._layers.run(x, context, history), "norm.weight")

    def states(self, given: StudentInput) -> Tensor:
        """Slots' states after the head's correction, [N, B, E], without what is copied."""
        hidden = self.backbone(given)
        if self.config.head == "none":
            return hidden
        return hidden + self.correction(self.head_states(hidden, given))

    def correction(self, known: Tensor) -> Tensor:
        """U·g of slots, [..., E], from g [..., r]."""
        return functional.linear(known, self.weights["head.out_proj.weight"])

    def head_states(self, hidden: Tensor, given: StudentInput) -> Tensor:
        """States g of all slots with the given tokens before them, [N, B, r]."""
        of_token = self.token_part(given.previous_ids)  # [N, B, 2r or r]
        if self.config.head == "token":
            return of_token
        if self.config.head == "copy":
            of_token = of_token + self.copy_part(given.hints)
        of_hidden = self.hidden_part(hidden)
        states: list[Tensor] = []
        for slot in range(hidden.shape[1]):
            previous = states[-1] if states else None
            states.append(self.step(of_hidden[:, slot], of_token[:, slot], previous))
        return torch.stack(states, dim=1)

    def token_part(self, token_ids: Tensor) -> Tensor:
        """What tokens [...] bring to the cell, [..., 2r]; to a token head g itself, [..., r]."""
        return functional.linear(self._embed(token_ids), self.weights["head.token_proj.weight"])

    def copy_part(self, hints: Tensor | None) -> Tensor:
        """What hints [..., 2] bring to the cell, [..., 2r]."""
        assert hints is not None, "a copying head reads hints"
        copy_ids, lengths = hints.unbind(-1)
        of_length = functional.embedding(lengths, self.weights["head.copy_length.weight"])
        of_token = functional.linear(self._embed(copy_ids), self.weights["head.copy_proj.weight"])
        return of_length + of_token * (lengths > 0).unsqueeze(-1)

    def add_copies(self, logits: Tensor, known: Tensor, hints: Tensor | None) -> Tensor:
        """Logits [..., V] with what the copying head adds to the hints' tokens.

        Args:
            logits: Of the corrected states.
            known: g, [..., r].
            hints: [..., 2].
        """
        if self.config.head != "copy":
            return logits
        assert hints is not None, "a copying head reads hints"
        copy_ids, lengths = hints.unbind(-1)
        bias = self.weights["head.copy_bias"][lengths]
        gain = functional.linear(known.float(), self.weights["head.copy_gain.weight"]).squeeze(-1)
        bonus = (functional.softplus(gain + bias) * (lengths > 0)).to(logits.dtype)
        return logits.scatter_add(-1, copy_ids.unsqueeze(-1), bonus.unsqueeze(-1))

    def hidden_part(self, hidden: Tensor) -> Tensor:
        """What slots' states [..., E] bring to the head's cell, [..., 2r]."""
        bias = self.weights["head.bias"]
        return functional.linear(hidden, self.weights["head.hidden_proj.weight"], bias)

    def step(self, of_hidden: Tensor, of_token: Tensor, previous: Tensor | None) -> Tensor:
        """One gated step, [N, r]; see `drafters.block_head.RecurrentCell`."""
        if self.config.head == "token":
            return of_token
        total = of_hidden + of_token
        if previous is not None:
            total = total + functional.linear(previous, self.weights["head.state_proj.weight"])
        gate, candidate = total.float().chunk(2, dim=-1)
        keep, candidate = gate.sigmoid(), candidate.tanh()
        if previous is None:
            return candidate - keep * candidate
        return candidate + keep * (previous - candidate)

    def _context(self, given: StudentInput) -> Tensor:
        """Context tokens, [N, n, E]."""
        config = self.config
        taps = given.taps.transpose(1, 2).flip(1)  # [N, P, T, E], newest first
        normed = self._norm(taps, "context_norm.weight")
        if config.composition == "feature":
            normed = normed.flatten(2).unsqueeze(2)
        context = functional.linear(normed, self.weights["context_proj.weight"]).flatten(1, 2)
        context = context + self.weights["context_embedding.weight"][: context.shape[1]]
        if config.position_feature == "none":
            return context
        matrix = self.weights["position_proj.weight"]
        waves = position_waves(given.positions).to(matrix.dtype)
        token = functional.linear(waves, matrix).unsqueeze(1)
        return torch.cat([context, token + self.weights["position_embedding.weight"]], dim=1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps)
