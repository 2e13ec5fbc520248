"""What is written as DeepSpec writes it, and what its form does not express."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.errors import ConfigurationError, DrafterMismatchError
from dlite_agent.models.block_files import block_json, write_block_drafter
from dlite_agent.models.drafter_source import read_block_drafter
from dlite_agent.rope_scaling import RopeScaling
from dlite_agent.testing import tiny_config
from tests.block_models import block_config, block_weights


def test_drafter_that_was_written_is_read_as_it_was(tmp_path: Path) -> None:
    config = block_config(
        tiny_config(),
        head="rnn",
        confidence="token",
        target_fingerprint="a" * 16,
        rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=1024),
    )
    weights = block_weights(config)
    write_block_drafter(tmp_path, config, weights, {"steps": 3})
    read, tensors = read_block_drafter(str(tmp_path), tiny_config())
    assert read == config
    for name, value in weights.items():
        assert torch.equal(tensors[name], value.to(torch.bfloat16))
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"steps": 3}
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(DrafterMismatchError, match="hidden_size"):
        read_block_drafter(str(tmp_path), replace(tiny_config(), hidden_size=32))


@pytest.mark.parametrize(
    "choices",
    [
        {"head": "selector"},
        {"is_anchor_drafted": False},
        {"windows": (8, 0)},
        {"draft_vocab_size": 100},
        {"conv_size": 2},
    ],
)
def test_what_the_form_does_not_express_is_refused(choices: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written as DSpark"):
        block_json(block_config(tiny_config(), **choices))


def test_tensor_of_another_shape_is_not_written(tmp_path: Path) -> None:
    config = block_config(tiny_config())
    weights = block_weights(config)
    with pytest.raises(ConfigurationError, match=r"'norm\.weight' is \(3,\)"):
        write_block_drafter(tmp_path, config, weights | {"norm.weight": torch.ones(3)}, {})
    assert not list(tmp_path.iterdir())
