"""A checkpoint folder that a test can load as a user's: random weights that nonetheless call tools.

The tokenizer has 256 byte tokens, the control tokens of Qwen3, and a few tokens that spell a whole
tool call. Rendering never produces those (there are no merges), so what was sampled and what a
template renders differ in their ids, as they do in real life. Some tokens lead surely to a call: a
large component of their embedding is read by one row of the head. Everything else is chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig

ASSETS = Path(__file__).parent.parent / "dlite_agent" / "nano" / "assets"
CONTROLS = (
    "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> "
    "</tool_response> <think> </think>"
).split()
CALLS = tuple(
    f'\n{{"name": "read_file", "arguments": {{"path": "{name}.py",  "line": {line}}}}}\n'
    for line, name in enumerate(("alpha", "beta", "gamma", "delta"))
)
VOCAB_SIZE = 288
_FIRST_CALL = 256
_FIRST_CONTROL = _FIRST_CALL + len(CALLS)  # added tokens come behind the vocabulary
_TRIGGERS = tuple(range(0x60, 0x80))  # one token in eight or so


def control_id(spelling: str, num_words: int = 0) -> int:
    """The id of a control token in a checkpoint with so many words."""
    return _FIRST_CONTROL + num_words + CONTROLS.index(spelling)


def word_id(number: int) -> int:
    """The id of one of the words that `write_checkpoint` was given."""
    return _FIRST_CONTROL + number


def write_checkpoint(
    folder: Path, *, seed: int = 0, max_positions: int = 8192, words: Sequence[str] = ()
) -> Path:
    """Write config, tokenizer, template and weights; returns the folder.

    Each of the words (19 at most) is a token that is rarely sampled, and never rendered.
    """
    config = TargetConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        eos_token_ids=(control_id("<|im_end|>", len(words)),),
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(config, seed, len(words)), folder / "model.safetensors")
    _write_json(folder / "config.json", _config_json(config))
    _write_json(folder / "generation_config.json", {"eos_token_id": list(config.eos_token_ids)})
    _write_json(folder / "tokenizer.json", _tokenizer_json(words))
    template = (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": template,
            "model_max_length": max_positions,
        },
    )
    return folder


def _weights(config: TargetConfig, seed: int, num_words: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1
        weights[name] = 1 + 0.1 * noise if is_norm else noise * (shape[-1] ** -0.5)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding *= 4
    head *= 1.7
    head[_FIRST_CALL:] *= 0.1  # only a trigger leads to a call
    directions = torch.linalg.qr(torch.randn(64, 4, generator=generator)).Q.T  # [4, E]
    calls = range(_FIRST_CALL, _FIRST_CALL + len(CALLS))
    open_call, close_call, end = (
        control_id(text, num_words) for text in ("<tool_call>", "</tool_call>", "<|im_end|>")
    )
    chain = [
        (_TRIGGERS, [open_call]),
        ([open_call], calls),
        (calls, [close_call]),
        ([close_call], [end]),
    ]
    for direction, (before, after) in zip(directions, chain, strict=True):
        embedding[list(before)] += 60 * direction
        head[list(after)] += 3 * direction
    return {name: weight.contiguous() for name, weight in weights.items()}


def _config_json(config: TargetConfig) -> dict[str, object]:
    return {
        "architectures": [config.architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "eos_token_id": config.eos_token_ids[0],
    }


def _tokenizer_json(words: Sequence[str]) -> dict[str, object]:
    characters = _byte_characters()
    vocab = {characters[byte]: byte for byte in range(256)}
    vocab |= {
        "".join(characters[byte] for byte in call.encode()): _FIRST_CALL + i
        for i, call in enumerate(CALLS)
    }
    vocab |= {
        "".join(characters[byte] for byte in word.encode()): word_id(number)
        for number, word in enumerate(words)
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": control_id(text, len(words)),
                "content": text,
                "special": text.startswith("<|"),
                **flags,
            }
            for text in CONTROLS
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
