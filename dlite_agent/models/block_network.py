"""The backbone of DSpark, DFlash and DFlash2: a block of slots that attends to the target's taps.

Taps of a position become one feature, whose keys and values in every layer are the drafter's
history; a history token is never a query. The slots of a block attend to the history before their
anchor and to each other, in both directions. All of it is differentiable, so that what is served is
what learns: with `linear=LearningLinear` a network over tensors that need gradients is made anew
for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate
from dlite_agent.kernels.row_linear import WeightParts
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.layer_weights import ReadWeight
from dlite_agent.models.linear import Linear, make_linear

__all__ = ["BlockHistory", "BlockNetwork", "LearningLinear"]


class BlockHistory(NamedTuple):
    """Keys and values of consecutive positions, in every layer.

    Attributes:
        keys: [n, K, S, D], rotated.
        values: [n, K, S, D].
        first_position: Of the first of the S.
    """

    keys: Tensor
    values: Tensor
    first_position: int


class LearningLinear:
    """A weight [out, in] that may need gradients; nothing is packed, nothing written in place."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x·Wᵀ."""
        return functional.linear(x, self._weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Residual + x·Wᵀ."""
        return residual + functional.linear(x, self._weight)

    def parts(self) -> WeightParts:
        """The weight."""
        return WeightParts(self._weight)


@dataclass(frozen=True, slots=True)
class _Conv:
    base: Tensor  # [2, taps, E]
    kernel: Linear  # E -> 2·taps·groups


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    qkv: Linear
    head_gain: Tensor  # [H + K, D]; queries are scaled by 1/√D
    out: Linear
    norm_ffn: Tensor
    gate_up: Linear
    down: Linear
    attention_conv: _Conv | None
    mlp_conv: _Conv | None


class BlockNetwork:
    """The backbone with its weights.

    Args:
        config: Its shape.
        read: Gives a tensor by its name (`block_shapes`).
        dtype: Of weights and activations.
        device: Where it is.
        linear: Takes a weight over; `LearningLinear` for training.
    """

    def __init__(
        self,
        config: BlockConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: Callable[[Tensor], Linear] = make_linear,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._order = pair_order(config.head_dim)
        self._linear = linear

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=self._wide)

        self._fuse = linear(load("fc.weight").to(dtype))
        self._feature_norm = load("hidden_norm.weight")
        self._norm = load("norm.weight")
        self._layers = [self._load_layer(load, index) for index in range(config.num_layers)]
        self._load_history(load)
        self._rotary = RotaryTable(
            config.head_dim,
            config.rope_theta,
            dtype=self._wide,
            device=device,
            scaling=config.rope_scaling,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that a block reads."""
        return sum(
            linear.nbytes
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )

    def history(self, taps: Tensor, first_position: int) -> BlockHistory:
        """Keys and values of positions [first_position, first_position + S).

        Args:
            taps: [T, S, E], raw residual streams, in the order of `config.taps`.
            first_position: Of the first of the S.
        """
        config, count = self.config, taps.shape[1]
        features = self._fuse(taps.transpose(0, 1).reshape(count, -1).to(self.dtype))
        features = self._normed(features, self._feature_norm).to(self.dtype)
        both = self._history_proj(features)  # [S, 2·n·K·D]
        num_heads = config.num_layers * config.num_kv_heads
        keys, values = both.view(count, 2, num_heads, config.head_dim).unbind(1)
        rotation = self._rotary.rows(first_position, count)
        keys = rotate(self._normed(keys, self._history_gain).contiguous(), rotation).to(self.dtype)
        shape = (count, config.num_layers, config.num_kv_heads, config.head_dim)
        return BlockHistory(
            keys.view(shape).permute(1, 2, 0, 3),
            values.reshape(shape).permute(1, 2, 0, 3),
            first_position,
        )

    def states(
        self, embeddings: Tensor, anchors: Tensor, history: BlockHistory, window: int = 0
    ) -> Tensor:
        """Hidden states of the slots of N blocks over one history, before the head.

        Args:
            embeddings: [N, B, E], the target's embedding of the anchor and of the mask token.
            anchors: [N] int64, positions; each block sees the history before its own.
            history: Of the positions before the anchors, and maybe of later ones.
            window: How many positions of the history are seen; 0: all.

        Returns:
            [N, B, E], after the drafter's final norm.
        """
        num_blocks, block = embeddings.shape[:2]
        x = (embeddings * self.config.embedding_scale).reshape(num_blocks * block, -1)
        slots = torch.arange(block, device=x.device)
        positions = (anchors.to(x.device).unsqueeze(1) + slots).view(-1)  # [N·B]
        rotation = self._rotary.rows(0, int(positions.max()) + 1)[positions]
        for index, layer in enumerate(self._layers):
            mask = self._mask(index, anchors, history, block, window)
            keys, values = history.keys[index], history.values[index]
            x = self._decoder_layer(layer, x, block, rotation, (keys, values, *mask))
        return self._normed(x, self._norm).to(self.dtype).view(num_blocks, block, -1)

    def _mask(
        self, index: int, anchors: Tensor, history: BlockHistory, block: int, window: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What slots must not see: of the history [N, B, S], of the block [B, B]; None: no such."""
        config = self.config
        size, first = history.keys.shape[2], history.first_position
        reach = config.windows[index] if config.windows else 0
        later = None
        device = history.keys.device
        slots = torch.arange(block, device=device)
        if reach and (config.is_window_causal or reach < block):
            distance = slots.unsqueeze(1) - slots  # [B, B]
            later = distance >= reach
            if config.is_window_causal:
                later = later | (distance < 0)
        is_short = not (reach and size + block > reach) and not (window and size > window)
        if is_short and anchors.shape[0] == 1 and int(anchors[0]) >= first + size:
            return None, later
        at = torch.arange(first, first + size, device=device)
        anchor = anchors.to(device).view(-1, 1, 1)
        hidden = at >= anchor  # [N, 1, S]
        if window:
            hidden = hidden | (at < anchor - window)
        hidden = hidden.expand(-1, block, -1)
        if reach:
            hidden = hidden | (anchor + slots.view(1, -1, 1) - at >= reach)
        return hidden, later

    def _decoder_layer(
        self,
        layer: _Layer,
        x: Tensor,
        block: int,
        rotation: Tensor,
        seen: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    ) -> Tensor:
        """Map [N·B, E] to [N·B, E]."""
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        y, kernel = self._conv_in(layer.attention_conv, self._narrow(x, layer.norm_in), block)
        heads = layer.qkv(y).view(x.shape[0], -1, config.head_dim)  # [N·B, H + 2K, D]
        turned, values = heads.split_with_sizes([num_turned, config.num_kv_heads], 1)
        turned = rotate(self._normed(turned, layer.head_gain).contiguous(), rotation).to(self.dtype)
        q, keys = turned.split_with_sizes([config.num_heads, config.num_kv_heads], 1)
        mixed = layer.out(self._attend(q, keys, values, block, seen))
        x = x + self._conv_out(layer.attention_conv, mixed, kernel, block)
        y, kernel = self._conv_in(layer.mlp_conv, self._narrow(x, layer.norm_ffn), block)
        gate, up = layer.gate_up(y).chunk(2, dim=-1)
        mixed = layer.down(functional.silu(gate) * up)
        return x + self._conv_out(layer.mlp_conv, mixed, kernel, block)

    def _attend(
        self,
        q: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        block: int,
        seen: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    ) -> Tensor:
        """Mix values of the history [K, S, D] and of the block: [N·B, H, D] to [N·B, H·D].

        The history is not copied: its scores and the block's are apart, and share a softmax.
        """
        keys, values, hidden, later = seen
        num_kv, dim, size = self.config.num_kv_heads, self.config.head_dim, keys.shape[1]
        q = q.view(-1, block, num_kv, self.config.num_heads // num_kv, dim)
        q = q.permute(2, 0, 1, 3, 4)  # [K, N, B, G, D]
        shape = q.shape[:4]
        flat = q.reshape(num_kv, -1, dim)  # [K, N·B·G, D]
        own_keys = own_keys.reshape(-1, block, num_kv, dim).permute(2, 0, 3, 1)  # [K, N, D, B]
        own_values = own_values.reshape(-1, block, num_kv, dim).permute(2, 0, 1, 3)
        of_history = torch.bmm(flat, keys.transpose(1, 2)).view(*shape, size)
        of_block = torch.matmul(q.flatten(2, 3), own_keys).view(*shape, block)
        if hidden is not None:
            of_history = of_history.masked_fill(hidden.unsqueeze(0).unsqueeze(3), -torch.inf)
        if later is not None:
            of_block = of_block.masked_fill(later.view(1, 1, block, 1, block), -torch.inf)
        shares = torch.cat([of_history, of_block], dim=-1).softmax(dim=-1)
        far, near = shares.split_with_sizes([size, block], dim=-1)
        mixed = torch.bmm(far.reshape(num_kv, -1, size), values).view(*shape, dim)
        mixed = mixed + torch.matmul(near.flatten(2, 3), own_values).view(*shape, dim)
        return mixed.permute(1, 2, 0, 3, 4).reshape(-1, self.config.num_heads * dim)

    def _conv_in(self, conv: _Conv | None, y: Tensor, block: int) -> tuple[Tensor, Tensor | None]:
        """The convolved input of a sublayer, and the coefficients for its output."""
        if conv is None:
            return y, None
        groups = y.shape[-1] // self.config.conv_group
        kernel = conv.kernel(y).view(-1, block, 2, self.config.conv_size, groups)
        return self._convolved(y, conv.base[0], kernel[:, :, 0], block), kernel[:, :, 1]

    def _conv_out(self, conv: _Conv | None, y: Tensor, kernel: Tensor | None, block: int) -> Tensor:
        if conv is None or kernel is None:
            return y
        return self._convolved(y, conv.base[1], kernel, block)

    def _convolved(self, x: Tensor, base: Tensor, delta: Tensor, block: int) -> Tensor:
        """y_i = Σ_t (base_t + δ_i,t) ⊙ x_{i-t} within each block, [N·B, E].

        δ is one number for `conv_group` channels. Source: vLLM's `qwen3_dflash2.py`, read.
        """
        shape = x.shape
        x = x.view(-1, block, shape[-1] // self.config.conv_group, self.config.conv_group)
        total = torch.zeros_like(x)
        for tap in range(self.config.conv_size):
            factor = base[tap].view(x.shape[2:]) + delta[:, :, tap].unsqueeze(-1)
            moved = functional.pad(x[:, : block - tap], (0, 0, 0, 0, tap, 0))
            total = total + factor * moved
        return total.view(shape)

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32 or wider."""
        x = x.to(self._wide)
        scale = x.square().mean(dim=-1, keepdim=True).add(self.config.rms_norm_eps).rsqrt()
        return x * scale * gain

    def _narrow(self, x: Tensor, gain: Tensor) -> Tensor:
        return self._normed(x, gain).to(self.dtype)

    def _turned(self, weight: Tensor) -> Tensor:
        """Rows of heads in the order that `rotate` wants."""
        heads = weight.view(-1, self.config.head_dim, weight.shape[1])
        return heads[:, self._order].flatten(0, 1)

    def _load_layer(self, load: ReadWeight, index: int) -> _Layer:
        config, prefix = self.config, f"layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        query = self._turned(load(f"{attention}q_proj.weight"))
        key = self._turned(load(f"{attention}k_proj.weight"))
        qkv = torch.cat([query, key, load(f"{attention}v_proj.weight")])
        query_gain = load(f"{attention}q_norm.weight")[self._order] * config.head_dim**-0.5
        key_gain = load(f"{attention}k_norm.weight")[self._order]
        gains = [
            query_gain.expand(config.num_heads, -1),
            key_gain.expand(config.num_kv_heads, -1),
        ]
        gate_up = [load(f"{mlp}gate_proj.weight"), load(f"{mlp}up_proj.weight")]
        return _Layer(
            norm_in=load(f"{prefix}input_layernorm.weight"),
            qkv=self._linear(qkv.to(self.dtype)),
            head_gain=torch.cat(gains),
            out=self._linear(load(f"{attention}o_proj.weight").to(self.dtype)),
            norm_ffn=load(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(torch.cat(gate_up).to(self.dtype)),
            down=self._linear(load(f"{mlp}down_proj.weight").to(self.dtype)),
            attention_conv=self._load_conv(load, f"{prefix}attention_conv."),
            mlp_conv=self._load_conv(load, f"{prefix}mlp_conv."),
        )

    def _load_conv(self, load: ReadWeight, prefix: str) -> _Conv | None:
        if not self.config.conv_size:
            return None
        kernel = self._linear(load(f"{prefix}kernel_projection.weight").to(self.dtype))
        return _Conv(load(f"{prefix}base_kernel").to(self.dtype), kernel)

    def _load_history(self, load: ReadWeight) -> None:
        """Keys and values of all layers as one product of the feature."""
        prefixes = [f"layers.{index}.self_attn." for index in range(self.config.num_layers)]
        keys = [self._turned(load(f"{prefix}k_proj.weight")) for prefix in prefixes]
        values = [load(f"{prefix}v_proj.weight") for prefix in prefixes]
        self._history_proj = self._linear(torch.cat(keys + values).to(self.dtype))
        gains = torch.stack([load(f"{prefix}k_norm.weight")[self._order] for prefix in prefixes])
        self._history_gain = gains.repeat_interleave(self.config.num_kv_heads, dim=0)  # [n·K, D]
