"""What is read from a config, and what is refused by name."""

from __future__ import annotations

import re

import pytest

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.checkpoint_config import parse_config
from dlite_agent.models.target import TargetConfig
from dlite_agent.rope_scaling import RopeScaling
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
    "'GPT2LMHeadModel', which is not supported": {"architectures": ["GPT2LMHeadModel"]},
    "'gemma', which is not supported": {"architectures": None, "model_type": "gemma"},
    "'Llama4ForCausalLM'": {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4"},
    "quantized with 'awq'": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "quantized with 'gptq'": {"quantization_config": {"quant_method": "gptq"}},
    "quantized with 'bitsandbytes'": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "quantized with 'fp8'": {"quantization_config": {"quant_method": "fp8"}},
    "quantized with 'unknown'": {"quantization_config": {"bits": 4}},
    "quantized with 'int8'": {"quantization_config": "int8"},
    "'dynamic' is not supported: its frequencies": {
        "rope_scaling": {"type": "dynamic", "factor": 4.0}
    },
    "'longrope' is not supported": {"rope_scaling": {"type": "longrope", "long_factor": [1, 2]}},
    "'su' is not supported": {"rope_scaling": {"type": "su", "factor": 4.0}},
    "'yarn' has no factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
    "factor of rope_scaling is 'four'": {"rope_scaling": {"type": "linear", "factor": "four"}},
    "of its own for 'full_attention' layers": {
        "rope_parameters": {"full_attention": {"rope_type": "default"}}
    },
    "rope_theta=1.0 in its config is not above 1": {"rope_theta": 1},
    "max_position_embeddings='far'": {"max_position_embeddings": "far"},
    "partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
    "partial_rotary_factor=0.25": {
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}
    },
    "sliding-window": {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_window_layers": 1,
    },
    "sliding-window ": {"layer_types": ["sliding_attention", "full_attention"]},
    "attention_bias=true": {"attention_bias": True},
    "mlp_bias=true": {"mlp_bias": True},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "num_attention_heads=4 is not a multiple of num_key_value_heads=3": {"num_key_value_heads": 3},
    "head_dim=15 is odd": {"head_dim": 15},
    "hidden_size=64 is not a multiple of num_attention_heads=6": {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": None,
        "num_attention_heads": 6,
    },
    "num_attention_heads=2 is not a multiple of num_key_value_heads=4": {
        "num_attention_heads": 2,
        "num_key_value_heads": 4,
    },
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


def parse(*changes: dict[str, object], rope_scaling: RopeScaling | None = None) -> TargetConfig:
    config = dict(CONFIG_JSON)
    for change in changes:
        config |= change
    return parse_config(config, None, "some/model", rope_scaling)


LLAMA: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2: dict[str, object] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL: dict[str, object] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.mark.parametrize(
    ("family", "flags"),
    [({}, (True, False)), (QWEN2, (False, True)), (LLAMA, (False, False)), (MISTRAL, (False,) * 2)],
)
def test_families_differ_by_flags(family: dict[str, object], flags: tuple[bool, bool]) -> None:
    parsed = parse(family)
    assert (parsed.has_qk_norm, parsed.has_qkv_bias) == flags
    assert parsed.architecture == family.get("architectures", ["Qwen3ForCausalLM"])[0]  # type: ignore[index]  # a list


@pytest.mark.parametrize(("family", "head_dim"), [({}, 128), (QWEN2, 16), (LLAMA, 16)])
@pytest.mark.parametrize("is_null", [True, False])
def test_absent_head_dim_is_the_familys_default(
    family: dict[str, object], head_dim: int, is_null: bool
) -> None:
    config = CONFIG_JSON | family | {"head_dim": None}
    if not is_null:
        del config["head_dim"]
    assert parse_config(config, None, "some/model").head_dim == head_dim


def test_family_is_known_by_its_type_where_no_architecture_is_named() -> None:
    assert parse({"architectures": None, "model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


def test_absent_kv_heads_are_all_heads() -> None:
    assert parse(LLAMA, {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    "fields",
    [
        QWEN2 | {"use_sliding_window": False, "sliding_window": 32_768},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
        QWEN2 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        QWEN2 | {"attention_bias": True},
        LLAMA | {"sliding_window": 4096},
        MISTRAL | {"sliding_window": None},
    ],
)
def test_flags_without_an_effect_are_no_reason_to_refuse(fields: dict[str, object]) -> None:
    parse(fields)


@pytest.mark.parametrize(
    "fields",
    [
        QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0},
        MISTRAL | {"sliding_window": 4096},
        LLAMA | {"layer_types": ["sliding_attention"] * 2},
        LLAMA | {"attention_bias": True},
        LLAMA | {"mlp_bias": True},
    ],
)
def test_flags_with_an_effect_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="not supported"):
        parse(fields)


def test_mistral_without_the_field_has_transformers_default_window() -> None:
    config = CONFIG_JSON | MISTRAL
    del config["sliding_window"]
    with pytest.raises(UnsupportedCheckpointError, match="sliding-window"):
        parse_config(config, None, "some/model")


YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
LLAMA3: dict[str, object] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("fields", "wanted", "positions"),
    [
        (
            {"rope_scaling": YARN, "max_position_embeddings": 40_960},
            RopeScaling.parse(YARN),
            131072,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 32_768},
            RopeScaling.parse(YARN),
            131_072,
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6}, "max_position_embeddings": 262_144},
            RopeScaling.parse(YARN),
            262_144,
        ),
        (
            {"rope_scaling": LLAMA3, "max_position_embeddings": 131_072},
            RopeScaling.parse(LLAMA3),
            131_072,
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0, "finetuned": True},
                "max_position_embeddings": 16_384,
            },
            RopeScaling("linear", 4.0),
            16_384,
        ),
        ({"rope_scaling": {"type": "default"}}, RopeScaling(), 65_536),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
            RopeScaling("yarn", 4.0, 4096),
            65_536,
        ),
    ],
)
def test_scaling_of_a_config_is_read_in_every_spelling(
    fields: dict[str, object], wanted: RopeScaling, positions: int
) -> None:
    parsed = parse(fields)
    assert parsed.rope_scaling == wanted
    assert parsed.max_position_embeddings == positions


@pytest.mark.parametrize(
    ("fields", "override", "wanted", "positions"),
    [
        ({"max_position_embeddings": 40_960}, YARN, RopeScaling.parse(YARN), 131_072),
        (
            {"max_position_embeddings": 40_960},
            {"rope_type": "yarn", "factor": 2.0},
            RopeScaling("yarn", 2.0, 40_960),
            81_920,
        ),
        ({"max_position_embeddings": 4096}, {"type": "linear", "factor": 2.0}, None, 8192),
        (
            {"rope_scaling": LLAMA3, "max_position_embeddings": 131_072},
            {"type": "default"},
            RopeScaling(),
            8192,
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 4096},
            {"type": "default"},
            RopeScaling(),
            4096,
        ),
    ],
)
def test_override_replaces_the_scaling_and_raises_the_limit(
    fields: dict[str, object],
    override: dict[str, object],
    wanted: RopeScaling | None,
    positions: int,
) -> None:
    parsed = parse(fields, rope_scaling=RopeScaling.parse(override))
    assert parsed.rope_scaling == (wanted or RopeScaling.parse(override))
    assert parsed.max_position_embeddings == positions
