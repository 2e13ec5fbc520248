"""The backbone of DLite: from the target's taps of one position to a hidden state for every slot.

All slots at once, few operators, nothing of the history: the context is a handful of tokens made of
the taps, and their keys and values for every layer are one product with a matrix that is made at
load. Context stands at rotary position 0, where a rotation changes nothing, and the block behind.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate
from dlite_agent.kernels.row_kernels import HeadShape, RowKernels
from dlite_agent.models.dlite_config import POSITION_FREQUENCIES, DLiteConfig
from dlite_agent.models.dlite_native import BlockLayer, NativeBlock
from dlite_agent.models.layer_weights import ReadWeight
from dlite_agent.models.linear import make_linear

__all__ = ["DLiteNetwork", "position_waves"]

_LONGEST = 2.0**20
"""Positions that the waves tell apart; the last ones of a million tokens look alike."""


def position_waves(positions: Tensor) -> Tensor:
    """Sines and cosines of a position's logarithm, [..., 2 · POSITION_FREQUENCIES] float32 (ours).

    Args:
        positions: Absolute positions, any shape and number type.
    """
    share = positions.to(torch.float32).add(1.0).log2().div(math.log2(_LONGEST))
    octaves = 2.0 ** torch.arange(POSITION_FREQUENCIES, device=positions.device)
    angles = share.unsqueeze(-1) * octaves * math.pi
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class DLiteNetwork:
    """The backbone with its weights.

    Args:
        config: Its shape.
        read: Gives a tensor by its name (`dlite_shapes`).
        dtype: Of weights and activations: the target's.
        device: The target's.
        kernels: Run the layers where they support type and heads; None: torch's operators do.
    """

    def __init__(
        self,
        config: DLiteConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kernels: RowKernels | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=self._wide)

        self._context = _Context(config, load, dtype)
        self._layers = [self._load_layer(load, index) for index in range(config.num_layers)]
        self._slots = load("slot_embedding.weight").to(dtype)  # [B, E]
        self._norm = RMSNorm(load("norm.weight"), config.rms_norm_eps, dtype)
        self._floor = _norm_floor(config.hidden_size, config.rms_norm_eps, self._wide, device)
        table = RotaryTable(config.head_dim, config.rope_theta, dtype=self._wide, device=device)
        self._rotation = table.rows(1, config.block_size).clone()
        shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        self._native: NativeBlock | None = None
        if kernels is not None and kernels.supports(dtype, device, shape):
            self._native = NativeBlock(kernels, config, self._layers, self._norm, self._rotation)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a block reads."""
        linears = [
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return self._context.nbytes + sum(linear.nbytes for linear in linears)

    @torch.no_grad()
    def block_states(self, taps: Tensor, anchor: Tensor, position: int) -> Tensor:
        """Hidden states of all slots, before the sequential head.

        Args:
            taps: [T, P, E], raw residual streams of the last P verified positions, 1 <= P; of more
                than `context_positions` the last are read.
            anchor: [1, E], the target's embedding of the pending token.
            position: Of the pending token; read by `position_feature` only.

        Returns:
            [B, E], after the drafter's final norm; slot k is for the k + 1st token after the
            anchor.
        """
        keys, values = self._context.keys_values(taps, position)
        x = self._slots.clone()
        x[:1] += anchor
        if self._native is not None:
            return self._native.run(x, keys, values)
        for index, layer in enumerate(self._layers):
            x = self._decoder_layer(layer, x, keys[index], values[index])
        return self._norm(x)

    def _decoder_layer(self, layer: BlockLayer, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Map [B, E] to [B, E]; keys and values of the context are [K, n, D]."""
        config, block = self.config, self.config.block_size
        num_heads, num_kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = layer.qkv(self._direction(x)).view(block, -1, dim)  # [B, H + 2K, D]
        turned, own_values = heads.split_with_sizes([num_heads + num_kv_heads, num_kv_heads], 1)
        turned = rotate(layer.head_norm(turned), self._rotation).to(x.dtype)
        q, own_keys = turned.split_with_sizes([num_heads, num_kv_heads], 1)
        keys = torch.cat([keys, own_keys.transpose(0, 1)], dim=1)  # [K, n + B, D]
        values = torch.cat([values, own_values.transpose(0, 1)], dim=1)
        q = q.transpose(0, 1).reshape(num_kv_heads, -1, dim)  # [K, G·B, D]
        mixed = torch.bmm(torch.bmm(q, keys.transpose(1, 2)).softmax(dim=-1), values)
        mixed = mixed.view(num_heads, block, dim).transpose(0, 1).reshape(block, -1)
        x = layer.out.add_to(x, mixed)
        gate, up = layer.gate_up(self._direction(x)).chunk(2, dim=-1)
        return layer.down.add_to(x, functional.silu(gate).mul_(up))

    def _direction(self, x: Tensor) -> Tensor:
        """RMSNorm without its factor √E and its gain, which are in the next weight."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=self._wide)
        return x.div(length.hypot_(self._floor)).to(self.dtype)

    def _load_layer(self, load: ReadWeight, index: int) -> BlockLayer:
        config, prefix = self.config, f"layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        norm_in = load(f"{prefix}input_layernorm.weight") * config.hidden_size**0.5
        norm_ffn = load(f"{prefix}post_attention_layernorm.weight") * config.hidden_size**0.5
        order = pair_order(config.head_dim)
        query = _by_head(load(f"{attention}q_proj.weight"), config.head_dim)[:, order].flatten(0, 1)
        key = _by_head(load(f"{attention}k_proj.weight"), config.head_dim)[:, order].flatten(0, 1)
        qkv = torch.cat([query, key, load(f"{attention}v_proj.weight")]) * norm_in
        gains = [
            load(f"{attention}q_norm.weight")[order].expand(config.num_heads, -1)
            * config.head_dim**-0.5,
            load(f"{attention}k_norm.weight")[order].expand(config.num_kv_heads, -1),
        ]
        gate_up = torch.cat([load(f"{mlp}gate_proj.weight"), load(f"{mlp}up_proj.weight")])
        return BlockLayer(
            qkv=make_linear(qkv.to(self.dtype)),
            head_norm=RMSNorm(torch.cat(gains), config.rms_norm_eps, self._wide),
            out=make_linear(load(f"{attention}o_proj.weight").to(self.dtype)),
            gate_up=make_linear((gate_up * norm_ffn).to(self.dtype)),
            down=make_linear(load(f"{mlp}down_proj.weight").to(self.dtype)),
        )


class _Context:
    """Keys and values of the context tokens, for all layers in one product.

    A context token is `c = W·n + e` for a normed tap n. A layer wants `W_k·c = (W_k·W)·n + W_k·e`,
    so W_k·W of all layers, and the same for values, are one matrix, and W_k·e a bias of each token.
    """

    def __init__(self, config: DLiteConfig, load: ReadWeight, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._norm = RMSNorm(load("context_norm.weight").unsqueeze(1), config.rms_norm_eps, dtype)
        order = pair_order(config.head_dim)
        prefixes = [f"layers.{index}.self_attn." for index in range(config.num_layers)]
        keys = [
            _by_head(load(f"{prefix}k_proj.weight"), config.head_dim)[:, order].flatten(0, 1)
            for prefix in prefixes
        ]
        values = [load(f"{prefix}v_proj.weight") for prefix in prefixes]
        projections = torch.cat(keys + values)  # [2·n·K·D, E], n layers
        self._proj = make_linear((projections @ load("context_proj.weight")).to(dtype))
        embedding = load("context_embedding.weight")
        self._bias = (embedding @ projections.t()).to(dtype)  # [P·T or P, 2·n·K·D], newest first
        gains = torch.stack([load(f"{prefix}k_norm.weight")[order] for prefix in prefixes])
        self._key_norm = RMSNorm(gains.unsqueeze(1), config.rms_norm_eps, dtype)  # [n, 1, D]
        self.nbytes = self._proj.nbytes
        self._waves: tuple[Tensor, Tensor] | None = None
        if config.position_feature == "log-absolute":
            matrix = projections @ load("position_proj.weight")
            bias = projections @ load("position_embedding.weight")[0]
            self._waves = matrix.t().contiguous().to(dtype), bias.to(dtype)

    def keys_values(self, taps: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, K, tokens, D], both; keys are normed and need no rotation."""
        config = self._config
        if taps.shape[1] > config.context_positions:
            taps = taps[:, -config.context_positions :]
        num_positions = taps.shape[1]
        normed = self._norm(taps)  # [T, P, E]
        if num_positions > 1:
            normed = normed.flip(1)  # newest first
        normed = normed.transpose(0, 1).reshape(-1, self._width)
        both = self._proj.add_to(self._bias[: normed.shape[0]], normed)
        if self._waves is not None:
            both = torch.cat([both, self._of_position(position)])
        shape = (both.shape[0], 2, config.num_layers, config.num_kv_heads, config.head_dim)
        keys, values = both.view(shape).unbind(1)  # [tokens, layers, K, D]
        return self._key_norm(keys).permute(1, 2, 0, 3), values.permute(1, 2, 0, 3)

    @property
    def _width(self) -> int:
        is_sequence = self._config.composition == "sequence"
        return self._config.hidden_size * (1 if is_sequence else len(self._config.taps))

    def _of_position(self, position: int) -> Tensor:
        assert self._waves is not None, "asked for with a position feature only"
        matrix, bias = self._waves
        waves = position_waves(torch.tensor([position], device=matrix.device)).to(matrix.dtype)
        return torch.addmm(bias, waves, matrix)


def _by_head(weight: Tensor, head_dim: int) -> Tensor:
    """[N·D, E] as [N, D, E]."""
    return weight.view(-1, head_dim, weight.shape[1])


@lru_cache(maxsize=8)
def _norm_floor(size: int, eps: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor((size * eps) ** 0.5, dtype=dtype, device=device)
