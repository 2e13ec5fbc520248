"""Folders of public drafters, in the words of each project, from the same tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.eagle3_network import Eagle3Config
from dlite_agent.models.transformer import DenseTransformer

Json = dict[str, object]


def write_drafter(folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    kept = {name: value.clone().contiguous() for name, value in tensors.items()}
    save_file(kept, folder / "model.safetensors")
    return str(folder)


def ends(target: DenseTransformer) -> dict[str, Tensor]:
    """Copies of the target's embedding and head."""
    ids = torch.arange(target.config.vocab_size)
    units = torch.eye(target.config.hidden_size, dtype=target.dtype)
    return {
        "embed_tokens.weight": target.embed(ids),
        "lm_head.weight": target.project(units).t(),
    }


def layer_fields(config: BlockConfig | Eagle3Config) -> Json:
    """As transformers 4 names them."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 2048,
    }


def deepspec(config: BlockConfig) -> Json:
    """Flat, rope as transformers 5 writes it."""
    fields = layer_fields(config)
    theta = fields.pop("rope_theta")
    return fields | {
        "architectures": ["Qwen3DSparkModel"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "num_anchors": 512,
        "block_size": config.block_size,
        "target_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.rank if config.head != "none" else 0,
        "markov_head_type": config.head if config.head != "none" else "vanilla",
        "enable_confidence_head": config.confidence != "none",
        "confidence_head_with_markov": config.confidence == "token",
    }


def zlab(config: BlockConfig, architecture: str = "DFlashDraftModel") -> Json:
    """The drafter's own fields are nested."""
    nested: Json = {
        "target_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
    }
    if config.conv_size:
        nested |= selector_fields(config)
    if config.head in ("vanilla", "gated", "rnn"):
        nested |= {
            "projector_type": "dspark",
            "markov_rank": config.rank,
            "markov_head_type": config.head,
            "enable_confidence_head": config.confidence != "none",
        }
    fields: Json = {"architectures": [architecture], "num_target_layers": config.num_target_layers}
    if config.windows:
        fields["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ]
        fields["sliding_window"] = max(config.windows)
        fields["sliding_window_non_causal"] = not config.is_window_causal
    return layer_fields(config) | fields | {"dflash_config": nested}


def selector_fields(config: BlockConfig) -> Json:
    return {
        "conv_kernel_size": config.conv_size,
        "conv_group_size": config.conv_group,
        "selector_rank": config.rank,
        "selector_top_k": config.shortlist,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.softcap or None,
        "input_embedding_scale": config.embedding_scale,
    }


def speculators(config: BlockConfig, kind: str) -> Json:
    """Layers are numbered from the embedding."""
    fields: Json = {
        "speculators_model_type": kind,
        "architectures": ["DraftModel"],
        "transformer_layer_config": layer_fields(config),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
    }
    if config.conv_size:
        fields |= selector_fields(config)
    if config.head in ("vanilla", "gated", "rnn"):
        fields |= {
            "markov_rank": config.rank,
            "markov_head_type": config.head,
            "enable_confidence_head": config.confidence != "none",
            "confidence_head_with_markov": config.confidence == "token",
        }
    return fields


def eagle3_safeai(config: Eagle3Config) -> Json:
    """Of SafeAI, AngelSlim and SpecForge."""
    return layer_fields(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.taps)},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": config.block_size}]},
    }


def eagle3_speculators(config: Eagle3Config) -> Json:
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_fields(config),
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "norm_before_residual": config.is_residual_normed,
        "norm_before_fc": config.is_input_normed,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": config.block_size}]},
    }


def eagle3_deepspec(config: Eagle3Config) -> Json:
    return layer_fields(config) | {
        "architectures": ["Qwen3Eagle3Model"],
        "target_layer_ids": list(config.taps),
        "ttt_length": config.block_size,
        "draft_num_hidden_layers": 1,
    }


def midlayer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """EAGLE-3's own name of its layer."""
    return {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}


def vocabulary_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of a vocabulary of some ids."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}
