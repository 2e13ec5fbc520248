"""A checkpoint's tokenizer: bytes of every id, no control token by accident, clear refusals."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import Renderer
from dlite_agent.errors import (
    ModelNotFoundError,
    RequestError,
    UnsupportedCheckpointError,
    UnsupportedParameterError,
)
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

TEXT = (
    "def f(x):\r\n\treturn 'é≠😀' + \"\\u00e9\"  # 한국어\n\n\n"
    " <|notatoken|> 1234.5 don't\x00\x1b[0m"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen3(qwen3_tokenizer_dir: Path) -> CheckpointTokenizer:
    return load_tokenizer(str(qwen3_tokenizer_dir))


def _byte_characters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _small_state(vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """A byte-level BPE of a few hundred tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    backend = Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteDecoder()
    for spelling in ("<|im_start|>", "<|im_end|>"):
        backend.add_special_tokens([AddedToken(spelling, special=True, normalized=False)])
    backend.add_tokens([AddedToken("    ", normalized=False)])
    return json.loads(backend.to_str())  # type: ignore[no-any-return]


def _write(folder: Path, state: dict[str, Any], **config: Any) -> str:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def small_vocab() -> dict[str, int]:
    return {char: i for i, char in enumerate(_byte_characters())}


# The real vocabulary


def test_ids_are_those_of_transformers(
    qwen3: CheckpointTokenizer, qwen3_tokenizer_dir: Path
) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(str(qwen3_tokenizer_dir))
    assert qwen3.encode_template(TEXT) == oracle.encode(TEXT, add_special_tokens=False)
    assert qwen3.encode_untrusted(TEXT) == qwen3.encode_template(TEXT)
    assert qwen3.vocab_size == len(oracle)
    assert qwen3.eos_token_id == oracle.eos_token_id


def test_bytes_of_ids_join_to_the_text(qwen3: CheckpointTokenizer) -> None:
    ids = qwen3.encode_template(TEXT + "<|im_end|>")
    assert b"".join(map(qwen3.token_bytes, ids)) == (TEXT + "<|im_end|>").encode()
    assert qwen3.decode(ids) == TEXT + "<|im_end|>"


def test_every_id_of_the_vocabulary_has_bytes(qwen3: CheckpointTokenizer) -> None:
    sizes = [len(qwen3.token_bytes(token_id)) for token_id in range(qwen3.vocab_size)]
    assert min(sizes) >= 1
    assert {qwen3.token_bytes(i) for i in range(qwen3.vocab_size)} >= {
        bytes([b]) for b in range(256)
    }


@pytest.mark.parametrize("token_id", [-1, 151_669, 10**9])
def test_an_id_without_a_token_has_no_bytes(qwen3: CheckpointTokenizer, token_id: int) -> None:
    assert qwen3.token_bytes(token_id) == b""


def test_control_tokens_are_ids_in_template_text_only(qwen3: CheckpointTokenizer) -> None:
    assert len(qwen3.control_tokens) == 26
    for spelling, token_id in qwen3.control_tokens.items():
        assert qwen3.encode_template(spelling) == [token_id]
        ids = qwen3.encode_untrusted(f"a{spelling}b")
        assert not set(ids).intersection(qwen3.control_tokens.values())
        assert qwen3.decode(ids) == f"a{spelling}b"


def test_broken_bytes_decode_to_replacement_characters(qwen3: CheckpointTokenizer) -> None:
    first = next(i for i in range(qwen3.vocab_size) if qwen3.token_bytes(i) == b"\xf0")
    assert qwen3.decode([first, *qwen3.encode_untrusted("a")]) == "\ufffda"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "documents"])
def test_reserved_variables_are_refused(qwen3: CheckpointTokenizer, name: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=f"'{name}' is reserved"):
        qwen3.apply_template([{"role": "user", "content": "x"}], None, True, **{name: "x"})


def test_no_messages_is_a_request_error(qwen3: CheckpointTokenizer) -> None:
    with pytest.raises(RequestError, match="at least one"):
        qwen3.apply_template([], None, True)


def test_what_the_template_refuses_is_a_request_error(qwen3: CheckpointTokenizer) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        qwen3.apply_template([{"role": "user", "content": None}], None, True)


def test_variables_reach_the_template(qwen3: CheckpointTokenizer) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    text = qwen3.apply_template(messages, None, True, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")


# Other checkpoints


def test_a_small_checkpoint_renders(tmp_path: Path, small_vocab: dict[str, int]) -> None:
    tokenizer = load_tokenizer(_write(tmp_path, _small_state(small_vocab, [])))
    prompt = Renderer(tokenizer).render([Message("user", "a    b <|im_end|> é")])
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\na    b <|im_end|> é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.token_ids.count(tokenizer.control_tokens["<|im_end|>"]) == 1
    assert set(tokenizer.control_tokens) == {"<|im_start|>", "<|im_end|>"}
    assert tokenizer.eos_token_id is None


def test_runs_of_spaces_that_are_added_tokens_keep_their_ids(
    tmp_path: Path, small_vocab: dict[str, int]
) -> None:
    tokenizer = load_tokenizer(_write(tmp_path, _small_state(small_vocab, [])))
    renderer = Renderer(tokenizer)
    assert not renderer.joins_segments
    prompt = renderer.render([Message("user", "a    b")])
    text = "<|im_start|>user\na    b<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt.token_ids) == tokenizer.encode_template(text)
    assert len(tokenizer.encode_untrusted("    ")) == 4


def test_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_checkpoint_without_a_template_is_refused(
    tmp_path: Path, small_vocab: dict[str, int]
) -> None:
    folder = _write(tmp_path, _small_state(small_vocab, []), chat_template=None)
    with pytest.raises(UnsupportedCheckpointError, match="instruct"):
        load_tokenizer(folder)


def test_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(UnsupportedCheckpointError, match=r"256 of 256 bytes.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_vocabulary_that_loses_a_byte_is_refused(
    tmp_path: Path, small_vocab: dict[str, int]
) -> None:
    del small_vocab["z"]
    with pytest.raises(UnsupportedCheckpointError, match="1 of 256 bytes"):
        load_tokenizer(_write(tmp_path, _small_state(small_vocab, [])))


def test_vocabulary_that_is_no_byte_level_bpe_is_refused(
    tmp_path: Path, small_vocab: dict[str, int]
) -> None:
    state = _small_state(small_vocab, [])
    state["decoder"] = {"type": "Fuse"}
    with pytest.raises(UnsupportedCheckpointError, match="byte-level BPE"):
        load_tokenizer(_write(tmp_path, state))


def test_vocabulary_that_merges_a_control_token_is_refused(
    tmp_path: Path, small_vocab: dict[str, int]
) -> None:
    vocab, merges, spelling = dict(small_vocab), [], "<|im_end|>"
    for stop in range(2, len(spelling) + 1):
        vocab[spelling[:stop]] = len(vocab)
        merges.append((spelling[: stop - 1], spelling[stop - 1]))
    with pytest.raises(UnsupportedCheckpointError, match=r"<\|im_end\|>.*ordinary text"):
        load_tokenizer(_write(tmp_path, _small_state(vocab, merges)))


def test_slow_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    class Slow:
        chat_template = TEMPLATE

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Slow())
    with pytest.raises(UnsupportedCheckpointError, match="slow"):
        load_tokenizer(str(tmp_path))


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, small_vocab: dict[str, int]) -> None:
    folder = _write(
        tmp_path,
        _small_state(small_vocab, []),
        tokenizer_class="Custom",
        auto_map={"AutoTokenizer": [None, "custom.Custom"]},
    )
    ran = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with contextlib.suppress(ModelNotFoundError, UnsupportedCheckpointError):
        load_tokenizer(folder)
    assert not ran.exists()
