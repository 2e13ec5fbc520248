"""How a drafter is trained: the options of a run, which both stages have."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from dlite_agent.errors import ConfigurationError

__all__ = ["AlignOptions"]

_NOT_OF_THE_RUN = ("save_every_s", "log_every_s", "device", "part_size")


@dataclass(frozen=True, slots=True)
class AlignOptions:
    """How a student is trained.

    Attributes:
        steps: Optimizer steps in all.
        batch_size: Records of a step.
        part_size: Most records that are computed at once; the gradients of a step's parts add up.
        learning_rate: Peak.
        warmup: Share of the steps over which the rate rises.
        final_rate: Share of the peak where the cosine ends.
        weight_decay: AdamW's.
        clip: Largest norm of the gradient.
        cross_entropy: α of the loss.
        slot_decay: γ of the slot weights exp(-k / γ).
        emphasis: How often an epoch has a record that follows a tool result or lies in a call.
        max_vocab: Logits are computed of so many tokens only, those that the answers use most; the
            others are not learned. 0: of all.
        autocast: Products in bfloat16.
        device: `cpu`, or `auto`: what `accelerate` finds, with all processes that it started.
        seed: Of weights and batches.
        save_every_s: Seconds between two states.
        log_every_s: Seconds between two lines.
    """

    steps: int = 3000
    batch_size: int = 512
    part_size: int = 512
    learning_rate: float = 1.5e-3
    warmup: float = 0.04
    final_rate: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    cross_entropy: float = 0.1
    slot_decay: float = 4.0
    emphasis: int = 2
    max_vocab: int = 0
    autocast: bool = True
    device: Literal["auto", "cpu"] = "auto"
    seed: int = 1
    save_every_s: float = 120.0
    log_every_s: float = 20.0

    def __post_init__(self) -> None:
        above = "steps batch_size part_size learning_rate clip slot_decay emphasis"
        for name in above.split():
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use more than 0")
        for name in ("warmup", "final_rate", "weight_decay", "cross_entropy", "max_vocab"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 0")
        if self.device not in ("auto", "cpu"):
            raise ConfigurationError(f"device is {self.device!r}; use 'auto' or 'cpu'")

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear rise, then a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        share = min(1.0, (step - rise) / max(1, self.steps - rise))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * cosine)

    def run_key(self) -> dict[str, object]:
        """What a saved state belongs to: all but how often it is saved and told, and where."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_OF_THE_RUN}
