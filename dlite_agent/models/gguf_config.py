"""What a GGUF file says in llama.cpp's words, in those of a Hugging Face checkpoint.

Keys and tensor names: `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of
github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.kernels.rope_frequencies import rope_frequencies
from dlite_agent.models.gguf_file import GGUFFile
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["config_json", "from_stored_order", "generation_json", "ignored_names", "stored_name"]

_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",  # Mistral, too
}
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
    "expert_count": "num_local_experts",
}
_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_ROPE_FACTORS = "rope_freqs.weight"


def config_json(file: GGUFFile, name: str) -> Mapping[str, object]:
    """The `config.json` that the file's metadata stand for.

    Args:
        file: Its header.
        name: The model as the user named it, for messages.

    Raises:
        UnsupportedCheckpointError: A kind of model, or of rope scaling, that cannot be run.
    """
    architecture = file.architecture
    if architecture not in _ARCHITECTURES:
        raise UnsupportedCheckpointError(
            f"{name!r} is a GGUF file of {architecture!r}, which is not supported; use a dense "
            f"model of {', '.join(map(repr, _ARCHITECTURES))}"
        )
    if int(_number(file, "split.count", 1)) > 1:
        raise UnsupportedCheckpointError(
            f"{name!r} is one part of several; join them with llama.cpp's 'llama-gguf-split "
            "--merge' and name the whole"
        )
    file.check_kinds()
    config: dict[str, object] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_sliding_window": False,
    }
    for key, field in _FIELDS.items():
        value = file.metadata.get(f"{architecture}.{key}")
        if value is not None:
            config[field] = value
    if "token_embd.weight" in file.tensors:
        config.setdefault("vocab_size", file.tensors["token_embd.weight"].shape[0])
    _check_heads(file, config, name)
    config["rope_scaling"] = _rope_scaling(file, name)
    return config


def generation_json(file: GGUFFile) -> Mapping[str, object]:
    """The `generation_config.json` that the metadata stand for; sampling only where they say so."""
    ends = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    content: dict[str, object] = {
        "eos_token_id": list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    }
    for key, field in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p")):
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None:
            content |= {field: value, "do_sample": True}
    return content


def stored_name(name: str) -> str:
    """llama.cpp's name of a tensor.

    Args:
        name: Its Hugging Face name, one of `weight_shapes`.
    """
    part, _, suffix = name.rpartition(".")
    if part in _OUTER_PARTS:
        return f"{_OUTER_PARTS[part]}.{suffix}"
    layer, _, inner = part.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_PARTS[inner]}.{suffix}"


def from_stored_order(file: GGUFFile, name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Undo how the converter re-orders rows.

    For `llama` it puts the two partners of a rotation side by side (`permute` of
    `convert_hf_to_gguf.py`); a Hugging Face checkpoint has them half a head apart.

    Args:
        file: Where the tensor is from.
        name: Its Hugging Face name.
        tensor: As it is in the file.
        head_dim: D.
    """
    if file.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    by_pair = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return by_pair.transpose(1, 2).reshape(tensor.shape)


def ignored_names(file: GGUFFile) -> frozenset[str]:
    """Tensors that are no weights: their content is in `config_json`."""
    return frozenset({_ROPE_FACTORS} & file.tensors.keys())


def _check_heads(file: GGUFFile, config: Mapping[str, object], name: str) -> None:
    """All of a head is key, value and rotated."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.metadata.get(f"{file.architecture}.{key}", head_dim)
        if value != head_dim:
            raise UnsupportedCheckpointError(
                f"{name!r} has {key}={value!r} where heads have {head_dim!r} elements; not "
                "supported, use a checkpoint that rotates whole heads"
            )


def _rope_scaling(file: GGUFFile, name: str) -> object:
    prefix = f"{file.architecture}.rope.scaling."
    found = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    kind = found.get("type", "none")
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, name)
    if kind == "none":
        return None
    factor = found.get("factor", 1.0)
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": found.get("original_context_length"),
        "beta_fast": found.get("yarn_beta_fast"),
        "beta_slow": found.get("yarn_beta_slow"),
    }
    extra = found.get("attn_factor", found.get("yarn_attn_factor"))
    if kind == "yarn" and isinstance(extra, float) and isinstance(factor, float) and factor >= 1:
        # llama.cpp multiplies it with the paper's factor
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1)
    return scaling


def _llama3_scaling(file: GGUFFile, name: str) -> object:
    """Recognise Llama 3's scaling by the factors that the converter computed from it.

    They are 1 where a frequency stays and the largest where it is stretched fully; the ramp between
    is only accepted if it is that of the released models (original length 8,192, factors 1 and 4).
    """
    factors = file.read(_ROPE_FACTORS).to(torch.float32)
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = _number(file, f"{file.architecture}.rope.freq_base", 10_000.0)
    head_dim = 2 * factors.numel()
    is_known = False
    if theta > 1 and scaling["factor"] >= 1:  # type: ignore[operator]  # a float
        plain, _ = rope_frequencies(head_dim, theta, RopeScaling())
        stretched, _ = rope_frequencies(head_dim, theta, RopeScaling.parse(scaling))
        is_known = torch.allclose(plain / factors.flatten(), stretched, rtol=1e-4, atol=0.0)
    if not is_known:
        raise UnsupportedCheckpointError(
            f"{name!r} has rope factors that are not those of Llama 3; use the original checkpoint "
            "in safetensors format"
        )
    return scaling


def _number(file: GGUFFile, key: str, default: float) -> float:
    value = file.metadata.get(key, default)
    return value if isinstance(value, int | float) else default
