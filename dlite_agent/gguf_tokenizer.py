"""The tokenizer and chat template in a GGUF file's metadata.

Built here and not by transformers, which passes over `tokenizer.ggml.pre`, and with it over how
text is split before merges (docs/decisions/0009).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["gguf_tokenizer"]

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # `LlamaTokenType` of llama.cpp
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = f"{_CONTRACTIONS}|{_REST.replace('DIGITS', digits)}"
    return [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        },
        _byte_level(use_regex=False),
    ]


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    flags = {"add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}
    return {"type": "ByteLevel", **flags}


# By `tokenizer.ggml.pre`, as the tokenizer.json of the families have them.
_PRE_TOKENIZERS = {
    "qwen2": _split(r"\p{N}"),
    "deepseek-r1-qwen": _split(r"\p{N}"),
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "gpt-2": [_byte_level(use_regex=True)],
}
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # Unicode NFC
_WHOLE_WORDS = ("llama-bpe",)  # a word of the vocabulary is taken before any merge


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file, with its chat template.

    Raises:
        MissingDependencyError: The package `gguf` is not installed.
        UnsupportedCheckpointError: It is no byte-level BPE, of an unknown kind, or damaged.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = GGUFFile(path, str(path))
    tokens = file.strings("tokenizer.ggml.tokens")
    state = _state(file, tokens)
    try:
        backend = Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # tokenizers raises nothing narrower
        raise _damaged(path, str(error)) from error
    for added in state["added_tokens"]:
        if backend.token_to_id(added["content"]) != added["id"]:
            raise _damaged(path, f"token {added['content']!r} has no id of its own")
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers
        tokenizer_object=backend,
        eos_token=_spelling(file, tokens, "eos"),
        pad_token=_spelling(file, tokens, "padding"),
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
    )


def _state(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """What `tokenizer.json` would hold."""
    kind, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedCheckpointError(
            f"the tokenizer of {str(file.path)!r} is {kind!r} with pre-tokenizer {pre!r}; only "
            f"byte-level BPE ('gpt2') with {', '.join(map(repr, _PRE_TOKENIZERS))} is supported, "
            "use the original checkpoint in safetensors format"
        )
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise _damaged(file.path, "tokens and their types do not belong together")
    last_normal = max((i for i, kind in enumerate(types) if kind == _NORMAL), default=-1)
    # Added tokens behind the vocabulary get their ids by their order, earlier ones from it.
    vocab = {
        token: i
        for i, token in enumerate(tokens)
        if types[i] != _UNUSED and (i <= last_normal or types[i] not in (_CONTROL, _USER_DEFINED))
    }
    merges = [merge.split(" ") for merge in file.strings("tokenizer.ggml.merges")]
    steps = _PRE_TOKENIZERS[pre]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": types[i] == _CONTROL,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for i, token in enumerate(tokens)
            if types[i] in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": _byte_level(use_regex=False),
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }


def _spelling(file: GGUFFile, tokens: list[str], name: str) -> str | None:
    token_id = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None
    return tokens[token_id]


def _damaged(path: Path, what: str) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"the tokenizer of {str(path)!r} is damaged ({what}); download the file again"
    )
