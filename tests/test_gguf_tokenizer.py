"""The tokenizer in a GGUF file is the checkpoint's own, token for token, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.gguf_tokenizer import gguf_tokenizer
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer
from tests.models.gguf_files import add_byte_tokenizer, gguf

pytestmark = pytest.mark.skipif(gguf is None, reason='needs pip install "dlite-agent[gguf]"')

TEXTS = [
    "def add(a, b):\n    return a + b  # 12345 + 6.789e10\n",
    "I'll say it's DON'T\r\n\r\n  \t  x\n\n\n",
    "café re\u0301sume\u0301 naïve Ünïcödé 中文字符 한국어 العربية \U0001f9d1\u200d\U0001f4bb",
    "  leading,  double  and trailing  ",
    "<|im_start|>user\nhello<|im_end|>\n<tool_call>\n{}\n</tool_call><think>",
    "snake_case camelCase HTTPServer2 v1.2.3-rc4 https://a.b/c?d=e&f#g",
    "",
]


def write(path: Path, fill: Any) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def first_words(state: dict[str, Any], size: int) -> dict[str, Any]:
    """The state with its first merges alone; the added tokens move behind them."""
    vocab = {token: i for token, i in state["model"]["vocab"].items() if i < size}
    merges = [m.split(" ") if isinstance(m, str) else m for m in state["model"]["merges"]]
    kept = [merge for merge in merges if "".join(merge) in vocab]
    added = [token | {"id": len(vocab) + i} for i, token in enumerate(state["added_tokens"])]
    return state | {
        "model": state["model"] | {"vocab": vocab, "merges": kept},
        "added_tokens": added,
    }


def copy_of(state: dict[str, Any], pre: str) -> Any:
    """Writes what a tokenizer.json holds as llama.cpp's converter does."""
    tokens = {i: (token, 1) for token, i in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        tokens[added["id"]] = (added["content"], 3 if added["special"] else 4)
    size = max(tokens) + 8
    listed = [tokens.get(i, (f"[PAD{i}]", 5)) for i in range(size)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]

    def fill(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([token for token, _ in listed])
        writer.add_token_types([kind for _, kind in listed])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(tokens_id(state, "<|im_end|>"))
        writer.add_chat_template("{{ messages[0].content }}")

    return fill


def tokens_id(state: Any, spelling: str) -> int:
    return next(int(t["id"]) for t in state["added_tokens"] if t["content"] == spelling)


@pytest.mark.timeout(600)  # whole, 300,000 strings are written and read
@pytest.mark.parametrize("size", [8000, pytest.param(10**6, marks=pytest.mark.soak, id="whole")])
def test_qwen_3_tokenizer_is_its_own_token_for_token(
    tmp_path: Path, qwen3_tokenizer_dir: Path, size: int
) -> None:
    stored = json.loads((qwen3_tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    original = first_words(stored, size)
    path = write(tmp_path / "m.gguf", copy_of(original, "qwen2"))
    theirs, ours = Tokenizer.from_str(json.dumps(original)), load_tokenizer(str(path))
    for text in TEXTS:
        assert ours.encode_template(text) == theirs.encode(text, add_special_tokens=False).ids
    added = original["added_tokens"]
    assert ours.control_tokens == {token["content"]: token["id"] for token in added}
    assert ours.eos_token_id == theirs.token_to_id("<|im_end|>")
    assert ours.vocab_size == theirs.get_vocab_size()
    assert not set(ours.encode_untrusted(TEXTS[4])) & set(ours.control_tokens.values())


# By kind: how "x 1234" is split before any merge.
SPLITS = {
    "qwen2": ["x", "Ġ", "1", "2", "3", "4"],
    "deepseek-r1-qwen": ["x", "Ġ", "1", "2", "3", "4"],
    "llama-bpe": ["x", "Ġ", "123", "4"],
    "smollm": ["x", "Ġ", "1", "2", "3", "4"],
    "gpt-2": ["x", "Ġ1234"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_digits_are_split_as_the_family_was_trained(tmp_path: Path, pre: str) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: add_byte_tokenizer(writer, 300, pre=pre))
    backend = gguf_tokenizer(path).backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("x 1234")]
    assert pieces == SPLITS[pre]


def test_composed_and_decomposed_letters_are_one_for_qwen(tmp_path: Path) -> None:
    def encoded(pre: str) -> tuple[list[int], list[int]]:
        path = write(tmp_path / f"{pre}.gguf", lambda w: add_byte_tokenizer(w, 300, pre=pre))
        tokenizer = load_tokenizer(str(path))
        return tokenizer.encode_untrusted("é"), tokenizer.encode_untrusted("e\u0301")

    composed, decomposed = encoded("qwen2")
    assert composed == decomposed
    composed, decomposed = encoded("llama-bpe")
    assert composed != decomposed


def test_control_tokens_stay_text_in_what_is_not_trusted(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", lambda writer: add_byte_tokenizer(writer, 300))
    tokenizer = load_tokenizer(str(path))
    assert isinstance(tokenizer, CheckpointTokenizer)
    assert tokenizer.encode_template("<|im_end|>") == [257]
    assert tokenizer.encode_untrusted("<|im_end|>") == list(b"<|im_end|>")
    assert tokenizer.eos_token_id == 257
    text = tokenizer.apply_template([{"role": "user", "content": "hi"}], None, True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def no_template(writer: Any) -> None:
    add_byte_tokenizer(writer, 300)
    del writer.kv_data[0]["tokenizer.chat_template"]


def sentencepiece(writer: Any) -> None:
    writer.add_tokenizer_model("llama")


def unknown_kind(writer: Any) -> None:
    add_byte_tokenizer(writer, 300, pre="tekken")


def no_types(writer: Any) -> None:
    add_byte_tokenizer(writer, 300)
    del writer.kv_data[0]["tokenizer.ggml.token_type"]


def merge_of_nothing(writer: Any) -> None:
    add_byte_tokenizer(writer, 300)
    writer.add_token_merges(["a not-there"])


def gap_before_a_control_token(writer: Any) -> None:
    add_byte_tokenizer(writer, 300)
    writer.kv_data[0]["tokenizer.ggml.token_type"].value[256] = 5


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (no_template, "has no chat template"),
        (sentencepiece, r"is 'llama' with pre-tokenizer None; only"),
        (unknown_kind, r"'gpt2' with pre-tokenizer 'tekken'; only byte-level BPE"),
        (no_types, "tokens and their types do not belong together"),
        (merge_of_nothing, "is damaged"),
        (gap_before_a_control_token, "'<|im_end|>' has no id of its own"),
        (lambda _writer: None, "is None with pre-tokenizer None"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tmp_path: Path, fill: Any, message: str) -> None:
    path = write(tmp_path / "m.gguf", fill)
    with pytest.raises(UnsupportedCheckpointError, match=message.replace("|", r"\|")):
        load_tokenizer(str(path))
