"""Which tensors a checkpoint holds, and how a layer's become what the forward computes with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import pair_order
from dlite_agent.models.linear import Linear, make_linear
from dlite_agent.models.target import TargetConfig

__all__ = ["LayerWeights", "ReadWeight", "load_layer", "weight_shapes"]

ReadWeight = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one decoder layer computes with."""

    input_norm: RMSNorm
    qkv: Linear  # E -> (H + 2K)·D
    head_norm: RMSNorm  # of all query and key heads; queries are scaled by 1/√D
    out: Linear  # H·D -> E
    ffn_norm: RMSNorm
    gate_up: Linear  # E -> 2·ffn
    down: Linear  # ffn -> E


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


def load_layer(config: TargetConfig, load: ReadWeight, index: int) -> LayerWeights:
    """Read one decoder layer by its tensors' Hugging Face names."""
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
    return LayerWeights(
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
