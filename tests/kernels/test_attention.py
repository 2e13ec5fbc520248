"""Attention over spans against a naive float64 reference, on every path."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dlite_agent.kernels.attention import (
    AttentionPath,
    attend,
    attend_apart,
    merge_partials,
    plan_attention,
)

HEAD_DIM = 16
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 4e-2}
PATHS: list[AttentionPath] = ["matmul", "folded", "grouped", "blocks"]


def reference(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[M, H, D], [K, S, D] twice -> [M, H·D]: keys repeated for every head, all in float64."""
    num_rows, num_heads, _ = q.shape
    num_cached = keys.shape[1]
    group = num_heads // keys.shape[0]
    keys = keys.double().repeat_interleave(group, dim=0)  # [H, S, D]
    values = values.double().repeat_interleave(group, dim=0)
    scores = torch.einsum("mhd,hsd->hms", q.double(), keys)
    positions = torch.arange(num_cached - num_rows, num_cached)
    hidden = torch.arange(num_cached) > positions[:, None]  # [M, S]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hms,hsd->mhd", weights, values).flatten(1)


def random_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys, values for M, G, K, S; keys and values are slices of a pool's rows."""
    num_rows, num_groups, num_kv_heads, num_cached = shape
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_rows, num_groups * num_kv_heads, HEAD_DIM, generator=generator)
    pool = torch.randn(2, num_kv_heads, num_cached + 50, HEAD_DIM, generator=generator)
    q, pool = q.to(dtype) * HEAD_DIM**-0.25, pool.to(dtype)
    return q, pool[0, :, 20 : 20 + num_cached], pool[1, :, 20 : 20 + num_cached]


def cut(keys: Tensor, values: Tensor, ends: list[int]) -> list[tuple[Tensor, Tensor]]:
    edges = [0, *ends, keys.shape[1]]
    return [(keys[:, low:high], values[:, low:high]) for low, high in pairwise(edges)]


def check(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    path: AttentionPath | None,
    ends: list[int],
) -> None:
    num_rows, num_groups, num_kv_heads, _ = shape
    q, keys, values = random_inputs(shape, dtype, seed=sum(shape))
    spans = cut(keys, values, ends)
    rows = [span[0].shape[1] for span in spans]
    query_shape = (num_rows, num_groups * num_kv_heads, num_kv_heads)
    out = attend(q, spans, plan_attention(query_shape, rows, q, path))
    assert out.dtype == dtype
    wanted = reference(q, keys, values)
    torch.testing.assert_close(out.double(), wanted, rtol=0.0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("num_groups", [1, 2, 4, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
def test_attention_equals_the_reference(
    num_rows: int, num_groups: int, path: AttentionPath | None, dtype: torch.dtype
) -> None:
    check((num_rows, num_groups, 2, num_rows), dtype, path, [])
    check((num_rows, num_groups, 2, num_rows + 300), dtype, path, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("path", [None, *PATHS])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 33])
@pytest.mark.parametrize("before_end", [0, 1, 20, 40])
def test_spans_may_end_anywhere(
    before_end: int, num_rows: int, path: AttentionPath | None, dtype: torch.dtype
) -> None:
    """Also inside the queries' own rows, where a part would have rows that see nothing of it."""
    num_cached = 200 + num_rows
    ends = [64, 65] if before_end == 0 else [64, num_cached - before_end]
    check((num_rows, 2, 2, num_cached), dtype, path, ends)


@pytest.mark.parametrize("path", PATHS)
def test_own_rows_may_lie_in_three_spans(path: AttentionPath) -> None:
    check((33, 2, 1, 33), torch.float64, path, [5, 6])
    check((33, 2, 1, 50), torch.float64, path, [20, 21, 49])


@pytest.mark.parametrize("path", PATHS)
def test_many_rows_behind_a_long_history(path: AttentionPath) -> None:
    check((256, 2, 1, 700), torch.float64, path, [256, 512])


def test_large_scores_do_not_overflow() -> None:
    q, keys, values = random_inputs((8, 2, 2, 100), torch.float32, seed=0)
    q = q * 1000
    wanted = reference(q, keys, values)
    for path in PATHS:
        out = attend(q, [(keys, values)], plan_attention((8, 4, 2), [100], q, path))
        torch.testing.assert_close(out.double(), wanted, rtol=0.0, atol=1e-3)


def test_merging_is_the_softmax_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 30, generator=generator, dtype=torch.float64) * 5
    values = torch.randn(2, 30, 4, generator=generator, dtype=torch.float64)
    partials = [
        (
            scores[..., low:high].softmax(-1) @ values[:, low:high],
            scores[..., low:high].logsumexp(-1),
        )
        for low, high in ((0, 1), (1, 20), (20, 30))
    ]
    torch.testing.assert_close(merge_partials(partials), scores.softmax(-1) @ values)


def test_one_part_is_merged_as_it_is() -> None:
    out, lse = torch.ones(1, 2, 3), torch.zeros(1, 2)
    assert merge_partials([(out, lse)]) is out


def test_path_follows_type_and_size() -> None:
    single, half = torch.empty(0, 56), torch.empty(0, 56, dtype=torch.bfloat16)
    elsewhere = torch.empty(0, 56, device="meta")

    def path(num_rows: int, num_cached: int, like: Tensor, num_heads: int = 4) -> str:
        return plan_attention((num_rows, num_heads, 2), [num_cached], like).path

    assert path(1, 3_000, single) == "matmul"
    assert path(1, 10_000, single) == "folded"
    assert path(8, 1_000, single) == "grouped"
    assert path(8, 30_000, single) == "folded"
    assert path(256, 256, single) == "grouped"
    assert path(256, 3_000, single) == "folded"
    assert path(1, 300, half) == "grouped"
    assert path(1, 300, half, num_heads=14) == "folded"
    assert path(8, 300, half) == "folded"
    assert path(33, 300, half) == "grouped"
    assert path(8, 300, elsewhere) == "matmul"
    assert path(256, 30_000, elsewhere) == "blocks"


@pytest.mark.parametrize("num_rows", [1, 8, 40])
@pytest.mark.parametrize("ends", [[], [100, 256]])
def test_apart_is_the_same_attention_and_knows_no_pages(num_rows: int, ends: list[int]) -> None:
    q, keys, values = random_inputs((num_rows, 2, 2, 300), torch.float32, 5)
    out = attend_apart(q, cut(keys, values, ends))
    torch.testing.assert_close(
        out.double(), reference(q, keys, values), rtol=0.0, atol=TOLERANCE[torch.float32]
    )
    assert torch.equal(out, attend_apart(q, [(keys, values)]))


def test_apart_does_not_depend_on_the_queries_beside() -> None:
    q, keys, values = random_inputs((8, 2, 2, 300), torch.bfloat16, 6)
    together = attend_apart(q, [(keys, values)])
    for first in range(8):
        seen = 300 - 7 + first
        alone = attend_apart(q[first : first + 1], [(keys[:, :seen], values[:, :seen])])
        assert torch.equal(together[first : first + 1], alone)
