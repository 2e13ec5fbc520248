"""Read a checkpoint's `config.json`, and refuse by name what this version cannot run.

Nothing here touches weights, so a refusal comes before any download.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.target import TargetConfig

__all__ = ["parse_config"]

_ARCHITECTURE = "Qwen3ForCausalLM"
_USE_DENSE = "use a dense Qwen3 checkpoint such as 'Qwen/Qwen3-4B'"
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


def parse_config(config: Json, generation: Json | None, name: str) -> TargetConfig:
    """Turn `config.json` into a `TargetConfig`.

    Args:
        config: Content of `config.json`; fields of transformers 4 and 5.
        generation: Content of `generation_config.json`, if there is one; its end-of-turn ids win.
        name: The model as the user named it, for messages.

    Raises:
        UnsupportedCheckpointError: The checkpoint needs something that this version does not have,
            or its config lacks a field or contradicts itself.
    """
    _refuse_architecture(config, name)
    _refuse_quantization(config, name)
    _refuse_attention(config, name)
    num_heads = _whole_number(config, "num_attention_heads", name)
    hidden_size = _whole_number(config, "hidden_size", name)
    parsed = TargetConfig(
        architecture=_ARCHITECTURE,
        vocab_size=_whole_number(config, "vocab_size", name),
        hidden_size=hidden_size,
        num_layers=_whole_number(config, "num_hidden_layers", name),
        num_heads=num_heads,
        num_kv_heads=_whole_number(config, "num_key_value_heads", name),
        head_dim=_whole_number(config, "head_dim", name, default=128),
        intermediate_size=_whole_number(config, "intermediate_size", name),
        rms_norm_eps=_positive(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", name),
        rope_theta=_positive(_rope(config, name).get("rope_theta", 10_000.0), "rope_theta", name),
        max_position_embeddings=_whole_number(
            config, "max_position_embeddings", name, default=32_768
        ),
        tie_word_embeddings=config.get("tie_word_embeddings", False) is True,
        eos_token_ids=_end_ids(config, generation, name),
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


def _refuse_architecture(config: Json, name: str) -> None:
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
    if architecture not in (_ARCHITECTURE, "qwen3"):
        raise UnsupportedCheckpointError(
            f"{name!r} is {architecture!r}; only {_ARCHITECTURE!r} is supported, {_USE_DENSE}"
        )


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


def _refuse_attention(config: Json, name: str) -> None:
    layer_types = config.get("layer_types")
    slides = isinstance(layer_types, Sequence) and any(
        kind != "full_attention" for kind in layer_types
    )
    if config.get("use_sliding_window") or slides:
        raise UnsupportedCheckpointError(
            f"{name!r} uses sliding-window attention; not supported, {_USE_DENSE}"
        )
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise UnsupportedCheckpointError(
                f"{name!r} has {field}=true; not supported, {_USE_DENSE}"
            )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedCheckpointError(
            f"{name!r} has hidden_act={activation!r}; only 'silu' is supported, {_USE_DENSE}"
        )


def _rope(config: Json, name: str) -> Json:
    """Fields `rope_parameters` (transformers 5) over `rope_scaling` and `rope_theta` (4)."""
    fields: dict[str, object] = (
        {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    )
    for source in ("rope_scaling", "rope_parameters"):
        value = config.get(source)
        if isinstance(value, Mapping):
            fields |= value
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind != "default":
        raise UnsupportedCheckpointError(
            f"{name!r} scales its rotary embedding with {kind!r}, which is not supported; remove "
            "'rope_scaling' (or set rope_type to 'default') in a copy of its config.json to run it "
            "at its original context length"
        )
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedCheckpointError(
            f"{name!r} has partial_rotary_factor={partial!r}; not supported, {_USE_DENSE}"
        )
    return fields


def _whole_number(config: Json, field: str, name: str, default: int | None = None) -> int:
    value = config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedCheckpointError(
            f"{name!r}: {field}={value!r} in config.json is not a positive whole number; the "
            "checkpoint is damaged"
        )
    return value


def _positive(value: object, field: str, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UnsupportedCheckpointError(
            f"{name!r}: {field}={value!r} in config.json is not a positive number; the checkpoint "
            "is damaged"
        )
    return float(value)


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
