"""The forward of a dense Qwen3 decoder: few, fused operators over one session's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.attention import AttentionPlan, attend, plan_attention
from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import RotaryTable, rotate
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.layer_weights import LayerWeights, ReadWeight, load_layer
from dlite_agent.models.linear import make_linear
from dlite_agent.models.target import TargetConfig, TargetHidden, TargetOutput

__all__ = ["DenseTransformer"]


class _Pass(NamedTuple):
    """What all layers of one forward share."""

    kv: KVCache
    rotation: Tensor
    plan: AttentionPlan


class DenseTransformer:
    """A Qwen3 decoder with its KV pool; implements `models.target.TargetModel`.

    Args:
        config: Shape of the checkpoint.
        read: Gives a tensor by its Hugging Face name (`weight_shapes`), of the right shape, any
            floating type.
        dtype: Type of weights, activations, keys and values.
        device: Where everything is.
        max_kv_bytes: Budget of the KV pool.

    Raises:
        ConfigurationError: The pool cannot be reserved.
    """

    def __init__(
        self,
        config: TargetConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_kv_bytes: int,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.rows_computed = 0
        self.pool = KVPool(config, dtype=dtype, device=device, max_bytes=max_kv_bytes)
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._like = torch.empty(0, config.head_dim, dtype=dtype, device=device)
        self._rotary = RotaryTable(
            config.head_dim, config.rope_theta, dtype=self._wide, device=device
        )

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=dtype)

        # A copy, since what was read may be a map of the file.
        self._embedding = load("model.embed_tokens.weight").clone()
        self._layers = [load_layer(config, load, layer) for layer in range(config.num_layers)]
        self._final_norm = RMSNorm(load("model.norm.weight"), config.rms_norm_eps, dtype)
        head = self._embedding if config.tie_word_embeddings else load("lm_head.weight")
        self._head = make_linear(head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that a decode step reads."""
        linears = [
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return sum(linear.nbytes for linear in [*linears, self._head])

    def new_cache(self) -> KVCache:
        """An empty cache of this model's pool."""
        return self.pool.new_cache()

    def close(self) -> None:
        """Give weights and KV memory back. The model cannot be used afterwards. Idempotent."""
        self.pool.close()
        self._layers = []
        self._embedding = torch.empty(0)
        self._head = make_linear(torch.empty(0, 0))

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, kv: KVCache, *, logits_for: Sequence[int], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Compute Q rows behind `kv.length`; see `TargetModel.forward`."""
        config, num_rows = self.config, token_ids.shape[0]
        assert all(0 <= layer < config.num_layers for layer in taps), "taps name layers"
        kv.reserve(num_rows)
        rotation = self._rotary.rows(kv.length, num_rows)
        x = functional.embedding(token_ids, self._embedding)  # [Q, E]
        query_shape = (num_rows, config.num_heads, config.num_kv_heads)
        plan = plan_attention(query_shape, kv.span_rows(), self._like)
        tapped: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            x = self._decoder_layer(layer, index, x, _Pass(kv, rotation, plan))
            if index in taps:
                tapped.append(x)
        self.rows_computed += num_rows
        hidden = TargetHidden(torch.stack(tapped), tuple(sorted(set(taps)))) if tapped else None
        return TargetOutput(self._logits(x, logits_for), hidden)

    def _decoder_layer(self, layer: LayerWeights, index: int, x: Tensor, shared: _Pass) -> Tensor:
        config, num_rows = self.config, x.shape[0]
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(layer.input_norm(x))
        heads = heads.view(num_rows, -1, config.head_dim)  # [Q, H + 2K, D]
        turned, values = heads.split_with_sizes([num_heads + num_kv_heads, num_kv_heads], 1)
        turned = layer.head_norm(turned)
        q, keys = rotate(turned, shared.rotation).split_with_sizes([num_heads, num_kv_heads], 1)
        shared.kv.write(index, keys.transpose(0, 1), values.transpose(0, 1))
        mixed = attend(q, shared.kv.spans(index), shared.plan)
        x = layer.out.add_to(x, mixed)
        gate, up = layer.gate_up(layer.ffn_norm(x)).chunk(2, dim=-1)
        return layer.down.add_to(x, functional.silu(gate).mul_(up))

    def _logits(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [R, V] of some rows of the last residual stream [Q, E]."""
        if not rows:
            return torch.empty(0, self.config.vocab_size, dtype=self._wide, device=self.device)
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            chosen = x.narrow(0, rows[0], len(rows))
        else:
            chosen = x[list(rows)]
        return self._head(self._final_norm(chosen)).to(self._wide)
