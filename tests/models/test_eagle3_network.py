"""EAGLE-3's layer is what is written out by hand, for every variant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.eagle3_network import (
    Eagle3Config,
    Eagle3Network,
    PairHistory,
    eagle3_shapes,
)
from tests.block_models import random_tensors

VARIANTS: dict[str, dict[str, bool]] = {
    "llama": {},
    "qwen3": {"has_qk_norm": True},
    "residual normed": {"is_residual_normed": True},
    "input normed": {"is_input_normed": True},
    "output normed": {"is_output_normed": True},
}


def naive_states(
    config: Eagle3Config, weights: dict[str, Tensor], features: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The layer over all pairs, causally: states and what is fed back, [S, E] both."""

    def norm(x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        return x * scale * weights[name]

    def heads(x: Tensor, name: str) -> Tensor:
        y = (x @ weights[f"layers.0.self_attn.{name}_proj.weight"].t()).view(
            len(x), -1, config.head_dim
        )
        if name == "v":
            return y
        if config.has_qk_norm:
            y = norm(y, f"layers.0.self_attn.{name}_norm.weight")
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(len(x)).double().unsqueeze(1) * config.rope_theta**-steps
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        low, high = y.chunk(2, dim=-1)
        return y * angles.cos() + torch.cat([-high, low], -1) * angles.sin()

    normed = norm(features, "layers.0.hidden_norm.weight")
    both = torch.cat([norm(tokens, "layers.0.input_layernorm.weight"), normed], dim=-1)
    group = config.num_heads // config.num_kv_heads
    q, k, v = (heads(both, name) for name in "qkv")
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
    later = torch.ones(len(both), len(both), dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    x = normed if config.is_residual_normed else features
    x = x + mixed @ weights["layers.0.self_attn.o_proj.weight"].t()
    y = norm(x, "layers.0.post_attention_layernorm.weight")
    gate = functional.silu(y @ weights["layers.0.mlp.gate_proj.weight"].t())
    up = y @ weights["layers.0.mlp.up_proj.weight"].t()
    x = x + (gate * up) @ weights["layers.0.mlp.down_proj.weight"].t()
    states = norm(x, "norm.weight")
    return states, states if config.is_output_normed else x


@pytest.mark.parametrize("variant", VARIANTS)
def test_chain_is_what_is_written_out(variant: str) -> None:
    config = Eagle3Config(512, 64, (0, 1, 2), 4, 2, 16, 96, **VARIANTS[variant])  # type: ignore[arg-type]
    weights = random_tensors(eagle3_shapes(config))
    network = Eagle3Network(
        config, weights.__getitem__, dtype=torch.float64, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(3, 9, 64, generator=generator, dtype=torch.float64)
    tokens = torch.randn(12, 64, generator=generator, dtype=torch.float64)
    features = network.features(taps)
    joined = torch.cat(list(taps), dim=-1)
    if config.is_input_normed:
        scale = joined.square().mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
        joined = joined * scale * weights["input_norm.weight"]
    torch.testing.assert_close(features, joined @ weights["fc.weight"].t())
    keys, values = network.keys_values(features[:8], tokens[:8], 0)
    history = PairHistory(keys, values)
    feature, all_features = features[8:9], features
    for pair in range(8, 12):
        state, feature = network.step(feature, tokens[pair : pair + 1], pair, history)
        expected, fed_back = naive_states(config, weights, all_features, tokens[: pair + 1])
        torch.testing.assert_close(state[0], expected[-1], atol=1e-5, rtol=0)
        all_features = torch.cat([all_features, fed_back[-1:]])


def test_config_that_cannot_be_is_refused() -> None:
    for choices in ({"taps": ()}, {"taps": (-1, 2)}, {"num_kv_heads": 3}, {"block_size": 0}):
        fields: dict[str, object] = {"taps": (0, 1, 2), "num_kv_heads": 2} | choices
        with pytest.raises(ConfigurationError):
            Eagle3Config(512, 64, num_heads=4, head_dim=16, intermediate_size=96, **fields)  # type: ignore[arg-type]
