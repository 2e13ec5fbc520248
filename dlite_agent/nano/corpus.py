"""Training batches, each a function of a seed and its number: a killed run can go on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from dlite_agent.nano.chatml import (
    CONTROL_TOKENS,
    Conversation,
    Row,
    encode_conversation,
    render,
    train_tokenizer,
)
from dlite_agent.nano.drills import drill_conversation, module_drill
from dlite_agent.nano.mini import mini_conversation
from dlite_agent.nano.names import Split
from dlite_agent.nano.oracle import repair_conversation
from dlite_agent.nano.skills import skill_conversation
from dlite_agent.nano.world import Size

__all__ = ["Batch", "build_tokenizer", "copy_batches", "draw_conversation", "world_batches"]

COPY_WIDTH = 64
COPY_ROWS = 96
WIDTHS = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120)
POOL_ROWS = 480
_BATCH_TOKENS = 6144
_SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large")
_EARLY_SIZES = (0.75, 0.25, 0.0, 0.0)
_LATE_SIZES = (0.3, 0.33, 0.23, 0.14)
_DIALECTS = {"repair": 0.22, "mini": 0.1, "skills": 0.23, "drill": 0.28, "module": 0.17}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one width.

    Attributes:
        ids: Token ids, padded at the right.
        weights: Loss weight of predicting each token; the first of a row is never predicted.
        positions: Position of each token; gaps teach distances that are longer than the row.
    """

    ids: list[list[int]]
    weights: list[list[float]]
    positions: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Tokens with their padding."""
        return len(self.ids) * len(self.ids[0])


def _rng(*key: object) -> random.Random:
    return random.Random(hashlib.sha256("/".join(map(str, key)).encode()).digest())


def _copy_row(rng: random.Random, num_ids: int, width: int, longest: int) -> Row:
    """Repeat one random segment to the end; only its repetitions count.

    Long segments of few distinct tokens can't be followed by looking one token back.
    """
    length = rng.randint(4, longest)
    is_ambiguous = longest > COPY_WIDTH and rng.random() < 0.6
    distinct = max(8, length // rng.randint(2, 5)) if is_ambiguous else num_ids
    ids_known = rng.sample(range(num_ids), min(num_ids, distinct))
    segment = [rng.choice(ids_known) for _ in range(length)]
    ids = (segment * (width // length + 1))[:width]
    return Row(ids, [0.0] * length + [1.0] * (width - length))


def _positions(rng: random.Random, width: int, gaps: float) -> list[int]:
    """Count up, in some rows with jumps."""
    if rng.random() >= gaps:
        return list(range(width))
    jumps = {rng.randrange(width): rng.randint(1, 2500) for _ in range(rng.randint(1, 2))}
    positions, at = [], 0
    for i in range(width):
        at += jumps.get(i, 0)
        positions.append(at + i)
    return positions


def _batch(rng: random.Random, rows: list[Row], width: int, gaps: float) -> Batch:
    ids, weights = [], []
    for row in rows:
        pad = width - len(row.ids)
        ids.append(row.ids + [0] * pad)
        weights.append(row.weights + [0.0] * pad)
    return Batch(ids, weights, [_positions(rng, width, gaps) for _ in rows])


def copy_batches(tokenizer: Tokenizer, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yield warm-up batches from a number on: short rows, one random segment repeated."""
    num_ids = tokenizer.get_vocab_size() - len(CONTROL_TOKENS)
    while True:
        rng = _rng("copy", seed, start)
        longest = min(COPY_WIDTH // 2, 8 + start)  # short segments repeat more often
        rows = [_copy_row(rng, num_ids, COPY_WIDTH, longest) for _ in range(COPY_ROWS)]
        yield _batch(rng, rows, COPY_WIDTH, 0.0)
        start += 1


def _mix(early: tuple[float, ...], late: tuple[float, ...], progress: float) -> list[float]:
    ramp = min(1.0, progress / 0.3)
    return [a + (b - a) * ramp for a, b in zip(early, late, strict=True)]


def draw_conversation(rng: random.Random, *, split: Split, progress: float) -> Conversation:
    """Draw a conversation of any dialect; the world grows from short to long with progress."""
    dialect = rng.choices(list(_DIALECTS), list(_DIALECTS.values()))[0]
    thinking = rng.random() < 0.5
    if dialect == "drill":
        return drill_conversation(rng, split=split)
    if dialect == "module":
        return module_drill(rng, split=split)
    if dialect == "skills":
        return skill_conversation(rng, split=split, thinking=thinking)
    size = rng.choices(_SIZES, _mix(_EARLY_SIZES, _LATE_SIZES, progress))[0]
    if dialect == "repair":
        return repair_conversation(rng, split=split, size=size, thinking=thinking)
    is_whole = rng.random() < 0.25 * min(1.0, progress / 0.5)
    keep = 1.0 if is_whole else rng.choice([0.0, 0.0, 0.1, 0.2])
    return mini_conversation(rng, split=split, size=size, thinking=thinking, keep=keep)


def _width_for(length: int) -> int | None:
    return next((width for width in WIDTHS if width >= length), None)


def world_batches(
    tokenizer: Tokenizer, seed: int, progress: Callable[[], float], pool: int = 0, skip: int = 0
) -> Iterator[tuple[int, int, Batch]]:
    """Yield `(pool, number in the pool, batch)` from a place on.

    Conversations are drawn in pools and sorted by length, so that little is padding; what is left
    of a width is filled with longer copies, and one batch in 25 is nothing else.

    Args:
        tokenizer: Encodes the conversations.
        seed: Of the run.
        progress: Where the run stands, in [0, 1]; asked once a pool.
        pool: First pool.
        skip: Batches of the first pool that are done.
    """
    num_ids = tokenizer.get_vocab_size() - len(CONTROL_TOKENS)
    while True:
        batches = _pool_batches(tokenizer, seed, progress(), pool, num_ids)
        for number in range(skip, len(batches)):
            yield pool, number, batches[number]
        pool, skip = pool + 1, 0


def _pool_batches(
    tokenizer: Tokenizer, seed: int, progress: float, pool: int, num_ids: int
) -> list[Batch]:
    by_width: dict[int, list[Row]] = {}
    for index in range(POOL_ROWS):
        rng = _rng("world", seed, pool, index)
        row = encode_conversation(
            tokenizer, draw_conversation(rng, split="train", progress=progress)
        )
        width = _width_for(len(row.ids))
        if width is not None:
            by_width.setdefault(width, []).append(row)
    rng = _rng("pool", seed, pool)
    batches = []
    for width, rows in sorted(by_width.items()):
        count = max(1, _BATCH_TOKENS // width)
        rng.shuffle(rows)
        while len(rows) % count:
            rows.append(_copy_row(rng, num_ids, width, width // 2))
        for start in range(0, len(rows), count):
            batches.append(_batch(rng, rows[start : start + count], width, 0.3))
    for _ in range(len(batches) // 25):
        width = rng.choice((256, 256, 256, 512, 1024))
        rows = [_copy_row(rng, num_ids, width, width // 2) for _ in range(_BATCH_TOKENS // width)]
        batches.append(_batch(rng, rows, width, 0.3))
    rng.shuffle(batches)
    return batches


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)


def build_tokenizer(seed: int, vocab_size: int, num_texts: int = 2400) -> Tokenizer:
    """Train nano's tokenizer on its own world.

    Args:
        seed: Of the conversations.
        vocab_size: Size with the control tokens.
        num_texts: Conversations to train on.
    """
    texts = []
    for index in range(num_texts):
        rng = _rng("tokenizer", seed, index)
        conversation = draw_conversation(rng, split="train", progress=0.1 if index % 8 else 1.0)
        text = render(conversation.messages, conversation.tools)
        for token in CONTROL_TOKENS:
            text = text.replace(token, "")
        texts.append(text)
    return train_tokenizer(texts, vocab_size)
