"""Qwen3, Qwen2, Llama and Mistral, and rope scaling, against transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dlite_agent.models.checkpoint_config import parse_config
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.transformer import DenseTransformer

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "eos_token_id": 7,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "seven groups": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def their_model(
    family: str, dtype: torch.dtype, *changes: dict[str, Any], seed: int = 0
) -> PreTrainedModel:
    """A transformers model with random weights, norms and biases among them."""
    config_class, model_class = CLASSES[family]
    fields = dict(TINY)
    if family == "mistral":
        fields["sliding_window"] = None
    for change in changes:
        fields |= change
    model: PreTrainedModel = model_class(config_class(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            scale = 0.5 if name.endswith("bias") else parameter.shape[-1] ** -0.5
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * scale)
    if dtype == torch.float64:
        _widen_norms(model)
    return model.to(dtype).eval()


def _widen_norms(model: PreTrainedModel) -> None:
    """Norms in float64 where transformers' are float32, which would leave 1e-6 unexplained."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                wide = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                wide.weight = child.weight
                setattr(module, name, wide)


def our_model(model: PreTrainedModel, dtype: torch.dtype) -> DenseTransformer:
    config = parse_config(model.config.to_dict(), None, "some/model")
    return DenseTransformer(
        config,
        model.state_dict().__getitem__,
        dtype=dtype,
        device=torch.device("cpu"),
        max_kv_bytes=2**26,
    )


def random_ids(count: int) -> Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(3))


def assert_logits_equal(
    model: PreTrainedModel, dtype: torch.dtype, count: int, atol: float
) -> None:
    ids = random_ids(count)
    with torch.no_grad():
        wanted = model(ids[None]).logits[0]
    with our_model(model, dtype) as target, target.new_cache() as kv:
        for chunk in ids.split(150):
            got = target.forward(chunk, kv, logits_for=range(len(chunk))).logits
            there = wanted[kv.length : kv.length + len(chunk)]
            torch.testing.assert_close(got, there, rtol=0.0, atol=atol)
            kv.commit(len(chunk))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", CLASSES)
def test_logits_are_those_of_transformers(
    family: str, shape: str, dtype: torch.dtype, atol: float
) -> None:
    assert_logits_equal(their_model(family, dtype, SHAPES[shape]), dtype, 100, atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_stretched_positions_are_those_of_transformers(
    family: str, scaling: str, dtype: torch.dtype, atol: float
) -> None:
    rope = SCALINGS[scaling] | {"rope_theta": 5e5}
    positions = {"rope_parameters": rope, "max_position_embeddings": 256}
    model = their_model(family, dtype, positions, seed=1)
    assert_logits_equal(model, dtype, 300, atol)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", SHAPES["untied"]),
        ("llama", SHAPES["untied"]),
        ("llama", {"rope_parameters": SCALINGS["yarn"] | {"rope_theta": 1e4}}),
    ],
)
def test_200_greedy_tokens_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    model = their_model(family, torch.float32, changes)
    prompt = random_ids(40)
    wanted = model.generate(  # type: ignore[operator]  # transformers' annotation
        prompt[None],
        attention_mask=torch.ones(1, 40, dtype=torch.int64),
        max_new_tokens=200,
        min_new_tokens=200,
        do_sample=False,
        pad_token_id=0,
    )[0, 40:]
    with our_model(model, torch.float32) as target, target.new_cache() as kv:
        ids, got = prompt, []
        while len(got) < 200:
            output = target.forward(ids, kv, logits_for=[len(ids) - 1])
            kv.commit(len(ids))
            logits = output.logits[0]
            logits[7] = float("-inf")  # as min_new_tokens does it
            ids = logits.argmax().view(1)
            got.append(int(ids))
    assert got == wanted.tolist()
    assert len(set(got)) > 10, "a continuation that repeats itself proves little"


@pytest.mark.parametrize("family", CLASSES)
def test_names_and_shapes_are_those_of_transformers(family: str) -> None:
    for shape in ("tied", "untied"):
        model = their_model(family, torch.float32, SHAPES[shape])
        theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        if shape == "tied":
            del theirs["lm_head.weight"]
        assert weight_shapes(our_model(model, torch.float32).config) == theirs


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_bfloat16_is_as_close_to_float64_as_transformers_is(family: str) -> None:
    ids = random_ids(300)
    with torch.no_grad():
        exact = their_model(family, torch.float64)(ids[None]).logits[0]
        model = their_model(family, torch.bfloat16)
        theirs = model(ids[None]).logits[0]
    with our_model(model, torch.bfloat16) as target, target.new_cache() as kv:
        got = target.forward(ids, kv, logits_for=range(300)).logits
    assert (got - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()
