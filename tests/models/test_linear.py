"""Both layouts of a weight give the plain product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.linear import Int8Linear, PackedLinear, TransposedLinear, make_linear


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_the_plain_weight_before_and_after_the_first_product(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    linear = make_linear(weight)
    assert torch.equal(linear.parts().weight, weight)
    linear(torch.ones(2, 24, dtype=dtype))
    assert torch.equal(linear.parts().weight, weight)


def test_parts_of_int8_restore_it() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = Int8Linear(weight)
    levels, factors, bias = linear.parts()
    assert factors is not None
    assert bias is None
    assert torch.equal(levels.float() * factors.float()[:, None], linear.restored())


def test_layout_follows_the_type() -> None:
    assert isinstance(make_linear(torch.ones(4, 2)), TransposedLinear)
    assert isinstance(make_linear(torch.ones(4, 2, dtype=torch.bfloat16)), PackedLinear)
    assert make_linear(torch.ones(4, 2)).nbytes == 32


@pytest.mark.parametrize("num_rows", [1, 8, 16, 17, 256])
def test_int8_is_off_by_half_a_step_of_each_channel_at_most(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 1, 64)[:, None]  # channels of very different size
    weight = (torch.randn(64, 96, generator=generator) * scale).to(torch.bfloat16)
    weight[5] = 0.0
    linear = make_linear(weight.clone(), "int8")
    assert isinstance(linear, Int8Linear)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    error = (linear.restored() - weight.float()).abs()
    assert bool((error <= 0.5 * step * (1 + 2**-7)).all())
    assert torch.equal(linear.restored()[5], torch.zeros(96))
    x = torch.randn(num_rows, 96, generator=generator).to(torch.bfloat16)
    exact = x.double() @ linear.restored().double().t()
    size = (x.double().abs() @ linear.restored().double().abs().t()) * 2**-7
    assert bool(((linear(x).double() - exact).abs() <= size).all())
    residual = torch.randn(num_rows, 64, generator=generator).to(torch.bfloat16)
    assert torch.equal(linear.add_to(residual, x), linear(x) + residual)


def test_int8_takes_half_the_bytes_of_bfloat16() -> None:
    weight = torch.ones(128, 512, dtype=torch.bfloat16)
    assert make_linear(weight, "int8").nbytes == 128 * 512 + 2 * 128
    assert make_linear(weight).nbytes == 2 * 128 * 512


def test_int8_keeps_a_weight_that_is_not_a_number_visible() -> None:
    weight = torch.ones(4, 32, dtype=torch.bfloat16)
    weight[2, 3] = float("nan")
    out = make_linear(weight, "int8")(torch.ones(1, 32, dtype=torch.bfloat16))
    assert out.isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_for_bfloat16_only(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match="bfloat16"):
        make_linear(torch.ones(4, 2, dtype=dtype), "int8")
