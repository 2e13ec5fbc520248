"""Random block drafters of tiny targets, and what they compute, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.block_config import BlockConfig, block_shapes
from dlite_agent.models.target import TargetConfig


def block_config(target: TargetConfig, **choices: object) -> BlockConfig:
    settings: dict[str, object] = {
        "taps": tuple(range(target.num_layers)),
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rank": 8,
    }
    return BlockConfig.for_target(target, "", **(settings | choices))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Everything matters: no zero, no gain of one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = name.endswith("norm.weight")
        weights[name] = 1.0 + 0.2 * noise if is_gain else noise * shape[-1] ** -0.5
    return weights


def block_weights(config: BlockConfig, seed: int = 0) -> dict[str, Tensor]:
    return random_tensors(block_shapes(config), seed)


def naive_states(  # noqa: C901, PLR0915 - written out on purpose
    config: BlockConfig, weights: dict[str, Tensor], taps: Tensor, embeddings: Tensor, anchor: int
) -> Tensor:
    """One block [B, E] behind taps [T, anchor, E], as DeepSpec's model card describes it."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        return x * scale * weights[name]

    def turned(x: Tensor, positions: Tensor) -> Tensor:
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = positions.double().unsqueeze(1) * config.rope_theta**-steps
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        low, high = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

    def conv(name: str, y: Tensor) -> tuple[Tensor, Tensor]:
        groups = config.hidden_size // config.conv_group
        kernel = y @ weights[f"{name}.kernel_projection.weight"].t()
        kernel = kernel.view(-1, 2, config.conv_size, groups)
        base = weights[f"{name}.base_kernel"].unsqueeze(0)
        return base + kernel.repeat_interleave(config.conv_group, dim=-1), y

    def convolve(kernel: Tensor, x: Tensor) -> Tensor:
        rows = []
        for i in range(x.shape[0]):
            row = torch.zeros_like(x[0])
            for tap in range(min(i + 1, config.conv_size)):
                row = row + kernel[i, tap] * x[i - tap]
            rows.append(row)
        return torch.stack(rows)

    features = norm(torch.cat(list(taps), dim=-1) @ weights["fc.weight"].t(), "hidden_norm.weight")
    block, size = embeddings.shape[0], features.shape[0]
    positions = torch.arange(anchor, anchor + block)
    x = embeddings * config.embedding_scale
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        attention = f"{prefix}self_attn."
        y = norm(x, f"{prefix}input_layernorm.weight")
        kernel = None
        if config.conv_size:
            kernel, y = conv(f"{prefix}attention_conv", y)
            y = convolve(kernel[:, 0], y)
        both = torch.cat([features, y])
        all_positions = torch.cat([torch.arange(anchor - size, anchor), positions])
        q = (y @ weights[f"{attention}q_proj.weight"].t()).view(block, -1, config.head_dim)
        k = (both @ weights[f"{attention}k_proj.weight"].t()).view(
            size + block, -1, config.head_dim
        )
        v = (both @ weights[f"{attention}v_proj.weight"].t()).view(
            size + block, -1, config.head_dim
        )
        q = turned(norm(q, f"{attention}q_norm.weight"), positions)
        k = turned(norm(k, f"{attention}k_norm.weight"), all_positions)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        reach = config.windows[index] if config.windows else 0
        if reach:
            distance = positions.unsqueeze(1) - all_positions.unsqueeze(0)
            hidden = distance >= reach
            if config.is_window_causal:
                hidden |= distance < 0
            scores = scores.masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(block, -1)
        mixed = mixed @ weights[f"{attention}o_proj.weight"].t()
        x = x + (convolve(kernel[:, 1], mixed) if kernel is not None else mixed)
        y = norm(x, f"{prefix}post_attention_layernorm.weight")
        if config.conv_size:
            kernel, y = conv(f"{prefix}mlp_conv", y)
            y = convolve(kernel[:, 0], y)
        gate = functional.silu(y @ weights[f"{prefix}mlp.gate_proj.weight"].t())
        mixed = gate * (y @ weights[f"{prefix}mlp.up_proj.weight"].t())
        mixed = mixed @ weights[f"{prefix}mlp.down_proj.weight"].t()
        x = x + (convolve(kernel[:, 1], mixed) if kernel is not None else mixed)
    return norm(x, "norm.weight")
