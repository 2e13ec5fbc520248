"""Stretched frequencies equal those of transformers, near and far beyond the original length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dlite_agent.kernels.rope_frequencies import rope_frequencies
from dlite_agent.kernels.rotary import RotaryTable
from dlite_agent.rope_scaling import RopeScaling

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3 with another ramp": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 0.75,
    },
    "yarn with scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn with a broken range": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 1000,
        "truncate": False,
    },
    "yarn whose range is a point": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 7,
    },
}


def their_rotary(kind: str, head_dim: int, theta: float) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=32_768,
        rope_parameters=KINDS[kind] | {"rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str, head_dim: int, theta: float) -> None:
    theirs = their_rotary(kind, head_dim, theta)
    ours, factor = rope_frequencies(head_dim, theta, RopeScaling.parse(KINDS[kind]))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0.0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("start", [0, 8190, 131_000])
@pytest.mark.parametrize("kind", KINDS)
def test_rotations_are_those_of_transformers_beyond_the_original_length(
    kind: str, start: int
) -> None:
    cos, sin = their_rotary(kind, 64, 1e4)(
        torch.empty(0, dtype=torch.float64), torch.arange(start, start + 5)[None]
    )
    scaling = RopeScaling.parse(KINDS[kind])
    table = RotaryTable(64, 1e4, dtype=torch.float64, scaling=scaling)
    rotation = table.rows(start, 5).squeeze(1)
    # one bit of a float32 frequency turns 131,000 positions by 0.01
    atol = 1e-6 + start * 2**-23
    torch.testing.assert_close(rotation.real, cos[0, :, :32], rtol=0.0, atol=atol)
    torch.testing.assert_close(rotation.imag, sin[0, :, :32], rtol=0.0, atol=atol)


def test_base_of_the_scaling_wins() -> None:
    ours, _ = rope_frequencies(8, 1e4, RopeScaling(rope_theta=1e6))
    plain, _ = rope_frequencies(8, 1e6, RopeScaling())
    assert torch.equal(ours, plain)


def test_stretching_makes_kinds_differ() -> None:
    given = [rope_frequencies(64, 1e4, RopeScaling.parse(kind))[0] for kind in KINDS.values()]
    for number, frequencies in enumerate(given):
        for other in given[:number]:
            assert not torch.equal(frequencies, other)
