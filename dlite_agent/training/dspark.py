"""DSpark as a baseline: trained on the same windows, with the same loss, as DLite.

The network is the one that serves (`models.block_network`), over tensors that learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.block_config import BlockConfig, block_shapes
from dlite_agent.models.block_network import BlockNetwork, LearningLinear
from dlite_agent.models.block_sequential import head_states
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import Part, trained_copy

__all__ = ["DSparkLearner", "new_dspark_weights"]


class DSparkLearner:
    """DSpark with a vanilla Markov head.

    Args:
        config: Its shape; its taps are among the captured ones.
        taps: The captured layers.
        ends: Of the target.
        window: How many positions before the anchor it sees; 0: all of the window's.
        seed: Of new weights.
        device: Computes.
    """

    def __init__(
        self,
        config: BlockConfig,
        taps: tuple[int, ...],
        ends: FrozenEnds,
        *,
        window: int = 0,
        seed: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.block_size, self.window = config, config.num_drafts, window
        self._device = device or torch.device("cpu")
        self._columns = torch.tensor([taps.index(tap) for tap in config.taps])
        self.ends = ends.to(self._device)
        generator = torch.Generator().manual_seed(seed)
        new = new_dspark_weights(config, generator, ends.gain)
        self.weights = trained_copy(new, self._device)

    def describe(self) -> Mapping[str, object]:
        """Its shape, and how far it looks back."""
        return asdict(self.config) | {"window": self.window}

    def logits(self, part: Part, token_ids: Tensor | None = None) -> Tensor:
        """See `Learner.logits`; the part has a history."""
        hidden = self._states(part)
        g = head_states(self.config, self.weights.__getitem__, part.records.previous_ids, hidden)
        factor = self.weights["markov_head.markov_w2.weight"]
        if token_ids is not None:
            factor = factor[token_ids]
        return self.ends.logits(hidden, token_ids) + functional.linear(g, factor)

    @torch.no_grad()
    def draft(self, part: Part) -> Tensor:
        """See `Learner.draft`."""
        base = self.ends.logits(self._states(part))
        before, after = (self.weights[f"markov_head.markov_w{side}.weight"] for side in (1, 2))
        previous_ids = part.records.anchor_ids
        chosen: list[Tensor] = []
        for slot in range(self.block_size):
            g = functional.embedding(previous_ids, before)
            previous_ids = (base[:, slot] + functional.linear(g, after)).argmax(dim=-1)
            chosen.append(previous_ids)
        return torch.stack(chosen, dim=1)

    def _states(self, part: Part) -> Tensor:
        assert part.history is not None, "DSpark learns from windows"
        network = BlockNetwork(
            self.config,
            self.weights.__getitem__,
            dtype=torch.float32,
            device=self._device,
            linear=LearningLinear,
        )
        taps, rows = part.history
        history = network.history(taps[:, self._columns].float().transpose(0, 1), 0)
        ids = part.records.anchor_ids.unsqueeze(1).repeat(1, self.config.block_size)
        ids[:, 1:] = self.config.mask_token_id
        # the anchor stands behind the row whose logits gave it, and sees that row
        return network.states(self.ends.embed(ids), rows + 1, history, self.window)


def new_dspark_weights(
    config: BlockConfig, generator: torch.Generator, final_norm: Tensor
) -> dict[str, Tensor]:
    """Initial weights, float32; the head's correction is zero.

    The layers' outputs are not: then a slot would be the mask's embedding alone, which a tied head
    takes for that very token (on nano the first loss is 71, and 15 this way; DLite's is 16).

    Args:
        config: Shape.
        generator: Source of all randomness.
        final_norm: Gain of the target's final norm, [E].
    """
    weights: dict[str, Tensor] = {}
    for name, shape in block_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
        elif name.endswith("markov_w2.weight"):
            weights[name] = torch.zeros(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    weights["norm.weight"] = final_norm.detach().to(torch.float32).cpu().clone()
    return weights
