"""Rotation of neighbours equals the rotation of halves that checkpoints were trained with."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dlite_agent.kernels.rotary import RotaryTable, pair_order, rotate


@pytest.mark.parametrize("start", [0, 1000, 60_000])
def test_rotation_equals_transformers(start: int) -> None:
    generator = torch.Generator().manual_seed(start)
    q, k = torch.randn(2, 1, 4, 5, 16, generator=generator)  # [1, H, M, D] twice
    config = Qwen3Config(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    cos, sin = Qwen3RotaryEmbedding(config)(q, torch.arange(start, start + 5)[None])
    wanted = apply_rotary_pos_emb(q, k, cos, sin)
    rotation = RotaryTable(16, 1e4, dtype=torch.float32).rows(start, 5)
    order = pair_order(16)
    for x, turned in zip((q, k), wanted, strict=True):
        ours = rotate(x[0].transpose(0, 1)[..., order].contiguous(), rotation)
        torch.testing.assert_close(ours, turned[0].transpose(0, 1)[..., order])


def test_order_puts_partners_side_by_side() -> None:
    assert pair_order(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_table_grows_without_changing_what_it_gave() -> None:
    table = RotaryTable(8, 1e4, dtype=torch.float32)
    before = table.rows(1_000, 24).clone()
    far = table.rows(5_000, 3)
    assert far.shape == (3, 1, 4)
    torch.testing.assert_close(table.rows(1_000, 24), before, rtol=0.0, atol=0.0)
    torch.testing.assert_close(
        RotaryTable(8, 1e4, dtype=torch.float32).rows(5_000, 3), far, rtol=0.0, atol=0.0
    )


def test_float64_table_has_the_float32_angles() -> None:
    single = RotaryTable(8, 1e4, dtype=torch.float32).rows(500, 4)
    double = RotaryTable(8, 1e4, dtype=torch.float64).rows(500, 4)
    assert double.dtype == torch.complex128
    torch.testing.assert_close(double.to(torch.complex64), single, rtol=0.0, atol=0.0)
