"""What is read from a config, and what is refused by name."""

from __future__ import annotations

import re

import pytest

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.checkpoint_config import parse_config
from tests.models.checkpoints import CONFIG, CONFIG_JSON


def test_config_of_transformers_4_is_read() -> None:
    parsed = parse_config(CONFIG_JSON, None, "some/model")
    assert parsed.eos_token_ids == (7,)
    assert [getattr(parsed, name) for name in CONFIG.__slots__ if name != "eos_token_ids"] == [
        getattr(CONFIG, name) for name in CONFIG.__slots__ if name != "eos_token_ids"
    ]


def test_config_of_transformers_5_is_read() -> None:
    fields = {name: value for name, value in CONFIG_JSON.items() if "rope" not in name}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6}
    fields["layer_types"] = ["full_attention", "full_attention"]
    assert parse_config(fields, None, "some/model").rope_theta == 5e6


@pytest.mark.parametrize(
    ("config_ids", "generation", "wanted"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [1, 2]}, (1, 2)),
        (7, {"do_sample": True}, (7,)),
        (None, None, ()),
        (0, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_ids_come_from_the_generation_config_first(
    config_ids: object, generation: dict[str, object] | None, wanted: tuple[int, ...]
) -> None:
    parsed = parse_config(CONFIG_JSON | {"eos_token_id": config_ids}, generation, "some/model")
    assert parsed.eos_token_ids == wanted


REFUSED = {
    "mixture of experts": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
    "mixture of experts ": {"num_experts": 128},
    "mixes linear and full attention": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
    },
    "mixes linear and full attention ": {"layer_types": ["linear_attention", "full_attention"]},
    "multimodal": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_config": {},
    },
    "only 'Qwen3ForCausalLM' is supported": {"architectures": ["LlamaForCausalLM"]},
    "only 'Qwen3ForCausalLM' is supported ": {"architectures": None, "model_type": "gemma"},
    "quantized with 'awq'": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "quantized with 'gptq'": {"quantization_config": {"quant_method": "gptq"}},
    "quantized with 'bitsandbytes'": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "quantized with 'fp8'": {"quantization_config": {"quant_method": "fp8"}},
    "quantized with 'unknown'": {"quantization_config": {"bits": 4}},
    "quantized with 'int8'": {"quantization_config": "int8"},
    "'yarn'": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "'dynamic'": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "'llama3'": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}},
    "partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
    "sliding-window": {"use_sliding_window": True, "sliding_window": 4096},
    "sliding-window ": {"layer_types": ["sliding_attention", "full_attention"]},
    "attention_bias=true": {"attention_bias": True},
    "mlp_bias=true": {"mlp_bias": True},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "num_attention_heads=4 is not a multiple of num_key_value_heads=3": {"num_key_value_heads": 3},
    "head_dim=15 is odd": {"head_dim": 15},
    "hidden_size=None": {"hidden_size": None},
    "num_hidden_layers='two'": {"num_hidden_layers": "two"},
    "vocab_size=True": {"vocab_size": True},
    "rms_norm_eps=0": {"rms_norm_eps": 0},
    "rope_theta='big'": {"rope_theta": "big"},
    "eos_token_id='x'": {"eos_token_id": "x"},
    "eos_token_id=[1, None]": {"eos_token_id": [1, None]},
    "eos_token_id={}": {"eos_token_id": {}},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusal_names_the_model_and_the_reason(reason: str) -> None:
    with pytest.raises(UnsupportedCheckpointError, match=re.escape(reason.strip())) as caught:
        parse_config(CONFIG_JSON | REFUSED[reason], None, "some/model")
    assert "'some/model'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("Qwen/Qwen3-4B-AWQ", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
    ],
)
def test_quantized_checkpoint_is_told_the_original(name: str, original: str) -> None:
    quantized = CONFIG_JSON | {"quantization_config": {"quant_method": "some"}}
    with pytest.raises(UnsupportedCheckpointError, match=f"probably '{original}'$"):
        parse_config(quantized, None, name)
