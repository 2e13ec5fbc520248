"""Cost tables on disk: found again, and never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dlite_agent.config import EngineConfig
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.cost_cache import cost_key, read_cost_table, write_cost_table
from dlite_agent.models.cost_table import CostTable
from dlite_agent.testing import tiny_qwen3

KEY: dict[str, str | int] = {"fingerprint": "00ff", "threads": 2}
TABLE = CostTable((1, 8), (0.5, 0.75), context_turn_s=1e-6, context_row_s=2e-6, turn_s=0.1)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_table_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert read_cost_table(folder, KEY) is None
    assert write_cost_table(folder, KEY, TABLE)
    found = read_cost_table(folder, KEY)
    assert found is not None
    assert found.origin == "cached"
    assert (found.rows, found.seconds, found.turn_s) == (TABLE.rows, TABLE.seconds, TABLE.turn_s)
    assert read_cost_table(folder, {**KEY, "threads": 1}) is None
    assert only_file(folder).suffix == ".json"


def test_writing_again_replaces_the_file(tmp_path: Path) -> None:
    assert write_cost_table(tmp_path, KEY, TABLE)
    assert write_cost_table(tmp_path, KEY, CostTable((1,), (9.0,)))
    found = read_cost_table(tmp_path, KEY)
    assert found is not None
    assert found.step_s == 9.0
    only_file(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[" * 50_000,
        "[]",
        "null",
        '{"format": 1}',
        json.dumps({"format": 2, "key": KEY, "table": {}}),
        json.dumps({"format": 1, "key": {}, "table": {}}),
        json.dumps({"format": 1, "key": KEY, "table": {"rows": [1], "seconds": ["x"]}}),
        json.dumps({"format": 1, "key": KEY, "table": {"rows": [1, 2], "seconds": [2, 1]}}),
        "\x00" * 100,
        " " * 70_000,
    ],
)
def test_what_is_not_our_table_is_ignored_and_replaced(tmp_path: Path, text: str) -> None:
    write_cost_table(tmp_path, KEY, TABLE)
    only_file(tmp_path).write_text(text, encoding="utf-8")
    assert read_cost_table(tmp_path, KEY) is None
    assert write_cost_table(tmp_path, KEY, TABLE)
    assert read_cost_table(tmp_path, KEY) is not None


def test_bytes_that_are_no_text_and_a_folder_in_its_place_are_ignored(tmp_path: Path) -> None:
    write_cost_table(tmp_path, KEY, TABLE)
    path = only_file(tmp_path)
    path.write_bytes(b"\xff\xfe{")
    assert read_cost_table(tmp_path, KEY) is None
    path.unlink()
    path.mkdir()
    assert read_cost_table(tmp_path, KEY) is None
    assert not write_cost_table(tmp_path, KEY, TABLE)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # nothing half written


def test_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("here", encoding="utf-8")
    assert not write_cost_table(blocked / "folder", KEY, TABLE)
    assert read_cost_table(blocked / "folder", KEY) is None


def test_key_tells_models_devices_and_settings_apart() -> None:
    target = tiny_qwen3()
    key = cost_key(target)
    assert key["dtype"] == "float32"
    assert key["threads"] == torch.get_num_threads()
    assert key["torch"] == torch.__version__
    assert key != cost_key(tiny_qwen3(dtype="float64"))
    assert key != cost_key(tiny_qwen3(seed=1))
    if target.use_kernels(load_row_kernels(EngineConfig().cache_folder())):
        assert key != cost_key(target)
    assert json.loads(json.dumps(key)) == key
