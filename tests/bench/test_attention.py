"""The micro-benchmark measures every path and says which one is taken."""

from __future__ import annotations

import json

import pytest
import torch

from dlite_agent.bench.attention import Heads, main, measure_shape


def test_every_path_of_a_shape_is_measured() -> None:
    heads = Heads("small", num_kv_heads=1, num_groups=2, head_dim=16)
    figure = measure_shape(heads, torch.float32, 2, 64, repeats=5)
    assert set(figure.median_us) == {"matmul", "folded", "grouped", "blocks", "repeated"}
    assert all(value > 0 for value in figure.median_us.values())
    assert figure.chosen == "grouped"
    assert figure.chosen_over_best >= 1.0
    assert (figure.dtype, figure.num_rows, figure.num_cached) == ("float32", 2, 64)


def test_table_and_json_hold_the_same_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--repeats", "2"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["conditions"]["torch"] == torch.__version__
    assert main(["--quick", "--repeats", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(content["figures"]) + 3, "conditions, header and the worst choice"
    assert all(figure["chosen"] in lines[2 + n] for n, figure in enumerate(content["figures"]))
