"""A DLite config: what it accepts, and what it writes and reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlite_agent.errors import (
    ConfigurationError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes, even_taps
from dlite_agent.models.dlite_files import read_dlite, write_dlite
from dlite_agent.testing import tiny_config
from tests.dlite_models import dlite_config, random_weights


def test_taps_are_spread_evenly_from_the_first_layer_to_the_last() -> None:
    assert even_taps(36, 14) == (0, 3, 5, 8, 11, 13, 16, 19, 22, 24, 27, 30, 32, 35)
    assert even_taps(8, 14) == tuple(range(8))
    assert even_taps(28, 2) == (0, 27)
    with pytest.raises(ConfigurationError, match="num_taps is 1"):
        even_taps(28, 1)


def test_default_drafter_of_a_target_has_its_shape() -> None:
    config = DLiteConfig.for_target(tiny_config(num_layers=4), "abc", num_layers=3)
    assert config.taps == (0, 1, 2, 3)
    assert config.rank == 64 // 5
    assert (config.num_heads, config.head_dim, config.num_layers) == (4, 16, 3)
    assert config.num_context == 4
    assert DLiteConfig.from_json(json.loads(json.dumps(config.to_json())), "x") == config


@pytest.mark.parametrize(
    ("choices", "named"),
    [
        ({"head": "markov"}, "head is 'markov'"),
        ({"composition": "sum"}, "composition is 'sum'"),
        ({"position_feature": "rope"}, "position_feature is 'rope'"),
        ({"block_size": 0}, "block_size is 0"),
        ({"taps": (1, 0)}, "taps is"),
        ({"taps": (0, 2)}, "taps is"),
        ({"taps": ()}, "taps is"),
        ({"taps": (-1, 1)}, "taps="),
        ({"num_kv_heads": 3}, "num_kv_heads=3"),
        ({"heads": 4}, "no choice 'heads'"),
    ],
)
def test_wrong_choice_is_refused_by_name(choices: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        dlite_config(tiny_config(), **choices)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "architectures is"),
        ({"format_version": 2}, "format_version is 2"),
        ({"colour": "red"}, "unknown fields \\['colour'\\]"),
        ({"rank": None}, "missing fields \\['rank'\\]"),
        ({"taps": 3}, "not iterable"),
        ({"head": "markov"}, "head is 'markov'"),
    ],
)
def test_foreign_config_is_refused_with_the_reason(change: dict[str, object], named: str) -> None:
    content = dlite_config(tiny_config()).to_json() | change
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(UnsupportedCheckpointError, match=named):
        DLiteConfig.from_json(content, "here")


def test_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = dlite_config(tiny_config())
    weights = random_weights(config)
    write_dlite(tmp_path, config, weights, {"steps": 3})
    read, tensors = read_dlite(tmp_path)
    assert read == config
    assert json.loads((tmp_path / "provenance.json").read_text()) == {"steps": 3}
    assert set(tensors) == set(weights)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, weights[name].to(torch.bfloat16))
    assert not list(tmp_path.glob("*.part"))


def test_damaged_folder_is_refused_and_the_tensor_named(tmp_path: Path) -> None:
    config = dlite_config(tiny_config())
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        read_dlite(tmp_path)
    write_dlite(tmp_path, config, random_weights(config), {})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    changed = {
        "'head.bias' is missing": {k: v for k, v in tensors.items() if k != "head.bias"},
        "'extra' is unknown": tensors | {"extra": torch.ones(1)},
        r"'norm.weight' is \[3\]": tensors | {"norm.weight": torch.ones(3)},
        "'norm.weight' holds what is no finite": tensors
        | {"norm.weight": torch.full((64,), float("nan"))},
    }
    for named, content in changed.items():
        save_file(content, path)
        with pytest.raises(UnsupportedCheckpointError, match=named):
            read_dlite(tmp_path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedCheckpointError, match="cannot be read"):
        read_dlite(tmp_path)
    path.unlink()
    with pytest.raises(ModelNotFoundError, match=r"has no model\.safetensors"):
        read_dlite(tmp_path)


def test_every_choice_has_its_own_tensors() -> None:
    full = dlite_shapes(dlite_config(tiny_config(), position_feature="log-absolute"))
    assert full["position_proj.weight"] == (64, 16)
    none = dlite_shapes(dlite_config(tiny_config(), head="none"))
    assert not [name for name in none if name.startswith("head.")]
    token = dlite_shapes(dlite_config(tiny_config(), head="token"))
    assert [name for name in token if name.startswith("head.")] == [
        "head.token_proj.weight",
        "head.out_proj.weight",
    ]
    feature = dlite_shapes(dlite_config(tiny_config(), composition="feature", context_positions=4))
    assert feature["context_proj.weight"] == (64, 128)
    assert feature["context_embedding.weight"] == (4, 64)
