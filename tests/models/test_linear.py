"""Both layouts of a weight give the plain product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dlite_agent.models.linear import PackedLinear, TransposedLinear, make_linear


@pytest.mark.parametrize("num_rows", [1, 2, 8, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_and_sum_equal_torch(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    x = torch.randn(num_rows, 24, generator=generator).to(dtype)
    residual = torch.randn(num_rows, 40, generator=generator).to(dtype)
    linear = make_linear(weight)
    wanted = functional.linear(x, weight)
    if dtype == torch.bfloat16:
        assert torch.equal(linear(x), wanted), "the packed product is bitwise the same"
        exact = residual.double() + functional.linear(x.double(), weight.double())
        total = linear.add_to(residual, x).double()  # rounded once, not twice
        torch.testing.assert_close(total, exact, rtol=2**-8, atol=1e-4)
    else:
        torch.testing.assert_close(linear(x), wanted)
        torch.testing.assert_close(linear.add_to(residual, x), residual + wanted)


def test_operands_are_not_changed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = make_linear(torch.ones(4, 4, dtype=dtype))
        x, residual = torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype)
        linear.add_to(residual, x)
        assert torch.equal(x, torch.ones(2, 4, dtype=dtype))
        assert torch.equal(residual, x)


def test_layout_follows_the_type() -> None:
    assert isinstance(make_linear(torch.ones(4, 2)), TransposedLinear)
    assert isinstance(make_linear(torch.ones(4, 2, dtype=torch.bfloat16)), PackedLinear)
    assert make_linear(torch.ones(4, 2)).nbytes == 32
