"""Write a block drafter as DeepSpec would: other engines that read DSpark read it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.block_config import BlockConfig, block_shapes

__all__ = ["block_json", "write_block_drafter"]


def block_json(config: BlockConfig) -> dict[str, object]:
    """Content of `config.json`; `target_fingerprint` is ours.

    Raises:
        ConfigurationError: DeepSpec's form does not express it: a selector, convolutions, windows,
            a vocabulary of its own, or an anchor that is not drafted.
    """
    is_plain = config.is_anchor_drafted and not config.conv_size and not any(config.windows)
    if config.head == "selector" or config.draft_vocab_size or not is_plain:
        raise ConfigurationError(
            f"a {config.family} drafter with head={config.head!r} cannot be written as DSpark; "
            "use a Markov head, full attention and is_anchor_drafted=True"
        )
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling.rope_type != "default":
        rope |= json.loads(config.rope_scaling.to_json())
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {key: value for key, value in rope.items() if value is not None},
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "target_layer_ids": list(config.taps),
        "num_target_layers": config.num_target_layers or None,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.rank if config.head != "none" else 0,
        "markov_head_type": config.head if config.head != "none" else "vanilla",
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "token",
        "target_fingerprint": config.target_fingerprint,
    }


def write_block_drafter(
    folder: Path,
    config: BlockConfig,
    tensors: Mapping[str, Tensor],
    provenance: Mapping[str, object],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a drafter's folder. A kill leaves the old files or the new ones.

    Args:
        folder: Made if missing.
        config: Its shape.
        tensors: All of `block_shapes`.
        provenance: What it was trained from and with; becomes `provenance.json`.
        dtype: Of the file.

    Raises:
        ConfigurationError: A tensor is missing, unknown or of another shape; or as in `block_json`.
    """
    content = block_json(config)
    expected = block_shapes(config)
    for name in {*expected, *tensors}:
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != expected.get(name):
            raise ConfigurationError(
                f"tensor {name!r} is {shape}, and the config asks for {expected.get(name)}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value.detach().to("cpu", dtype).contiguous() for name, value in tensors.items()}
    part = folder / "model.safetensors.part"
    save_file(kept, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors keeps it to the user
    part.replace(folder / "model.safetensors")
    for name, written in (("provenance.json", dict(provenance)), ("config.json", content)):
        part = folder / f"{name}.part"
        part.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
        part.replace(folder / name)
