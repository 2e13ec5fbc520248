"""EAGLE-3: one decoder layer over pairs of a token and the target's feature of the one before it.

Pair i is the feature of position i with the token at i + 1, at rotary position i. A draft is a
chain:
the layer's output, before its final norm, is the feature of the next pair. Source: Li et al. 2025
(arXiv:2503.01840); the variants are those of the public checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.errors import ConfigurationError
from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate
from dlite_agent.models.layer_weights import ReadWeight
from dlite_agent.models.linear import make_linear
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["Eagle3Config", "Eagle3Network", "PairHistory", "eagle3_shapes"]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of a drafter.

    Attributes:
        vocab_size: V of the target.
        hidden_size: E of the target and of the drafter.
        taps: Layers of the target whose raw output is read, in the order of `fc`'s columns.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        intermediate_size: Width of the SwiGLU.
        rms_norm_eps: Epsilon of every norm.
        rope_theta: Base of the rotary embedding, the draft's own.
        rope_scaling: How it is stretched, the draft's own.
        has_qk_norm: Queries and keys are normalised per head.
        is_residual_normed: The residual is the normed feature (`norm_before_residual`).
        is_input_normed: The taps are normed together before `fc` (`norm_before_fc`).
        is_output_normed: The fed-back state is the normed one (`norm_output` of speculators).
        has_own_embedding: It does not use the target's.
        draft_vocab_size: Rows of a head of its own; 0: the target's head.
        block_size: Most drafted tokens.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    has_qk_norm: bool = False
    is_residual_normed: bool = False
    is_input_normed: bool = False
    is_output_normed: bool = False
    has_own_embedding: bool = False
    draft_vocab_size: int = 0
    block_size: int = 7

    def __post_init__(self) -> None:
        if not self.taps or min(self.taps) < 0:
            raise ConfigurationError(f"taps is {self.taps!r}; use layers, the first of which is 0")
        if self.block_size < 1 or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigurationError(
                f"block_size={self.block_size!r}, num_heads={self.num_heads!r}, num_kv_heads="
                f"{self.num_kv_heads!r} and head_dim={self.head_dim!r} do not fit together; use "
                "query heads in whole groups and an even head_dim"
            )


def eagle3_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, with the layer as `layers.0`."""
    hidden, dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "norm.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (query, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (key, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (key, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, query),
        "layers.0.mlp.gate_proj.weight": (ffn, hidden),
        "layers.0.mlp.up_proj.weight": (ffn, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, ffn),
    }
    if config.has_qk_norm:
        shapes["layers.0.self_attn.q_norm.weight"] = (dim,)
        shapes["layers.0.self_attn.k_norm.weight"] = (dim,)
    if config.is_input_normed:
        shapes["input_norm.weight"] = (len(config.taps) * hidden,)
    if config.has_own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.draft_vocab_size:
        shapes["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return shapes


@dataclass(slots=True)
class PairHistory:
    """Keys and values [K, S, D] of the pairs before a draft, and of the draft's own, which grow."""

    keys: Tensor
    values: Tensor
    own_keys: Tensor | None = None
    own_values: Tensor | None = None


class Eagle3Network:
    """The layer with its weights.

    Args:
        config: Its shape.
        read: Gives a tensor by its name (`eagle3_shapes`).
        dtype: Of weights and activations.
        device: Where it is.
    """

    def __init__(
        self, config: Eagle3Config, read: ReadWeight, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._order = pair_order(config.head_dim)

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=self._wide)

        layer = "layers.0."
        self._input_norm = load("input_norm.weight") if config.is_input_normed else None
        self._fuse = make_linear(load("fc.weight").to(dtype))
        self._norm = load("norm.weight")
        self._norm_token = load(f"{layer}input_layernorm.weight")
        self._norm_feature = load(f"{layer}hidden_norm.weight")
        self._norm_ffn = load(f"{layer}post_attention_layernorm.weight")
        self._query = make_linear(self._turned(load(f"{layer}self_attn.q_proj.weight")).to(dtype))
        key = self._turned(load(f"{layer}self_attn.k_proj.weight"))
        value = load(f"{layer}self_attn.v_proj.weight")
        self._key_value = make_linear(torch.cat([key, value]).to(dtype))
        self._query_gain = self._key_gain = torch.ones((), dtype=self._wide, device=device)
        if config.has_qk_norm:
            self._query_gain = load(f"{layer}self_attn.q_norm.weight")[self._order]
            self._key_gain = load(f"{layer}self_attn.k_norm.weight")[self._order]
        self._out = make_linear(load(f"{layer}self_attn.o_proj.weight").to(dtype))
        gate_up = [load(f"{layer}mlp.gate_proj.weight"), load(f"{layer}mlp.up_proj.weight")]
        self._gate_up = make_linear(torch.cat(gate_up).to(dtype))
        self._down = make_linear(load(f"{layer}mlp.down_proj.weight").to(dtype))
        self._rotary = RotaryTable(
            config.head_dim,
            config.rope_theta,
            dtype=self._wide,
            device=device,
            scaling=config.rope_scaling,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a drafted token reads."""
        linears = (self._query, self._key_value, self._out, self._gate_up, self._down)
        return sum(linear.nbytes for linear in linears)

    def features(self, taps: Tensor) -> Tensor:
        """One feature a position: taps [T, S, E] in the order of `config.taps`, to [S, E]."""
        joined = taps.transpose(0, 1).reshape(taps.shape[1], -1)
        if self._input_norm is not None:
            joined = self._normed(joined, self._input_norm)
        return self._fuse(joined.to(self.dtype))

    def keys_values(
        self, features: Tensor, embeddings: Tensor, first_pair: int
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [K, S, D] of pairs [first_pair, first_pair + S).

        Args:
            features: [S, E].
            embeddings: [S, E], of the tokens behind them.
            first_pair: Number of the first.
        """
        return self._keys_values(self._both(features, embeddings), first_pair)

    def step(
        self, feature: Tensor, embedding: Tensor, pair: int, history: PairHistory
    ) -> tuple[Tensor, Tensor]:
        """One drafted token.

        Args:
            feature: [1, E], of the position before the token's, or what the last step fed back.
            embedding: [1, E], of the token.
            pair: Number of the pair.
            history: Of the pairs before; this one's keys and values are added to its own.

        Returns:
            The state [1, E] that the vocabulary projects, and the next step's feature.
        """
        config = self.config
        both = self._both(feature, embedding)
        keys, values = self._keys_values(both, pair)
        if history.own_keys is not None and history.own_values is not None:
            keys = torch.cat([history.own_keys, keys], dim=1)
            values = torch.cat([history.own_values, values], dim=1)
        history.own_keys, history.own_values = keys, values
        q = self._query(both).view(1, config.num_heads, config.head_dim)
        q = self._heads(q, self._query_gain, pair) * config.head_dim**-0.5
        q = q.to(self.dtype).view(config.num_kv_heads, -1, config.head_dim)  # [K, G, D]
        far = torch.bmm(q, history.keys.transpose(1, 2))
        near = torch.bmm(q, keys.transpose(1, 2))
        shares = torch.cat([far, near], dim=-1).softmax(dim=-1)
        far, near = shares.split_with_sizes([far.shape[-1], near.shape[-1]], dim=-1)
        mixed = torch.bmm(far, history.values) + torch.bmm(near, values)
        if config.is_residual_normed:
            feature = self._normed(feature, self._norm_feature).to(self.dtype)
        x = self._out.add_to(feature, mixed.view(1, -1))
        gate, up = self._gate_up(self._normed(x, self._norm_ffn).to(self.dtype)).chunk(2, dim=-1)
        x = self._down.add_to(x, functional.silu(gate) * up)
        state = self._normed(x, self._norm).to(self.dtype)
        return state, state if config.is_output_normed else x

    def _both(self, features: Tensor, embeddings: Tensor) -> Tensor:
        """The layer's input, [S, 2E]: the token first."""
        token = self._normed(embeddings, self._norm_token)
        return torch.cat([token, self._normed(features, self._norm_feature)], -1).to(self.dtype)

    def _keys_values(self, both: Tensor, first_pair: int) -> tuple[Tensor, Tensor]:
        config = self.config
        heads = self._key_value(both).view(both.shape[0], 2, config.num_kv_heads, config.head_dim)
        keys, values = heads.unbind(1)
        keys = self._heads(keys, self._key_gain, first_pair).to(self.dtype)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _heads(self, x: Tensor, gain: Tensor, first_pair: int) -> Tensor:
        """Norm, where there is one, and rotate [S, N, D]."""
        x = self._normed(x, gain) if self.config.has_qk_norm else x.to(self._wide)
        return rotate(x.contiguous(), self._rotary.rows(first_pair, x.shape[0]))

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32 or wider."""
        x = x.to(self._wide)
        scale = x.square().mean(dim=-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
        return x * scale * gain

    def _turned(self, weight: Tensor) -> Tensor:
        """Rows of heads in the order that `rotate` wants."""
        heads = weight.view(-1, self.config.head_dim, weight.shape[1])
        return heads[:, self._order].flatten(0, 1)
