"""Reading weights: shards, damage, options, fingerprints and sampling defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.models import weights as weights_module
from dlite_agent.models.layer_weights import loaded_bytes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import fingerprint, load_target, sampling_defaults
from dlite_agent.rope_scaling import RopeScaling
from tests.models.checkpoints import CONFIG, random_weights, write_folder, write_json

MAX_KV_BYTES = 2**22


def load(folder: Path, **options: object) -> DenseTransformer:
    options = {"max_kv_bytes": MAX_KV_BYTES, "device": "cpu"} | options
    return load_target(str(folder), **options)  # type: ignore[arg-type]  # options of a test


def logits_of(target: DenseTransformer) -> Tensor:
    with target.new_cache() as kv:
        return target.forward(torch.arange(9), kv, logits_for=[8]).logits


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_is_loaded_and_computes(tmp_path: Path, shards: int) -> None:
    weights = random_weights()
    target = load(write_folder(tmp_path, weights, shards=shards), dtype="float32")
    assert target.config.eos_token_ids == (7,)
    direct = DenseTransformer(
        CONFIG,
        weights.__getitem__,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_kv_bytes=MAX_KV_BYTES,
    )
    assert torch.equal(logits_of(target), logits_of(direct))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_dtype_is_that_of_weights_and_logits(tmp_path: Path, name: str) -> None:
    target = load(write_folder(tmp_path), dtype=name)
    assert target.dtype == getattr(torch, name)
    assert logits_of(target).dtype == (torch.float64 if name == "float64" else torch.float32)


def test_tied_checkpoint_may_repeat_its_head(tmp_path: Path) -> None:
    weights = random_weights()
    with_head = load(write_folder(tmp_path / "a", weights, tie_word_embeddings=True))
    del weights["lm_head.weight"]
    without = load(write_folder(tmp_path / "b", weights, tie_word_embeddings=True))
    assert torch.equal(logits_of(with_head), logits_of(without))


def test_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    weights = random_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    load(write_folder(tmp_path, weights))


def test_progress_ends_at_one(tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    load(write_folder(tmp_path), progress=lambda *step: steps.append(step))
    assert steps[0] == ("download", 1.0)
    fractions = [fraction for name, fraction in steps[1:] if name == "load"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def unknown_tensor(weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def missing_tensor(weights: dict[str, Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def wrong_shape(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unknown_tensor, r"tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"),
        (missing_tensor, r"lacks 1 tensors, the first is 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (wrong_shape, r"'model\.norm\.weight' is \[32\], but the config asks for \[64\]"),
    ],
)
def test_tensor_that_does_not_fit_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    weights = random_weights()
    damage(weights)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(write_folder(tmp_path, weights))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"1 of 3 .*'model-00002-of-00003\.safetensors'"):
        load(folder)


def test_index_without_a_map_is_damaged(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, shards=2)
    write_json(folder / "model.safetensors.index.json", {})
    with pytest.raises(UnsupportedCheckpointError, match="weight_map"):
        load(folder)


def test_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "inner", shards=2)
    write_folder(tmp_path)
    write_json(
        folder / "model.safetensors.index.json", {"weight_map": {"x": "../model.safetensors"}}
    )
    with pytest.raises(ModelNotFoundError, match=r"'model\.safetensors'"):
        load(folder)


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_cut_file_is_damaged(tmp_path: Path, size: int) -> None:
    folder = write_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.safetensors is damaged"):
        load(folder)


def test_context_beyond_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, max_position_embeddings=1024)
    with pytest.raises(ConfigurationError, match="max_context=2048 exceeds the 1024 positions"):
        load(folder, max_context=2048)
    load(folder, max_context=1024)


def test_weights_beyond_the_memory_are_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "free_memory_bytes", lambda _device: 1000)
    with pytest.raises(CapacityError, match=r"take \d+ bytes, but 1000 are free"):
        load(write_folder(tmp_path))


def test_default_budget_is_a_quarter_of_what_the_weights_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path)
    monkeypatch.setattr(weights_module, "free_memory_bytes", lambda _device: 10_000_000)
    target = load(folder, max_kv_bytes=None, dtype="float32")
    num_weights = sum(tensor.numel() for tensor in random_weights().values())
    budget = (10_000_000 - 4 * num_weights) // 4
    assert budget - target.pool.page_bytes < target.pool.max_bytes <= budget


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, (0.0, 0, 1.0)),
        ({}, (0.0, 0, 1.0)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 50, 1.0)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, (0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": None}, (1.0, 50, 1.0)),
    ],
)
def test_sampling_defaults_are_those_of_the_checkpoint(
    tmp_path: Path, content: dict[str, object] | None, wanted: tuple[float, int, float]
) -> None:
    if content is not None:
        write_json(tmp_path / "generation_config.json", content)
    temperature, top_k, top_p = wanted
    assert sampling_defaults(tmp_path) == SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.0, repetition_penalty=1.0
    )


@pytest.mark.parametrize("is_sampled", [True, False])
def test_repetition_penalty_counts_whether_sampled_or_not(tmp_path: Path, is_sampled: bool) -> None:
    content = {"do_sample": is_sampled, "repetition_penalty": 1.05, "min_p": 0.1}
    write_json(tmp_path / "generation_config.json", content)
    defaults = sampling_defaults(tmp_path)
    assert defaults.repetition_penalty == 1.05
    assert defaults.min_p == (0.1 if is_sampled else 0.0)


@pytest.mark.parametrize("value", ["hot", True, -1])
def test_sampling_default_that_is_no_temperature_is_named(tmp_path: Path, value: object) -> None:
    content = {"do_sample": True, "temperature": value}
    write_json(tmp_path / "generation_config.json", content)
    with pytest.raises(UnsupportedCheckpointError, match=r"generation_config\.json.*temperature"):
        sampling_defaults(tmp_path)


def test_fingerprint_tells_checkpoints_apart(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", random_weights(seed=0))
    same = write_folder(tmp_path / "b", random_weights(seed=0))
    others = [
        write_folder(tmp_path / "c", random_weights(seed=1)),
        write_folder(tmp_path / "d", random_weights(seed=0), rope_theta=5e5),
        write_folder(tmp_path / "e", random_weights(seed=0), shards=2),
    ]
    assert len(fingerprint(first)) == 16
    assert fingerprint(first) == fingerprint(same)
    assert len({fingerprint(folder) for folder in (first, *others)}) == 4


def test_int8_weights_are_smaller_and_answer_nearly_the_same(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    plain, packed = load(folder, dtype="bfloat16"), load(folder, quantize="int8")
    assert packed.dtype == torch.bfloat16
    assert packed.weight_bytes < 0.55 * plain.weight_bytes
    apart = (logits_of(packed) - logits_of(plain)).abs().mean()
    assert 0 < apart < 0.05 * logits_of(plain).abs().mean()


def test_int8_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bfloat16"):
        load(write_folder(tmp_path), quantize="int8", dtype="float64")


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_planned_bytes_are_those_that_are_kept(
    tmp_path: Path, tied: bool, quantize: Literal["int8"] | None
) -> None:
    weights = random_weights()
    folder = write_folder(tmp_path, weights, tie_word_embeddings=tied)
    target = load(folder, dtype="bfloat16", quantize=quantize)
    embedding_bytes = 2 * weights["model.embed_tokens.weight"].numel()
    norm_bytes = 2 * sum(value.numel() for value in weights.values() if value.dim() == 1)
    rows_of_head = 0 if tied else embedding_bytes  # of the vocabulary's head, to re-score with
    kept = target.weight_bytes + embedding_bytes + norm_bytes + rows_of_head
    assert loaded_bytes(target.config, 2, quantize) == kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weight_that_is_no_number_is_found_and_named(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in random_weights().items()}
    weights["model.layers.1.self_attn.k_proj.weight"][31, 63] = value
    with pytest.raises(
        UnsupportedCheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight' holds NaN or inf"
    ):
        load(write_folder(tmp_path, weights))


def test_largest_numbers_of_a_type_are_numbers(tmp_path: Path) -> None:
    weights = {name: tensor.to(torch.float16) for name, tensor in random_weights().items()}
    weights["model.norm.weight"][:] = 65_504
    load(write_folder(tmp_path, weights))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_type_that_needs_a_scale_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = random_weights()
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64).to(dtype)
    with pytest.raises(UnsupportedCheckpointError, match=r"up_proj\.weight' is stored as [IF]8"):
        load(write_folder(tmp_path, weights))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_truncated_file_is_named(tmp_path: Path, share: float) -> None:
    path = write_folder(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UnsupportedCheckpointError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 8}, r"o_proj\.weight' is \[64, 64\], but .* \[64, 128\]"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight' is \[32, 64\], but .* \[16, 64\]"),
        ({"head_dim": 32}, r"k_norm\.weight' is \[16\], but .* \[32\]"),
        ({"num_hidden_layers": 1}, r"holds a tensor 'model\.layers\.1\."),
        ({"num_hidden_layers": 3}, r"lacks 11 tensors, the first is 'model\.layers\.2\."),
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"_norm\.weight' that 'LlamaForCausalLM' has not",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"]},
            r"_norm\.weight' that 'Qwen2ForCausalLM' has not",
        ),
    ],
)
def test_config_that_lies_is_contradicted_before_the_pool_is_reserved(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = write_folder(tmp_path, **changes)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load(folder, max_kv_bytes=2**62)  # reserving that much would fail otherwise


def test_options_that_change_what_is_computed_change_the_fingerprint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    prints = {
        fingerprint(folder),
        fingerprint(folder, rope_scaling=RopeScaling("yarn", 4.0)),
        fingerprint(folder, rope_scaling=RopeScaling("yarn", 2.0)),
        fingerprint(folder, quantize="int8"),
    }
    assert len(prints) == 4


def test_override_raises_the_context_that_may_be_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, max_position_embeddings=1024)
    with pytest.raises(ConfigurationError, match="or stretch the positions with rope_scaling"):
        load(folder, max_context=4096)
    yarn = RopeScaling("yarn", 4.0)
    target = load(folder, max_context=4096, rope_scaling=yarn)
    assert target.config.max_position_embeddings == 4096
    assert target.config.rope_scaling == RopeScaling("yarn", 4.0, 1024)
    assert not torch.equal(logits_of(target), logits_of(load(folder)))
