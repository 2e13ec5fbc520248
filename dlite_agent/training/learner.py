"""What is trained: a network over named tensors that gives logits for every slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.records import RecordBatch
from dlite_agent.training.simulate import choose_blocks
from dlite_agent.training.student import Student, StudentInput, new_weights

__all__ = ["DLiteLearner", "HistoryRows", "Learner", "Part", "trained_copy"]


class HistoryRows(NamedTuple):
    """A window's rows, for those who read them.

    Attributes:
        taps: [S, T, E].
        rows: [N] int64: the row of each record's own taps.
    """

    taps: Tensor
    rows: Tensor


class Part(NamedTuple):
    """Records that are computed together.

    Attributes:
        records: N of them.
        history: Of their window; None for records alone.
    """

    records: RecordBatch
    history: HistoryRows | None = None

    def to(self, device: torch.device) -> Part:
        """The same on a device."""
        if device.type == "cpu":
            return self
        moved = [getattr(self.records, name).to(device) for name in RecordBatch.__slots__]
        history = self.history and HistoryRows(*(item.to(device) for item in self.history))
        return Part(RecordBatch(*moved), history)


class Learner(Protocol):
    """A network that learns to draft blocks."""

    weights: dict[str, Tensor]
    """What is trained, float32."""
    ends: FrozenEnds
    """The target's, on the learner's device."""
    block_size: int

    def describe(self) -> Mapping[str, object]:
        """Its shape, as JSON."""
        ...

    def logits(self, part: Part, token_ids: Tensor | None = None) -> Tensor:
        """Of every slot, with the target's own tokens before it, [N, B, V].

        Of some tokens only, [N, B, R], where their ascending ids [R] are given.
        """
        ...

    def draft(self, part: Part) -> Tensor:
        """Greedy blocks, each slot behind what was drafted before it, [N, B] int64."""
        ...


class DLiteLearner:
    """DLite: reads the taps of one position.

    Args:
        config: Its shape.
        ends: Of the target.
        weights: Where to start from; what is not there is new.
        seed: Of new weights.
        device: Computes.
    """

    def __init__(
        self,
        config: DLiteConfig,
        ends: FrozenEnds,
        weights: Mapping[str, Tensor] | None = None,
        *,
        seed: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.block_size = config, config.block_size
        device = device or torch.device("cpu")
        self.ends = ends.to(device)
        new = new_weights(config, torch.Generator().manual_seed(seed), ends.gain)
        self.weights = trained_copy(new | dict(weights or {}), device)
        self.student = Student(config, self.weights, self.ends.embed)

    def describe(self) -> Mapping[str, object]:
        """Content of the drafter's `config.json`."""
        return self.config.to_json()

    def logits(self, part: Part, token_ids: Tensor | None = None) -> Tensor:
        """See `Learner.logits`."""
        return self.student.logits(StudentInput.of(part.records), self.ends, None, token_ids)

    @torch.no_grad()
    def draft(self, part: Part) -> Tensor:
        """See `Learner.draft`."""
        given = StudentInput.of(part.records)
        hidden = self.student.backbone(given)
        return choose_blocks(self.student, self.ends, hidden, given.anchor_ids, given.hints)


def trained_copy(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Leaves that gradients flow to, float32."""
    return {
        name: tensor.detach().to(device, torch.float32, copy=True).requires_grad_()
        for name, tensor in weights.items()
    }
