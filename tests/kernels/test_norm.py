"""RMSNorm against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dlite_agent.kernels.norm import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)],
)
@pytest.mark.parametrize("factor", [1e-4, 1.0, 1e3])
def test_norm_equals_torch(dtype: torch.dtype, tolerance: float, factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 3, 24, generator=generator) * factor).to(dtype)
    weight = torch.randn(24, generator=generator).to(dtype)
    ours = RMSNorm(weight, 1e-6, dtype)(x)
    assert ours.dtype == dtype
    wanted = functional.rms_norm(x.double(), (24,), weight.double(), 1e-6)
    torch.testing.assert_close(ours.double(), wanted, rtol=0.0, atol=tolerance)


def test_row_of_zeros_stays_zero() -> None:
    assert RMSNorm(torch.ones(8), 1e-6, torch.float32)(torch.zeros(2, 8)).abs().max() == 0


def test_input_is_not_changed() -> None:
    x = torch.ones(2, 8)
    RMSNorm(torch.full((8,), 3.0), 1e-6, torch.float32)(x)
    assert torch.equal(x, torch.ones(2, 8))


def test_result_may_be_wider_than_the_input() -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert RMSNorm(torch.ones(8), 1e-6, torch.float32)(x).dtype == torch.float32
