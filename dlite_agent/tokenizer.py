"""A checkpoint's tokenizer and chat template; transformers is imported when one is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlite_agent.chat.messages import JSON
from dlite_agent.errors import (
    ModelNotFoundError,
    RequestError,
    UnsupportedCheckpointError,
    UnsupportedParameterError,
)
from dlite_agent.gguf_tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["CheckpointTokenizer", "load_tokenizer"]

logger = logging.getLogger(__name__)

# Control characters that text has no use for, and what no assigned character of UTF-8 begins with.
_RARE_BYTES = frozenset(range(0x20)) - {*b"\t\n\r"} | {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}

# Arguments of transformers' `apply_chat_template`, and what it gives the template itself: no
# variables of a request.
_RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation documents max_length "
    "messages padding return_assistant_tokens_mask return_dict return_tensors "
    "sanitize_control_tokens tokenize tokenizer_kwargs tools truncation".split()
)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint; implements `chat.renderer.Tokenizer`.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.
        name: How error messages call the checkpoint.

    Attributes:
        eos_token_id: The tokenizer's end-of-turn id, if it names one.
        vocab_size: One more than the highest id that has a token; the target's own vocabulary may
            be larger.

    Raises:
        UnsupportedCheckpointError: Not a byte-level BPE, or one that lacks bytes, or no chat
            template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, name: str) -> None:
        from tokenizers import Tokenizer as Backend

        if not tokenizer.chat_template:
            raise UnsupportedCheckpointError(
                f"{name!r} has no chat template; use the instruct version of the checkpoint"
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        stored = self._backend.to_str()
        state = json.loads(stored)
        if state["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(state["decoder"]):
            raise UnsupportedCheckpointError(
                f"the tokenizer of {name!r} is no byte-level BPE; "
                "use a checkpoint of the Qwen or Llama 3 family"
            )
        _check_bytes(state["model"]["vocab"], name)
        self._control_tokens = {
            token["content"]: token["id"]
            for token in state["added_tokens"]
            if len(token["content"].strip()) > 1
        }
        self._token_bytes = _token_bytes(state)
        self.vocab_size = len(self._token_bytes)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        # All of them: the ids of those that stayed would be counted anew.
        state["added_tokens"] = []
        self._untrusted = Backend.from_str(json.dumps(state))
        self._check_untrusted(name)
        self._digests = [_digest(stored), _digest(str(tokenizer.chat_template))]

    @property
    def fingerprint(self) -> str:
        """Of the vocabulary and of the template: what messages become which ids by."""
        return "-".join(self._digests)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Spelling and id of every added token that is not blank, used by the template or not."""
        return self._control_tokens

    def encode_template(self, text: str) -> list[int]:
        """Encode text in which spelled control tokens become control ids."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode text in which they stay text: a copy of the tokenizer does not know them."""
        return self._untrusted.encode(text, add_special_tokens=False).ids

    def apply_template(
        self,
        messages: list[dict[str, JSON]],
        tools: list[dict[str, JSON]] | None,
        add_generation_prompt: bool,
        /,
        **variables: JSON,
    ) -> str:
        """Render messages to text with the checkpoint's template.

        Raises:
            RequestError: The template refuses the messages.
            UnsupportedParameterError: A variable has a name that is not the request's to set.
        """
        from jinja2 import TemplateError

        for name in variables:
            if name in _RESERVED:
                raise UnsupportedParameterError(
                    f"template variable {name!r} is reserved; leave it out of chat_template_kwargs"
                )
        if not messages:
            raise RequestError("messages is []; send at least one message")
        conversation: Any = messages  # transformers' annotations know contents that are text only
        arguments: dict[str, Any] = {**variables, "tools": tools, "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt, **arguments
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise RequestError(
                f"the checkpoint's chat template refuses these messages: {error}; "
                "change their roles or contents"
            ) from error
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: a control token's spelling, nothing for an id without a token."""
        if 0 <= token_id < len(self._token_bytes):
            return self._token_bytes[token_id]
        return b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids, control tokens spelled; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _check_untrusted(self, name: str) -> None:
        control_ids = set(self._control_tokens.values())
        for spelling in self._control_tokens:
            if control_ids.intersection(self.encode_untrusted(spelling)):
                raise UnsupportedCheckpointError(
                    f"the vocabulary of {name!r} makes the control token {spelling!r} from "
                    "ordinary text, so a message that quotes it could not be told from the "
                    "template; use another checkpoint"
                )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_tokenizer(model: str, *, revision: str | None = None) -> CheckpointTokenizer:
    """Load the tokenizer of a folder, GGUF file or hub name. No code of the checkpoint is run.

    Raises:
        ModelNotFoundError: There is none.
        UnsupportedCheckpointError: It is of a kind that cannot be used; see `CheckpointTokenizer`.
    """
    if model.endswith(".gguf"):
        return CheckpointTokenizer(gguf_tokenizer(Path(model)), name=model)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"no tokenizer was loaded from {model!r}: {error}; "
            "it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedCheckpointError(
            f"{model!r} has no tokenizer.json, only a slow tokenizer; use a checkpoint that has one"
        )
    return CheckpointTokenizer(tokenizer, name=model)


def _check_bytes(vocab: Mapping[str, int], name: str) -> None:
    """Every byte of text needs a token; transformers makes an empty vocabulary from no file."""
    lost = {byte for character, byte in _bytes_of_characters().items() if character not in vocab}
    if lost - _RARE_BYTES:
        raise UnsupportedCheckpointError(
            f"the vocabulary of {name!r} has no token for {len(lost)} of 256 bytes; "
            "tokenizer.json is missing or incomplete, download the checkpoint completely"
        )
    if lost:  # SmolLM2's has 21 of them
        listed = " ".join(f"{byte:02x}" for byte in sorted(lost))
        logger.warning("characters with these bytes are lost model=%s bytes=%s", name, listed)


def _token_bytes(state: dict[str, Any]) -> list[bytes]:
    """The bytes of every id, by GPT-2's table of printable stand-ins for bytes."""
    byte_of = _bytes_of_characters()
    texts: dict[int, bytes] = {}
    for token, token_id in state["model"]["vocab"].items():
        texts[token_id] = bytes(byte_of[char] for char in token if char in byte_of)
    for added in state["added_tokens"]:
        texts[added["id"]] = added["content"].encode()
    return [texts.get(token_id, b"") for token_id in range(max(texts) + 1)]


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself, the other bytes for the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
