"""The forward of a dense Qwen3 decoder: few, fused operators over one session's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.attention import attend
from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.linear import Linear, make_linear
from dlite_agent.models.target import TargetConfig, TargetHidden, TargetOutput

__all__ = ["DenseTransformer", "weight_shapes"]

ReadWeight = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor  # [E]
    qkv: Linear  # E -> (H + 2K)·D
    head_norms: Tensor  # [H + K, D], of each query and key head
    out: Linear  # H·D -> E
    ffn_norm: Tensor  # [E]
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
        self._rotary = RotaryTable(
            config.head_dim, config.rope_theta, dtype=self._wide, device=device
        )

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=dtype)

        self._embedding = load("model.embed_tokens.weight").contiguous()
        self._layers = [_load_layer(config, load, layer) for layer in range(config.num_layers)]
        self._final_norm = load("model.norm.weight")
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
        self._embedding = self._final_norm = torch.empty(0)
        self._head = make_linear(torch.empty(0, 0))

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, kv: KVCache, *, logits_for: Sequence[int], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Compute Q rows behind `kv.length`; see `TargetModel.forward`."""
        num_rows = token_ids.shape[0]
        kv.reserve(num_rows)
        rotation = self._rotary.rows(kv.length, num_rows)
        x = functional.embedding(token_ids, self._embedding)  # [Q, E]
        tapped: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            x = self._decoder_layer(layer, index, x, rotation, kv)
            if index in taps:
                tapped.append(x)
        self.rows_computed += num_rows
        hidden = TargetHidden(torch.stack(tapped), tuple(sorted(set(taps)))) if tapped else None
        return TargetOutput(self._logits(x, logits_for), hidden)

    def _decoder_layer(
        self, layer: _Layer, index: int, x: Tensor, rotation: Tensor, kv: KVCache
    ) -> Tensor:
        config = self.config
        num_rows, num_heads, num_kv_heads = x.shape[0], config.num_heads, config.num_kv_heads
        heads = layer.qkv(self._norm(x, layer.input_norm)).view(
            num_rows, -1, config.head_dim
        )  # [Q, H + 2K, D]
        turned = heads[:, : num_heads + num_kv_heads].to(self._wide)
        turned = (
            functional.rms_norm(turned, (config.head_dim,), None, config.rms_norm_eps)
            * layer.head_norms
        )
        turned = rotate(turned, rotation)
        kv.write(
            index,
            turned[:, num_heads:].transpose(0, 1),
            heads[:, num_heads + num_kv_heads :].transpose(0, 1),
        )
        mixed = attend(turned[:, :num_heads].to(self.dtype), kv.spans(index), causal_tail=num_rows)
        x = layer.out.add_to(x, mixed.reshape(num_rows, -1))
        gate, up = layer.gate_up(self._norm(x, layer.ffn_norm)).chunk(2, dim=-1)
        return layer.down.add_to(x, functional.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _logits(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [R, V] of some rows of the last residual stream [Q, E]."""
        if not rows:
            return torch.empty(0, self.config.vocab_size, dtype=self._wide, device=self.device)
        chosen = x if len(rows) == x.shape[0] else x[list(rows)]
        return self._head(self._norm(chosen, self._final_norm)).to(self._wide)


def _load_layer(config: TargetConfig, load: ReadWeight, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    order = pair_order(config.head_dim)

    def turned(name: str, num_heads: int) -> Tensor:
        weight = load(f"{prefix}self_attn.{name}.weight")
        return weight.view(num_heads, config.head_dim, -1)[:, order].flatten(0, 1)

    qkv = torch.cat(
        [
            turned("q_proj", config.num_heads),
            turned("k_proj", config.num_kv_heads),
            load(f"{prefix}self_attn.v_proj.weight"),
        ]
    )
    query_norm = load(f"{prefix}self_attn.q_norm.weight")[order].expand(config.num_heads, -1)
    key_norm = load(f"{prefix}self_attn.k_norm.weight")[order].expand(config.num_kv_heads, -1)
    gate_up = torch.cat(
        [load(f"{prefix}mlp.gate_proj.weight"), load(f"{prefix}mlp.up_proj.weight")]
    )
    wide = torch.float64 if query_norm.dtype == torch.float64 else torch.float32
    return _Layer(
        input_norm=load(f"{prefix}input_layernorm.weight"),
        qkv=make_linear(qkv),
        head_norms=torch.cat([query_norm, key_norm]).to(wide),
        out=make_linear(load(f"{prefix}self_attn.o_proj.weight")),
        ffn_norm=load(f"{prefix}post_attention_layernorm.weight"),
        gate_up=make_linear(gate_up),
        down=make_linear(load(f"{prefix}mlp.down_proj.weight")),
    )
