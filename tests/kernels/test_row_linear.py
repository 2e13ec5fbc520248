"""Compiled products against float64, and each row against itself in other company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.large_pages import LargePageMemory
from dlite_agent.kernels.row_linear import RowLinear, WeightParts
from tests.kernels.native_library import row_kernels

TYPES = [torch.bfloat16, torch.int8, torch.float32]
PATHS = [pytest.param(True, id="tiles"), pytest.param(False, id="vectors")]
ROWS = 270  # more than one pass


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts_of(dtype: torch.dtype, outs: int, ins: int) -> WeightParts:
    weight, bias = random(outs, ins) * ins**-0.5, random(outs, seed=1)
    if dtype == torch.int8:
        levels = (weight * 40 * ins**0.5).clamp(-127, 127).to(torch.int8)
        return WeightParts(levels, (1 + random(outs, seed=2).abs()) * 0.02 * ins**-0.5, bias)
    return WeightParts(weight.to(dtype), None, bias)


def packed(parts: WeightParts, *, uses_tiles: bool, is_gated: bool = False) -> RowLinear:
    kernels = row_kernels(uses_tiles=uses_tiles)
    return RowLinear(kernels, parts, LargePageMemory(), is_gated=is_gated)


def activations(dtype: torch.dtype, ins: int, rows: int = ROWS) -> Tensor:
    return random(rows, ins, seed=3).to(torch.float32 if dtype == torch.float32 else torch.bfloat16)


def exact(parts: WeightParts, x: Tensor, *, is_gated: bool = False) -> Tensor:
    weight = parts.weight.double()
    if parts.factors is not None:
        weight = weight * parts.factors.double()[:, None]
    out = x.double() @ weight.t()
    if parts.bias is not None:
        out = out + parts.bias.double()
    if not is_gated:
        return out
    gate, up = out.chunk(2, dim=1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("uses_tiles", PATHS)
@pytest.mark.parametrize(("outs", "ins"), [(2, 64), (70, 576), (160, 320)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_product_is_exact_up_to_rounding(
    dtype: torch.dtype, outs: int, ins: int, *, uses_tiles: bool, is_gated: bool
) -> None:
    parts, x = parts_of(dtype, outs, ins), activations(dtype, ins)
    got = packed(parts, uses_tiles=uses_tiles, is_gated=is_gated)(x)
    rtol, atol = (3e-6, 1e-5) if dtype == torch.float32 else (2**-8, 1e-3)
    torch.testing.assert_close(
        got.double(), exact(parts, x, is_gated=is_gated), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("uses_tiles", PATHS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_bit_for_bit_beside_any_number_of_others(
    dtype: torch.dtype, num_threads: int, *, uses_tiles: bool
) -> None:
    ins = 1216  # more than two chunks of a panel
    linear = packed(parts_of(dtype, 100, ins), uses_tiles=uses_tiles)
    x = activations(dtype, ins)
    all_rows = linear(x)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for count in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 255, 257):
            assert torch.equal(linear(x[:count]), all_rows[:count]), count
            assert torch.equal(linear(x[-count:]), all_rows[-count:]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", TYPES)
def test_residual_is_added_before_rounding(dtype: torch.dtype) -> None:
    parts, x = parts_of(dtype, 48, 64)._replace(bias=None), activations(dtype, 64, 5)
    residual = random(5, 48, seed=4).to(x.dtype)
    linear = packed(parts, uses_tiles=True)
    wanted = residual.double() + exact(parts, x)
    rtol, atol = (3e-6, 1e-5) if dtype == torch.float32 else (2**-8, 1e-4)
    torch.testing.assert_close(linear(x, residual).double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_wide_results_are_float32(dtype: torch.dtype) -> None:
    parts, x = parts_of(dtype, 48, 64), activations(dtype, 64, 5)
    linear = RowLinear(row_kernels(), parts, LargePageMemory(), is_wide=True)
    torch.testing.assert_close(linear(x), exact(parts, x).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("outlier", [1.0, 1000.0])
def test_int8_loses_less_of_activations_than_bfloat16_did(outlier: float) -> None:
    """Two digits of the row's largest element, against rounding each element to bfloat16."""
    parts = parts_of(torch.int8, 96, 1536)._replace(bias=None)
    x = random(16, 1536, seed=3)
    x[:, 7] *= outlier
    rounded = x.to(torch.bfloat16)
    got = RowLinear(row_kernels(), parts, LargePageMemory(), is_wide=True)(rounded)
    lost = (got - exact(parts, rounded)).square().mean()
    lost_before = (exact(parts, rounded) - exact(parts, x)).square().mean()
    assert float(lost) < 0.25 * float(lost_before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_the_weight_come_back_exactly(dtype: torch.dtype) -> None:
    parts, ids = parts_of(dtype, 70, 96), torch.tensor([69, 0, 16, 31, 33, 0])
    linear = packed(parts, uses_tiles=True)
    assert torch.equal(linear.rows(ids), parts.weight[ids])
    for outside in (-1, 70):
        with pytest.raises(IndexError, match="outside"):
            linear.rows(torch.tensor([3, outside]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("uses_tiles", PATHS)
def test_not_a_number_stays_visible_in_its_row(dtype: torch.dtype, *, uses_tiles: bool) -> None:
    x = activations(dtype, 64, 4)
    x[1, 3], x[2, 60] = float("nan"), float("inf")
    got = packed(parts_of(dtype, 40, 64), uses_tiles=uses_tiles)(x)
    assert got.isfinite().all(dim=1).tolist() == [True, False, False, True]


def test_int8_reads_half_the_bytes_and_zero_rows_stay_zero() -> None:
    parts = parts_of(torch.int8, 64, 128)._replace(bias=None)
    linear = packed(parts, uses_tiles=True)
    assert linear.nbytes == 64 * 128 + 4 * 64
    assert not linear(torch.zeros(2, 128, dtype=torch.bfloat16)).any()


def test_types_and_sizes_that_are_not_known() -> None:
    assert RowLinear.fits(torch.bfloat16, 96)
    assert not RowLinear.fits(torch.bfloat16, 112)
    assert not RowLinear.fits(torch.int8, 96)
    assert RowLinear.fits(torch.float32, 112)
    assert not RowLinear.fits(torch.float64, 128)
