"""Each compiled kernel against float64, and each row against itself in other company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.kernels.native import build_library
from dlite_agent.kernels.norm import HeadScale, RMSNorm
from dlite_agent.kernels.rotary import RotaryTable, rotate
from dlite_agent.kernels.row_kernels import HeadShape, PartRows, RowPlan, load_row_kernels
from tests.kernels.native_library import row_kernels

TYPES = [torch.float32, torch.bfloat16]
PATHS = [
    pytest.param(torch.float32, False, id="float32"),
    pytest.param(torch.bfloat16, True, id="bfloat16-tiles"),
    pytest.param(torch.bfloat16, False, id="bfloat16-vectors"),
]
Runs = list[tuple[int, int]]
POOL_ROWS = 2304


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(got: Tensor, exact: Tensor, *, atol: float = 3e-6) -> None:
    """Equal up to the rounding of the type, and a little of float32."""
    rtol = 2**-8 if got.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 56, 224, 576])
def test_norm_adds_and_normalises(dtype: torch.dtype, size: int) -> None:
    kernels, weight = row_kernels(), 1 + 0.1 * random(size, seed=1)
    x, delta = random(5, size, dtype=dtype), random(5, size, seed=2, dtype=dtype)
    out, total = torch.empty_like(x), x.clone()
    kernels.norm(total, None, weight, 1e-6, out)
    assert torch.equal(total, x)
    wanted = functional.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    assert_rounded(out, wanted)
    kernels.norm(total, delta, weight, 1e-6, out)
    assert torch.equal(total, x + delta)
    wanted = functional.rms_norm(total.double(), (size,), weight.double(), 1e-6)
    assert_rounded(out, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 16, 20, 640])
def test_swiglu(dtype: torch.dtype, size: int) -> None:
    gate_up = 8 * random(3, 2 * size, dtype=dtype)
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = 200.0, -200.0, -88.5
    out = torch.empty(3, size, dtype=dtype)
    row_kernels().swiglu(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_rounded(out, functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(4, 2, 56), (9, 3, 64), (2, 1, 128), (7, 1, 24)])
@pytest.mark.parametrize("is_normed", [True, False])
def test_heads_are_normed_rotated_and_placed(
    dtype: torch.dtype, shape: tuple[int, int, int], *, is_normed: bool
) -> None:
    heads = HeadShape(*shape)
    num_heads, num_kv_heads, head_dim = heads
    turned = num_heads + num_kv_heads
    weight = 1 + 0.1 * random(turned, head_dim, seed=1)
    norm = RMSNorm(weight, 1e-6, torch.float32) if is_normed else HeadScale(weight)
    rotation = RotaryTable(head_dim, 1e4, dtype=torch.float32).rows(70, 5)
    slots = [3, 4, 5, 900, 901]
    keys = torch.full((num_kv_heads, POOL_ROWS, head_dim), 7.0, dtype=dtype)
    values = keys.clone()
    qkv = random(5, (turned + num_kv_heads) * head_dim, dtype=dtype)
    plan = RowPlan(row_kernels(), heads, rotation, slots, [])
    plan.place(qkv, (keys, values), norm)
    by_head = qkv.double().view(5, -1, head_dim)
    exact = by_head[:, :turned] * weight.double()
    if is_normed:
        exact = functional.rms_norm(by_head[:, :turned], (head_dim,), eps=1e-6) * weight.double()
    exact = rotate(exact, rotation.to(torch.complex128))
    assert_rounded(plan.queries, exact[:, :num_heads])
    assert_rounded(keys[:, slots].transpose(0, 1), exact[:, num_heads:])
    assert torch.equal(values[:, slots].transpose(0, 1), qkv.view(5, -1, head_dim)[:, turned:])
    others = [row for row in range(POOL_ROWS) if row not in slots]
    for half in (keys, values):
        assert bool((half[:, others] == 7.0).all()), "nobody else's rows"


def attended(
    shape: HeadShape,
    pool: tuple[Tensor, Tensor],
    q: Tensor,
    sessions: list[tuple[int, Runs]],
    *,
    uses_tiles: bool = True,
) -> Tensor:
    parts, first = [], 0
    for num_rows, runs in sessions:
        parts.append(PartRows(first, num_rows, runs))
        first += num_rows
    rotation = torch.zeros(first, 1, shape.head_dim // 2, dtype=torch.complex64)
    kernels = row_kernels(uses_tiles=uses_tiles)
    plan = RowPlan(kernels, shape, rotation, [0] * first, parts)
    plan.queries.copy_(q)
    out = torch.full((first, shape.num_heads * shape.head_dim), float("nan"), dtype=pool[0].dtype)
    plan.attend(pool, out)
    return out


def exact_attention(pool: tuple[Tensor, Tensor], q: Tensor, runs: Runs) -> Tensor:
    """[M, H·D] float64, keys and values repeated."""
    num_rows, num_heads = q.shape[:2]
    halves = [torch.cat([half[:, at : at + n] for at, n in runs], dim=1).double() for half in pool]
    keys, values = (half.repeat_interleave(num_heads // half.shape[0], dim=0) for half in halves)
    scores = torch.einsum("mhd,hsd->hms", q.double(), keys)
    scores += torch.full((num_rows, keys.shape[1]), float("-inf")).triu(
        keys.shape[1] - num_rows + 1
    )
    return torch.einsum("hms,hsd->mhd", scores.softmax(-1), values).flatten(1)


def random_pool(shape: HeadShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = (shape.num_kv_heads, POOL_ROWS, shape.head_dim)
    return random(*size, seed=3, dtype=dtype), random(*size, seed=4, dtype=dtype)


@pytest.mark.parametrize(("dtype", "uses_tiles"), PATHS)
@pytest.mark.parametrize(
    "shape", [(4, 2, 56), (2, 2, 64), (9, 3, 64), (7, 1, 64), (16, 8, 128), (7, 1, 24), (8, 2, 256)]
)
@pytest.mark.parametrize(
    ("num_rows", "runs"),
    [
        (1, [(7, 1)]),
        (1, [(0, 1030)]),
        (2, [(3, 64)]),
        (3, [(5, 3)]),
        (8, [(10, 300), (700, 501), (2000, 2)]),
        (16, [(0, 512), (1024, 16)]),
        (16, [(40, 519)]),
        (16, [(900, 16)]),
    ],
)
def test_attention_over_runs(
    dtype: torch.dtype, shape: tuple[int, int, int], num_rows: int, runs: Runs, *, uses_tiles: bool
) -> None:
    heads = HeadShape(*shape)
    pool = random_pool(heads, dtype)
    q = 2 * random(num_rows, heads.num_heads, heads.head_dim) * heads.head_dim**-0.5
    got = attended(heads, pool, q, [(num_rows, runs)], uses_tiles=uses_tiles)
    assert_rounded(got, exact_attention(pool, q, runs), atol=2e-5)


@pytest.mark.parametrize(("dtype", "uses_tiles"), PATHS)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 7])
def test_a_row_comes_out_the_same_in_any_company(
    dtype: torch.dtype, num_threads: int, groups: int, *, uses_tiles: bool
) -> None:
    shape = HeadShape(2 * groups, 2, 64)
    pool = random_pool(shape, dtype)
    sessions: list[tuple[int, Runs]] = [
        (8, [(0, 600), (700, 500)]),
        (1, [(1200, 513)]),
        (3, [(2000, 3)]),
        (2, [(1500, 100)]),
        (16, [(1600, 150)]),
    ]
    q = random(sum(num_rows for num_rows, _ in sessions), shape.num_heads, shape.head_dim)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = attended(shape, pool, q, sessions, uses_tiles=uses_tiles)
    finally:
        torch.set_num_threads(before)
    row = 0
    for num_rows, runs in sessions:
        for i in range(num_rows):  # each row alone, before the rows behind it exist
            at, count = runs[-1]
            seen = [*runs[:-1], (at, count - num_rows + 1 + i)]
            alone = attended(shape, pool, q[row : row + 1], [(1, seen)], uses_tiles=uses_tiles)
            assert torch.equal(alone[0], together[row])
            row += 1


def test_rows_behind_the_keys_are_never_read() -> None:
    shape = HeadShape(2, 1, 16)
    keys, values = random_pool(shape, torch.float32)
    keys[:, 50:], values[:, 50:] = float("nan"), float("nan")
    got = attended(shape, (keys, values), random(2, 2, 16), [(2, [(0, 50)])])
    assert not got.isnan().any()


def test_not_a_number_stays_visible() -> None:
    x = random(2, 32, dtype=torch.bfloat16)
    x[1, 3] = float("nan")
    out = torch.empty_like(x)
    row_kernels().norm(x, None, torch.ones(32), 1e-6, out)
    assert out.isnan().any(dim=1).tolist() == [False, True]


def test_types_and_heads_that_are_not_known_are_declined() -> None:
    kernels, cpu = row_kernels(), torch.device("cpu")
    assert kernels.supports(torch.bfloat16, cpu, HeadShape(4, 2, 64))
    assert not kernels.supports(torch.float64, cpu, HeadShape(4, 2, 64))
    assert not kernels.supports(torch.bfloat16, torch.device("cuda"), HeadShape(4, 2, 64))
    assert not kernels.supports(torch.bfloat16, cpu, HeadShape(4, 2, 512))


def test_without_a_folder_or_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load_row_kernels(None) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_row_kernels(tmp_path) is None


def test_compiler_that_fails_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert build_library(tmp_path / "cache") is None
    assert "native_kernels=off" in caplog.text
