"""Stage 1: a teacher of DLite's shape that reads the history too.

From the paper: an intermediate teacher of similar structure that may read the history. Ours: its
history is one feature a position, all taps side by side through one matrix, whose keys and values
every layer makes with the matrices that it has. So a teacher is a student and three tensors more;
without those it is where stage 2 starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.training.block_layers import History, rms_norm
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import Part, trained_copy
from dlite_agent.training.simulate import choose_blocks
from dlite_agent.training.student import Student, StudentInput, new_weights

__all__ = ["TeacherLearner", "without_history"]

_PREFIX = "history_"


class TeacherLearner:
    """A student that also sees the rows before its own.

    Args:
        config: Of the student that it will be.
        ends: Of the target.
        weights: Where to start from, a student's or a teacher's; what is not there is new.
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
        generator = torch.Generator().manual_seed(seed)
        start = dict(new_weights(config, generator, ends.gain)) | _history_weights(
            config, generator
        )
        self.weights = trained_copy(start | dict(weights or {}), device)
        self.student = Student(config, self.weights, self.ends.embed)

    def describe(self) -> Mapping[str, object]:
        """The student's shape."""
        return self.config.to_json() | {"reads_history": True}

    def logits(self, part: Part, token_ids: Tensor | None = None) -> Tensor:
        """See `Learner.logits`; the part has a history."""
        given = StudentInput.of(part.records)
        return self.student.logits(given, self.ends, self._history(part), token_ids)

    @torch.no_grad()
    def draft(self, part: Part) -> Tensor:
        """See `Learner.draft`."""
        given = StudentInput.of(part.records)
        hidden = self.student.backbone(given, self._history(part))
        return choose_blocks(self.student, self.ends, hidden, given.anchor_ids, given.hints)

    def _history(self, part: Part) -> History:
        assert part.history is not None, "a teacher learns from windows"
        taps, rows = part.history
        features = self._features(taps)
        # the record's own row is its context; what is before it is the history
        return History(features, rows, ends=rows, starts=torch.zeros_like(rows))

    def _features(self, taps: Tensor) -> Tensor:
        """[S, T, E] to [S, E]."""
        eps = self.config.rms_norm_eps
        normed = rms_norm(taps.float(), self.weights["history_taps_norm.weight"], eps)
        fused = functional.linear(normed.flatten(1), self.weights["history_proj.weight"])
        return rms_norm(fused, self.weights["history_norm.weight"], eps)


def without_history(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A teacher's weights as a student's."""
    return {name: value for name, value in weights.items() if not name.startswith(_PREFIX)}


def _history_weights(config: DLiteConfig, generator: torch.Generator) -> dict[str, Tensor]:
    width = len(config.taps) * config.hidden_size
    matrix = torch.randn(config.hidden_size, width, generator=generator) * width**-0.5
    return {
        f"{_PREFIX}taps_norm.weight": torch.ones(len(config.taps), config.hidden_size),
        f"{_PREFIX}proj.weight": matrix,
        f"{_PREFIX}norm.weight": torch.ones(config.hidden_size),
    }
