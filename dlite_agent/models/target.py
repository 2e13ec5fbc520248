"""What the decode loop needs of a target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlite_agent.models.kv_pool import KVCache
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["ForwardRows", "TargetConfig", "TargetHidden", "TargetModel", "TargetOutput"]


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Shape of a dense decoder: Qwen3, or what differs from it in these fields only.

    Attributes:
        architecture: The checkpoint's own name, e.g. `Qwen3ForCausalLM`.
        vocab_size: V, rows of the vocabulary projection.
        hidden_size: E.
        num_layers: L.
        num_heads: H query heads.
        num_kv_heads: K key and value heads; H is a multiple.
        head_dim: D.
        intermediate_size: Width of the SwiGLU.
        rms_norm_eps: Epsilon of every RMSNorm.
        rope_theta: Base of the rotary embedding.
        max_position_embeddings: Most positions that the checkpoint was made for, or is stretched
            to.
        tie_word_embeddings: The head is the embedding.
        eos_token_ids: Ids that end a turn (from generation_config.json, else config.json).
        rope_scaling: How rotary positions are stretched; of yarn and llama3 the original length is
            filled in.
        has_qk_norm: Queries and keys are normalised per head (Qwen3).
        has_qkv_bias: The query, key and value projections have a bias (Qwen2).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    has_qk_norm: bool = True
    has_qkv_bias: bool = False

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token, all layers, at `itemsize` bytes an element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class TargetHidden:
    """Captured hidden states.

    Attributes:
        states: [T, Q, E], the **raw residual stream after decoder layer** `layer_ids[t]`, before
            any final norm. (The last entry of transformers' `hidden_states` is after the norm; this
            is not.)
        layer_ids: T ascending layer numbers, from 0.
    """

    states: Tensor
    layer_ids: tuple[int, ...]

    def row(self, index: int) -> TargetHidden:
        """The taps of one input row, [T, 1, E]; a view."""
        return TargetHidden(self.states[:, index : index + 1], self.layer_ids)


class TargetOutput(NamedTuple):
    """Logits [R, V] of the rows that were asked for, and taps of all Q rows.

    Logits are float32, or float64 for a float64 model.
    """

    logits: Tensor
    hidden: TargetHidden | None


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """What one session wants of the next forward.

    Attributes:
        token_ids: [Q] int64, at positions `kv.length .. kv.length + Q - 1`.
        kv: The cache to attend to and to write to.
        logits_for: R row numbers in [0, Q) whose logits are wanted; may be empty.
        taps: Layers whose residual stream is captured.
    """

    token_ids: Tensor
    kv: KVCache
    logits_for: Sequence[int]
    taps: tuple[int, ...] = ()


class TargetModel(Protocol):
    """A target. Owns its weights and its KV pool; used by one thread at a time."""

    config: TargetConfig
    device: torch.device
    dtype: torch.dtype
    fingerprint: str
    """Of the weights and of the options that change what is computed with them; empty: unknown."""
    rows_computed: int
    """Every row that `forward` computed since it was loaded."""

    @property
    def uses_kernels(self) -> bool:
        """Whether the layers run through compiled kernels."""
        ...

    def new_cache(self) -> KVCache:
        """An empty cache of this model's pool."""
        ...

    def forward(
        self, token_ids: Tensor, kv: KVCache, *, logits_for: Sequence[int], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Compute Q rows at positions `kv.length .. kv.length + Q - 1`: a batch of one.

        Writes Q **tentative** KV rows behind `kv.length`, which does not move: `kv.commit(n)` keeps
        the first n, anything that appends or truncates drops the rest.

        Args:
            token_ids: [Q] int64.
            kv: The cache to attend to and to write to.
            logits_for: R row numbers in [0, Q); may be empty (prefill chunks), then logits is
                [0, V].
            taps: Layers whose residual stream is captured.

        Raises:
            CapacityError: The pool has no room for Q rows; the cache is unchanged.
        """
        ...

    def forward_batch(self, batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        """Compute the rows of several sessions; weights are read once for all of them.

        Each session's cache gets its own tentative rows, as by `forward`, and each output is that
        of the session alone: exactly so up to the rounding of products over another number of rows.
        `kv.reserve(Q)` may be called before, so that a full pool is met by the session that meets
        it.

        Args:
            batch: At least one; all caches are distinct.

        Returns:
            One output for each, in order.

        Raises:
            CapacityError: The pool has no room for all rows; nothing was written, and no cache of
                the batch has tentative rows.
        """
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings of ids [n] int64: [n, E], in the model's type."""
        ...

    def final_states(self, residual: Tensor) -> Tensor:
        """The final norm of the residual stream after the last layer, [n, E] to [n, E].

        A tap of the last layer becomes what the vocabulary projection reads.
        """
        ...

    def project(self, states: Tensor) -> Tensor:
        """The vocabulary projection of states [n, E] that are normed: logits [n, V].

        The head's own weight, as it is packed for the device; float32, or float64 for a float64
        model.
        """
        ...
