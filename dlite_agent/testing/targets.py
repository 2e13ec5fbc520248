"""Tiny seeded targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlite_agent.config import DType
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import ForwardRows, TargetConfig, TargetModel, TargetOutput
from dlite_agent.models.transformer import DenseTransformer

__all__ = ["FaultyTarget", "tiny_config", "tiny_qwen3"]


def tiny_config(
    *, vocab_size: int = 512, num_layers: int = 2, tie_word_embeddings: bool = False
) -> TargetConfig:
    """The shape of `tiny_qwen3`: E = 64, 4 heads of 16, 2 kv heads, no end-of-turn ids."""
    return TargetConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab_size,
        hidden_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=65_536,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_ids=(),
    )


def tiny_qwen3(
    *,
    dtype: DType = "float32",
    seed: int = 0,
    vocab_size: int = 512,
    num_layers: int = 2,
    max_kv_bytes: int = 64 * 2**20,
    config: TargetConfig | None = None,
) -> DenseTransformer:
    """A random Qwen3 target on the CPU, the same for the same seed.

    Args:
        dtype: Type of weights and KV; `"auto"` is float32.
        seed: Of the weights.
        vocab_size: V.
        num_layers: L.
        max_kv_bytes: Budget of its KV pool.
        config: A shape of your own instead of `tiny_config`.
    """
    config = config or tiny_config(vocab_size=vocab_size, num_layers=num_layers)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_norm = len(shape) == 1
        weights[name] = (
            1.0 + 0.1 * noise
            if is_norm
            else noise * (0.5 if "embed" in name else shape[-1] ** -0.5)
        )
    kind = getattr(torch, "float32" if dtype == "auto" else dtype)
    target = DenseTransformer(
        config,
        weights.__getitem__,
        dtype=kind,
        device=torch.device("cpu"),
        max_kv_bytes=max_kv_bytes,
    )
    target.fingerprint = f"tiny-{seed}"
    return target


class FaultyTarget:
    """A target whose forwards fail when they are told to, after they have written their KV rows.

    Args:
        target: Computes.
        fails: Asked at every forward, with its number from 0.
    """

    def __init__(self, target: TargetModel, fails: Callable[[int], bool]) -> None:
        self.config = target.config
        self.device = target.device
        self.dtype = target.dtype
        self.fingerprint = target.fingerprint
        self.uses_kernels = target.uses_kernels
        self.num_forwards = 0
        self._target = target
        self._fails = fails

    @property
    def rows_computed(self) -> int:
        """Rows of all forwards, failed ones included."""
        return self._target.rows_computed

    def new_cache(self) -> KVCache:
        """An empty cache of the target's pool."""
        return self._target.new_cache()

    def forward(
        self, token_ids: Tensor, kv: KVCache, *, logits_for: Sequence[int], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Compute as the target does; see `forward_batch`."""
        return self.forward_batch([ForwardRows(token_ids, kv, logits_for, tuple(taps))])[0]

    def forward_batch(self, batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        """Compute as the target does.

        Raises:
            RuntimeError: This forward was to fail.
        """
        outputs = self._target.forward_batch(batch)
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        if self._fails(number):
            raise RuntimeError(f"forward {number} was told to fail")
        return outputs

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's."""
        return self._target.embed(token_ids)

    def final_states(self, residual: Tensor) -> Tensor:
        """The target's."""
        return self._target.final_states(residual)

    def project(self, states: Tensor) -> Tensor:
        """The target's."""
        return self._target.project(states)
