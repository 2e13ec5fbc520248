"""Read a checkpoint's `config.json`, and refuse by name what this version cannot run.

Nothing here touches weights, so a refusal comes before any download.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.rope_config import positive_number, read_rope
from dlite_agent.models.target import TargetConfig
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["parse_config"]


@dataclass(frozen=True, slots=True)
class _Family:
    """In what a family of dense decoders differs from the others, as transformers builds it.

    Attributes:
        model_type: `model_type` of config.json.
        has_qk_norm: See `TargetConfig`.
        has_qkv_bias: See `TargetConfig`.
        head_dim: Where config.json names none; None: hidden size by heads.
        max_positions: Where config.json names none.
    """

    model_type: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    head_dim: int | None = None
    max_positions: int = 32_768


_FAMILIES = {
    "Qwen3ForCausalLM": _Family("qwen3", has_qk_norm=True, head_dim=128),
    "Qwen2ForCausalLM": _Family("qwen2", has_qkv_bias=True),
    "LlamaForCausalLM": _Family("llama", max_positions=2048),
    "MistralForCausalLM": _Family("mistral"),
}
_USE_DENSE = "use a dense checkpoint of the Qwen3, Qwen2 or Llama family such as 'Qwen/Qwen3-4B'"
_HYBRID_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_6",
    "mamba",
    "jamba",
    "falcon_h1",
    "bamba",
    "zamba",
    "granitemoehybrid",
)
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_QUANTIZED_SUFFIXES = (
    "-AWQ",
    "-GPTQ-Int4",
    "-GPTQ-Int8",
    "-GPTQ",
    "-FP8",
    "-bnb-4bit",
    "-4bit",
    "-8bit",
)

Json = Mapping[str, object]


def parse_config(
    config: Json, generation: Json | None, name: str, rope_scaling: RopeScaling | None = None
) -> TargetConfig:
    """Turn `config.json` into a `TargetConfig`.

    Args:
        config: Content of `config.json`; fields of transformers 4 and 5.
        generation: Content of `generation_config.json`, if there is one; its end-of-turn ids win.
        name: The model as the user named it, for messages.
        rope_scaling: Replaces the config's own, which then may be one that is refused.

    Raises:
        UnsupportedCheckpointError: The checkpoint needs something that this version does not have,
            or its config lacks a field or contradicts itself.
    """
    architecture = _accept_architecture(config, name)
    family = _FAMILIES[architecture]
    _refuse_quantization(config, name)
    _refuse_attention(config, family, name)
    num_heads = _whole_number(config, "num_attention_heads", name)
    hidden_size = _whole_number(config, "hidden_size", name)
    rope = read_rope(config, rope_scaling, name, family.max_positions)
    parsed = TargetConfig(
        architecture=architecture,
        vocab_size=_whole_number(config, "vocab_size", name),
        hidden_size=hidden_size,
        num_layers=_whole_number(config, "num_hidden_layers", name),
        num_heads=num_heads,
        num_kv_heads=_whole_number(config, "num_key_value_heads", name, default=num_heads),
        head_dim=_head_dim(config, family, name, hidden_size, num_heads),
        intermediate_size=_whole_number(config, "intermediate_size", name),
        rms_norm_eps=positive_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", name),
        rope_theta=rope.theta,
        max_position_embeddings=rope.max_positions,
        tie_word_embeddings=config.get("tie_word_embeddings", False) is True,
        eos_token_ids=_end_ids(config, generation, name),
        rope_scaling=rope.scaling,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias,
    )
    if parsed.num_heads % parsed.num_kv_heads:
        raise UnsupportedCheckpointError(
            f"{name!r}: num_attention_heads={parsed.num_heads} is not a multiple of "
            f"num_key_value_heads={parsed.num_kv_heads}; config.json is damaged"
        )
    if parsed.head_dim % 2:
        raise UnsupportedCheckpointError(
            f"{name!r}: head_dim={parsed.head_dim} is odd; config.json is damaged"
        )
    return parsed


def _accept_architecture(config: Json, name: str) -> str:
    listed = config.get("architectures")
    architecture = (
        str(listed[0]) if isinstance(listed, Sequence) and listed else str(config.get("model_type"))
    )
    model_type = str(config.get("model_type", ""))
    layer_types = config.get("layer_types")
    if model_type.startswith(_HYBRID_TYPES) or (
        isinstance(layer_types, Sequence) and "linear_attention" in layer_types
    ):
        raise UnsupportedCheckpointError(
            f"{name!r} is {architecture!r}, which mixes linear and full attention; not supported, "
            f"{_USE_DENSE}"
        )
    if "moe" in model_type or any(config.get(field) for field in _EXPERT_FIELDS):
        raise UnsupportedCheckpointError(
            f"{name!r} is {architecture!r}, a mixture of experts; not supported, {_USE_DENSE}"
        )
    if (
        "vision_config" in config
        or "audio_config" in config
        or "ConditionalGeneration" in architecture
    ):
        raise UnsupportedCheckpointError(
            f"{name!r} is {architecture!r}, a multimodal model; not supported, {_USE_DENSE}"
        )
    named = {family.model_type: known for known, family in _FAMILIES.items()}
    architecture = named.get(architecture, architecture)
    if architecture not in _FAMILIES:
        raise UnsupportedCheckpointError(
            f"{name!r} is {architecture!r}, which is not supported; {_USE_DENSE}"
        )
    return architecture


def _refuse_quantization(config: Json, name: str) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = (
        quantization.get("quant_method", "unknown")
        if isinstance(quantization, Mapping)
        else quantization
    )
    original = next(
        (name.removesuffix(suffix) for suffix in _QUANTIZED_SUFFIXES if name.endswith(suffix)), None
    )
    hint = f", probably {original!r}" if original else ""
    raise UnsupportedCheckpointError(
        f"{name!r} is quantized with {method!r}, which is not supported; use the unquantized "
        f"checkpoint{hint}"
    )


def _refuse_attention(config: Json, family: _Family, name: str) -> None:
    if _slides(config, family, name):
        raise UnsupportedCheckpointError(
            f"{name!r} uses sliding-window attention; not supported, {_USE_DENSE}"
        )
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field) and not (field == "attention_bias" and family.has_qkv_bias):
            raise UnsupportedCheckpointError(
                f"{name!r} has {field}=true; not supported, {_USE_DENSE}"
            )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedCheckpointError(
            f"{name!r} has hidden_act={activation!r}; only 'silu' is supported, {_USE_DENSE}"
        )


def _whole_number(config: Json, field: str, name: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedCheckpointError(
            f"{name!r}: {field}={value!r} in its config is not a positive whole number; the "
            "checkpoint is damaged"
        )
    return value


def _slides(config: Json, family: _Family, name: str) -> bool:
    """Whether any layer attends to a window only; the rules are those of transformers' configs."""
    layer_types = config.get("layer_types")
    if isinstance(layer_types, Sequence):
        return any(kind != "full_attention" for kind in layer_types)
    if family.model_type == "mistral":
        return config.get("sliding_window", 4096) is not None
    if family.model_type == "llama" or not config.get("use_sliding_window"):
        return False
    first = config.get("max_window_layers", 28)  # the layers below attend to everything
    num_layers = _whole_number(config, "num_hidden_layers", name)
    starts_late = isinstance(first, int) and first >= num_layers
    return config.get("sliding_window", 4096) is not None and not starts_late


def _head_dim(config: Json, family: _Family, name: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _whole_number(config, "head_dim", name)
    if family.head_dim is not None:
        return family.head_dim
    if hidden_size % num_heads:
        raise UnsupportedCheckpointError(
            f"{name!r}: hidden_size={hidden_size} is not a multiple of num_attention_heads="
            f"{num_heads}, and there is no head_dim; config.json is damaged"
        )
    return hidden_size // num_heads


def _end_ids(config: Json, generation: Json | None, name: str) -> tuple[int, ...]:
    value = (generation or {}).get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) for token in ids):
        raise UnsupportedCheckpointError(
            f"{name!r}: eos_token_id={value!r} is neither a token id nor a list of them; repair "
            "config.json or generation_config.json"
        )
    return tuple(ids)
