"""The forward of a dense Qwen3 decoder: few, fused operators over one session's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.attention import AttentionPlan, attend, plan_attention
from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.linear import Linear, make_linear
from dlite_agent.models.target import TargetConfig, TargetHidden, TargetOutput

__all__ = ["DenseTransformer", "weight_shapes"]

ReadWeight = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    qkv: Linear  # E -> (H + 2K)·D
    head_norm: RMSNorm  # of all query and key heads; queries are scaled by 1/√D
    out: Linear  # H·D -> E
    ffn_norm: RMSNorm
    gate_up: Linear  # E -> 2·ffn
    down: Linear  # ffn -> E


class _Pass(NamedTuple):
    """What all layers of one forward share."""

    kv: KVCache
    rotation: Tensor
    plan: AttentionPlan


def weight_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a Hugging Face checkpoint of this config must hold."""
    hidden, head_dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    per_layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


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
        self._layers = [_load_layer(config, load, layer) for layer in range(config.num_layers)]
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

    def _decoder_layer(self, layer: _Layer, index: int, x: Tensor, shared: _Pass) -> Tensor:
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


def _load_layer(config: TargetConfig, load: ReadWeight, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    order = pair_order(config.head_dim)

    def turned(name: str, num_heads: int) -> Tensor:
        weight = load(f"{prefix}self_attn.{name}.weight")
        return weight.view(num_heads, config.head_dim, -1)[:, order].flatten(0, 1)

    def norm(name: str) -> RMSNorm:
        weight = load(f"{prefix}{name}.weight")
        return RMSNorm(weight, config.rms_norm_eps, weight.dtype)

    query = turned("q_proj", config.num_heads)
    key = turned("k_proj", config.num_kv_heads)
    value = load(f"{prefix}self_attn.v_proj.weight")
    gate, up = load(f"{prefix}mlp.gate_proj.weight"), load(f"{prefix}mlp.up_proj.weight")
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=make_linear(torch.cat([query, key, value])),
        head_norm=_load_head_norm(config, load, index),
        out=make_linear(load(f"{prefix}self_attn.o_proj.weight")),
        ffn_norm=norm("post_attention_layernorm"),
        gate_up=make_linear(torch.cat([gate, up])),
        down=make_linear(load(f"{prefix}mlp.down_proj.weight")),
    )


def _load_head_norm(config: TargetConfig, load: ReadWeight, index: int) -> RMSNorm:
    """The norms of queries and keys as one; the attention's 1/√D goes into the queries'."""
    order = pair_order(config.head_dim)
    query = load(f"model.layers.{index}.self_attn.q_norm.weight")
    key = load(f"model.layers.{index}.self_attn.k_norm.weight")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    weight = torch.cat(
        [
            query[order].to(wide).expand(config.num_heads, -1) * config.head_dim**-0.5,
            key[order].to(wide).expand(config.num_kv_heads, -1),
        ]
    )
    return RMSNorm(weight, config.rms_norm_eps, wide)
