"""Checkpoint folders for tests of loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.testing import tiny_config

CONFIG = tiny_config()

CONFIG_JSON: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "max_position_embeddings": 65_536,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "quantization_config": None,
    "torch_dtype": "bfloat16",
}


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in weight_shapes(CONFIG).items()
    }


def write_folder(
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    *,
    shards: int = 1,
    **changes: object,
) -> Path:
    """Write config and weights; `changes` are fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG_JSON | changes)
    weights = random_weights() if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, part in enumerate(_parts(weights, shards), start=1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _parts(weights: dict[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    names = list(weights)
    for start in range(count):
        yield {name: weights[name] for name in names[start::count]}
