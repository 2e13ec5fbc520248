"""A vocabulary as llguidance reads it, once for all models of a process that share a tokenizer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from llguidance import LLTokenizer, TokenizerWrapper

__all__ = ["TokenTable", "TokenTrie", "token_trie"]

logger = logging.getLogger(__name__)

# Of this process, not of a model: a second one with the same tokenizer waits for nothing, and what
# no model uses any more is gone.
_TRIES: WeakValueDictionary[tuple[str, tuple[int, ...]], TokenTrie] = WeakValueDictionary()
_LOCK = threading.Lock()


class TokenTable:
    """A vocabulary as llguidance wants it.

    Args:
        texts: Bytes of every id; of a control token its spelling, and nothing for an id that is no
            token.
        control_ids: Ids of control tokens.
        stop_ids: Ids that end a turn, the usual one first.
        encode: Text to ordinary ids.
        call_id: Opens a call, if it is a token.
        fingerprint: Tables with the same one are the same, but for `stop_ids` and `call_id`; empty
            for a table that is nobody else's.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        control_ids: Sequence[int],
        stop_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]],
        call_id: int | None = None,
        *,
        fingerprint: str = "",
    ) -> None:
        self.call_id = call_id
        self.fingerprint = fingerprint
        self.tokens = list(texts)
        self.special_token_ids = sorted(set(control_ids) | set(stop_ids))
        self.stop_ids = list(stop_ids)
        self.eos_token_id = self.stop_ids[0]
        self.bos_token_id = None
        self.encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """Ids of text; llguidance asks for those of forced bytes."""
        return list(self.encode(text.decode("utf-8", "replace")))


class TokenTrie:
    """What llguidance made of a table.

    Attributes:
        tokenizer: Its own name for it.
    """

    __slots__ = ("__weakref__", "tokenizer")

    def __init__(self, table: TokenTable) -> None:
        began_s = time.perf_counter()
        self.tokenizer = LLTokenizer(TokenizerWrapper(table), eos_token=table.stop_ids)
        logger.debug(
            "grammar vocabulary tokens=%d s=%.2f", len(table.tokens), time.perf_counter() - began_s
        )


def token_trie(table: TokenTable) -> TokenTrie:
    """The trie of a table: one that a model of this process uses, or a new one.

    152,000 tokens take half a second, in which no other thread of the interpreter runs.
    """
    if not table.fingerprint:
        return TokenTrie(table)
    key = (table.fingerprint, tuple(table.stop_ids))
    with _LOCK:
        trie = _TRIES.get(key)
        if trie is None:
            trie = _TRIES[key] = TokenTrie(table)
        return trie
