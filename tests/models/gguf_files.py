"""GGUF files for tests, written by llama.cpp's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dlite_agent.models.gguf_config import stored_name
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig

gguf: Any
try:
    import gguf
except ImportError:  # tests that need it are skipped
    gguf = None

BYTE_TOKENS = 256


def write_gguf(
    path: Path,
    config: TargetConfig,
    weights: Mapping[str, Tensor],
    *,
    architecture: str = "qwen3",
    kinds: Callable[[str], str] = lambda _name: "F32",
    extra: Callable[[Any], None] = lambda _writer: None,
) -> Path:
    """Write a model with a byte vocabulary.

    Args:
        path: The file.
        config: Shape.
        weights: By Hugging Face name.
        architecture: llama.cpp's name of it.
        kinds: ggml type of a tensor, by its Hugging Face name.
        extra: May add or change what is written last.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    add_byte_tokenizer(writer, config.vocab_size)
    for name in weight_shapes(config):
        values = weights[name].float().numpy()
        if architecture == "llama" and ("q_proj.weight" in name or "k_proj.weight" in name):
            values = permuted(values, config.head_dim)
        kind = gguf.GGMLQuantizationType[kinds(name)]
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(stored_name(name), stored, raw_dtype=kind)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_tokenizer(writer: Any, vocab_size: int, *, pre: str = "gpt-2") -> None:
    """256 bytes, two control tokens, and what fills the vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable}
    spelling |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokens = [spelling[byte] for byte in range(256)]
    types = [1] * 256
    for control in ("<|im_start|>", "<|im_end|>")[: max(0, vocab_size - 256)]:
        tokens.append(control)
        types.append(3)
    tokens += [f"[PAD{i}]" for i in range(vocab_size - len(tokens))]
    types += [5] * (len(tokens) - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens[:vocab_size])
    writer.add_token_types(types[:vocab_size])
    writer.add_token_merges([])
    writer.add_eos_token_id(257)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def permuted(weight: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows as `convert_hf_to_gguf.py` stores them for llama: partners of a rotation neighbours."""
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
