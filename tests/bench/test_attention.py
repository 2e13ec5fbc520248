"""The micro-benchmark measures every path and says which one is taken."""

from __future__ import annotations

import torch

from dlite_agent.bench.attention import Heads, bench_attention, measure_shape


def test_every_path_of_a_shape_is_measured() -> None:
    heads = Heads("small", num_kv_heads=1, num_groups=2, head_dim=16)
    figure = measure_shape(heads, torch.float32, 2, 64, repeats=5)
    assert set(figure.median_us) == {"matmul", "folded", "grouped", "blocks", "repeated"}
    assert all(value > 0 for value in figure.median_us.values())
    assert figure.chosen == "grouped"
    assert figure.chosen_over_best >= 1.0
    assert (figure.dtype, figure.num_rows, figure.num_cached) == ("float32", 2, 64)


def test_a_quick_bench_has_a_row_for_every_shape() -> None:
    result = bench_attention(repeats=2, is_quick=True)
    shapes = {(row["dtype"], row["cached"], row["rows"]) for row in result.rows}
    assert len(shapes) == len(result.rows) == 10
    assert result.conditions["torch"] == torch.__version__
    assert all(row[f"{row['chosen']}_us"] for row in result.rows)
