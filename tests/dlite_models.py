"""Random DLite drafters of tiny targets."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.target import TargetConfig


def dlite_config(target: TargetConfig, **choices: object) -> DLiteConfig:
    settings = {"num_taps": target.num_layers, "rank": 8} | choices
    num_taps = cast(int, settings.pop("num_taps"))
    return DLiteConfig.for_target(target, "", num_taps=num_taps, **settings)


def random_weights(config: DLiteConfig, seed: int = 0) -> dict[str, Tensor]:
    """Everything matters: no zero, no gain of one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in dlite_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = name.endswith("norm.weight")
        weights[name] = 1.0 + 0.2 * noise if is_gain else noise * shape[-1] ** -0.5
    return weights
