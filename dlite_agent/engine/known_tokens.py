"""How many tokens of a prompt are genuinely new: the denominator of the prefill amplification A."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Literal

import numpy as np
import numpy.typing as npt

from dlite_agent.chat.renderer import RenderedPrompt

__all__ = ["KnownTokens"]

_MAX_SEQUENCES = 64
_MAX_KEYS = 65_536

_Kind = Literal["read", "closed", "open"]
"""A message that a prompt held, or that was sampled with its closing token or without it."""


class KnownTokens:
    """What earlier turns rendered or sampled, whatever became of its KV. Owned by one thread.

    A prompt token is known when an earlier turn had the same tokens up to it, or when it belongs
    to a message (all messages before it equal) that an earlier turn rendered or sampled. The second
    rule makes a message that has to be rendered differently count as old: prefilling it again is
    amplification, not news. Costs 4 bytes a token for the last 64 conversations.
    """

    def __init__(self) -> None:
        self._sequences: list[npt.NDArray[np.int32]] = []  # the newest last
        self._running: list[npt.NDArray[np.int32]] = []
        self._keys: OrderedDict[bytes, _Kind] = OrderedDict()

    def count_new(
        self, prompt: RenderedPrompt, keys: Sequence[bytes], control_ids: AbstractSet[int]
    ) -> int:
        """Tokens of a prompt that are new.

        Args:
            prompt: The rendered prompt.
            keys: Chained key of each of its messages.
            control_ids: Control tokens: what the template writes behind the last one of a sampled
                message was not sampled.
        """
        ids = np.asarray(prompt.token_ids, dtype=np.int32)
        known = (*self._sequences, *self._running)
        shared = max((_common(ids, other) for other in known), default=0)
        return len(ids) - max(shared, self._end_of_known_messages(prompt, keys, control_ids))

    @contextmanager
    def running(self, prompt_ids: Sequence[int]) -> Iterator[None]:
        """While a turn runs, its prompt is not new to others; one that fails is forgotten."""
        ids = np.asarray(prompt_ids, dtype=np.int32)
        self._running.append(ids)
        try:
            yield
        finally:
            self._running = [other for other in self._running if other is not ids]

    def add(
        self, prompt_ids: Sequence[int], keys: Sequence[bytes], sampled_ids: Sequence[int]
    ) -> None:
        """Remember a turn's prompt with its messages' keys, and what was sampled."""
        ids = np.asarray([*prompt_ids, *sampled_ids], dtype=np.int32)
        others = [known for known in self._sequences if _common(ids, known) < len(known)]
        self._sequences = [*others[1 - _MAX_SEQUENCES :], ids]
        for key in keys:
            self._remember(key, "read")

    def add_answer(self, keys: Sequence[bytes], *, is_closed: bool) -> None:
        """Remember the keys that a sampled message may come back under.

        Args:
            keys: See `message_keys.turn_forms`.
            is_closed: The last sampled token was the turn's closing token.
        """
        for key in keys:
            if self._keys.get(key) != "read":
                self._remember(key, "closed" if is_closed else "open")

    def _remember(self, key: bytes, kind: _Kind) -> None:
        self._keys[key] = kind
        self._keys.move_to_end(key)
        if len(self._keys) > _MAX_KEYS:
            self._keys.popitem(last=False)

    def _end_of_known_messages(
        self, prompt: RenderedPrompt, keys: Sequence[bytes], control_ids: AbstractSet[int]
    ) -> int:
        last = next((i for i in reversed(range(len(keys))) if keys[i] in self._keys), None)
        segment = next((s for s in prompt.segments if s.message_index == last), None)
        if last is None or segment is None:
            return 0
        kind, stop = self._keys[keys[last]], segment.stop
        if kind != "read":  # what the template wrote behind it, the closing token included, is new
            while stop > segment.start and prompt.token_ids[stop - 1] not in control_ids:
                stop -= 1
            stop -= kind == "open"
        return stop


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    limit = min(len(left), len(right))
    different = np.flatnonzero(left[:limit] != right[:limit])
    return int(different[0]) if len(different) else limit
