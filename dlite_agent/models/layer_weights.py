"""Which tensors a checkpoint holds, and how a layer's become what the forward computes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlite_agent.config import Quantization
from dlite_agent.kernels.norm import HeadScale, RMSNorm
from dlite_agent.kernels.rotary import pair_order
from dlite_agent.kernels.row_linear import WeightParts
from dlite_agent.models.linear import Linear, make_linear
from dlite_agent.models.target import TargetConfig

__all__ = ["LayerWeights", "ReadWeight", "load_layer", "loaded_bytes", "weight_shapes"]

ReadWeight = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one decoder layer computes with."""

    input_norm: RMSNorm
    qkv: Linear  # E -> (H + 2K)·D
    head_norm: RMSNorm | HeadScale  # [M, H + K, D]; queries are scaled by 1/√D
    out: Linear  # H·D -> E
    ffn_norm: RMSNorm
    gate_up: Linear  # E -> 2·ffn
    down: Linear  # ffn -> E


def weight_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a Hugging Face checkpoint of this config must hold."""
    hidden, head_dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    per_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.has_qk_norm:
        per_layer |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (head_dim,)
        )
    if config.has_qkv_bias:
        per_layer |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key,),
            "self_attn.v_proj.bias": (key,),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def loaded_bytes(config: TargetConfig, itemsize: int, quantize: Quantization | None = None) -> int:
    """Bytes that the weights take once they are loaded.

    A head counts twice where its rows are kept beside the order that its product wants: a tied one
    as the embedding, one of bfloat16 for `VocabularyHead`.

    Args:
        config: Shape.
        itemsize: Bytes an element of the type that the model computes in.
        quantize: As in `EngineConfig`.
    """
    shapes = weight_shapes(config)
    total = 0
    if itemsize == 2 and not config.tie_word_embeddings:
        total += math.prod(shapes["lm_head.weight"]) * itemsize
    shapes.setdefault("lm_head.weight", shapes["model.embed_tokens.weight"])
    for name, shape in shapes.items():
        is_product = len(shape) == 2 and name != "model.embed_tokens.weight"
        if quantize == "int8" and is_product:
            total += math.prod(shape) + shape[0] * itemsize  # a level each, a factor a row
        else:
            total += math.prod(shape) * itemsize
    return total


def load_layer(
    config: TargetConfig, load: ReadWeight, index: int, quantize: Quantization | None = None
) -> LayerWeights:
    """Read one decoder layer by its tensors' Hugging Face names, each once.

    Args:
        config: Shape.
        load: Gives a tensor in the type that is computed in.
        index: Number of the layer.
        quantize: As in `EngineConfig`; of the products' weights.
    """
    prefix = f"model.layers.{index}."
    norm_in = load(f"{prefix}input_layernorm.weight")
    norm_ffn = load(f"{prefix}post_attention_layernorm.weight")
    gate, up = load(f"{prefix}mlp.gate_proj.weight"), load(f"{prefix}mlp.up_proj.weight")
    wide = torch.float64 if norm_in.dtype == torch.float64 else torch.float32
    head_scale = norm_in.new_ones(config.num_heads + config.num_kv_heads, 1, dtype=wide)
    head_scale[: config.num_heads] = config.head_dim**-0.5  # the attention's, for queries
    return LayerWeights(
        input_norm=RMSNorm(norm_in, config.rms_norm_eps, norm_in.dtype),
        qkv=_load_qkv(config, load, f"{prefix}self_attn.", quantize),
        head_norm=(
            _load_head_norm(config, load, f"{prefix}self_attn.", head_scale)
            if config.has_qk_norm
            else HeadScale(head_scale.expand(-1, config.head_dim))
        ),
        out=make_linear(load(f"{prefix}self_attn.o_proj.weight"), quantize),
        ffn_norm=RMSNorm(norm_ffn, config.rms_norm_eps, norm_ffn.dtype),
        gate_up=make_linear(torch.cat([gate, up]), quantize),
        down=make_linear(load(f"{prefix}mlp.down_proj.weight"), quantize),
    )


def _load_qkv(
    config: TargetConfig, load: ReadWeight, prefix: str, quantize: Quantization | None
) -> Linear:
    order = pair_order(config.head_dim)

    def turned(name: str, num_heads: int) -> Tensor:
        tensor = load(f"{prefix}{name}")
        by_head = tensor.view(num_heads, config.head_dim, *tensor.shape[1:])
        return by_head[:, order].flatten(0, 1)

    def joined(kind: str) -> Tensor:
        query = turned(f"q_proj.{kind}", config.num_heads)
        key = turned(f"k_proj.{kind}", config.num_kv_heads)
        return torch.cat([query, key, load(f"{prefix}v_proj.{kind}")])

    linear = make_linear(joined("weight"), quantize)
    return _Biased(linear, joined("bias")) if config.has_qkv_bias else linear


class _Biased:
    """A product and a bias [out]."""

    def __init__(self, linear: Linear, bias: Tensor) -> None:
        self._linear = linear
        self._bias = bias
        self.nbytes = linear.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ + b."""
        return self._linear(x).add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ + b."""
        return self._linear.add_to(residual, x).add_(self._bias)

    def parts(self) -> WeightParts:
        """Those of the product, and the bias."""
        return self._linear.parts()._replace(bias=self._bias)


def _load_head_norm(
    config: TargetConfig, load: ReadWeight, prefix: str, head_scale: Tensor
) -> RMSNorm:
    """The norms of queries and keys as one, with a factor a head in the weight."""
    order = pair_order(config.head_dim)
    query = load(f"{prefix}q_norm.weight")[order].expand(config.num_heads, -1)
    key = load(f"{prefix}k_norm.weight")[order].expand(config.num_kv_heads, -1)
    weight = torch.cat([query, key]).to(head_scale.dtype) * head_scale
    return RMSNorm(weight, config.rms_norm_eps, head_scale.dtype)
