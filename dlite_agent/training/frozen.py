"""What training reads of a target: its embedding, its head and its final norm, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.target import TargetModel

__all__ = ["FrozenEnds", "rows_among"]


@dataclass(frozen=True, slots=True)
class FrozenEnds:
    """Both ends of a target, copied, in float32; nothing of them is trained.

    Attributes:
        embedding: [V, E].
        head: [V, E]; the same tensor as the embedding where they are tied.
        gain: Of the final norm, [E].
        eps: Of the final norm.
    """

    embedding: Tensor
    head: Tensor
    gain: Tensor
    eps: float

    @classmethod
    def of(cls, target: TargetModel) -> FrozenEnds:
        """Read them through the target's own products: whatever its weights are packed as.

        A head is its product with the unit vectors; the gain of a norm is what it makes of a vector
        of equal elements.
        """
        config = target.config
        ids = torch.arange(config.vocab_size, device=target.device)
        embedding = target.embed(ids).to("cpu", torch.float32)
        units = torch.eye(config.hidden_size, dtype=target.dtype, device=target.device)
        head = target.project(units).t().contiguous().to("cpu", torch.float32)
        # of a large vector ε vanishes, and a direction of equal elements is all ones
        equal = torch.full((1, config.hidden_size), 1e3, dtype=target.dtype, device=target.device)
        gain = target.final_states(equal)[0].to("cpu", torch.float32)
        is_tied = config.tie_word_embeddings
        return cls(embedding, embedding if is_tied else head, gain, config.rms_norm_eps)

    def to(self, device: torch.device) -> FrozenEnds:
        """The same on a device."""
        if device == self.embedding.device:
            return self
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        return FrozenEnds(embedding, head, self.gain.to(device), self.eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of ids of any shape, [..., E]."""
        return functional.embedding(token_ids, self.embedding)

    def target_states(self, final_taps: Tensor) -> Tensor:
        """The final norm of residual streams [..., E], float32."""
        x = final_taps.float()
        scale = x.square().mean(dim=-1, keepdim=True).add(self.eps).rsqrt()
        return x * scale * self.gain

    def logits(self, states: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """The vocabulary projection of normed states, [..., V], or to some tokens, [..., R]."""
        head = self.head if token_ids is None else self.head[token_ids]
        return functional.linear(states, head.to(states.dtype))


def rows_among(token_ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where tokens of any shape stand among ascending ids [R], and whether they do (else any)."""
    rows = torch.searchsorted(token_ids, wanted.contiguous()).clamp_max(len(token_ids) - 1)
    return rows, token_ids[rows] == wanted
