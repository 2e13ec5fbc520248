"""What nano's drafter learns from: nano's own taps on its world, and what nano chose there.

The oracle's conversations are forwarded as they stand. Nano agrees with 99 of 100 of their tokens,
and a slot behind one where it does not is left out (`training.records`), so that what is learned is
what nano itself would write.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from dlite_agent.models.target import TargetModel
from dlite_agent.nano.chatml import Conversation, encode_conversation
from dlite_agent.nano.drills import drill_conversation, module_drill
from dlite_agent.nano.mini import mini_conversation
from dlite_agent.nano.names import Split
from dlite_agent.nano.oracle import repair_conversation
from dlite_agent.nano.skills import skill_conversation
from dlite_agent.nano.world import Size
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.records import Records

__all__ = ["capture_world", "learned_ranges", "world_transcripts"]

logger = logging.getLogger(__name__)

_SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large")
_SIZE_SHARES = (0.42, 0.33, 0.15, 0.1)
"""Small repositories have more answers in a thousand tokens; a tenth of them would do."""
_DIALECTS = {"repair": 0.62, "mini": 0.22, "skills": 0.06, "drill": 0.05, "module": 0.05}
_LONG_SHARE = 0.08
"""Of the conversations, drawn again until they are long; a fifth of the records."""
_LONG, _LONGEST = 3_000, 8_192
_THINKING = 0.75
_SHARD_RECORDS = 30_000


def _draw(rng: random.Random, split: Split) -> Conversation:
    """Draw a conversation: mostly whole tasks, as agents have them."""
    thinking = rng.random() < _THINKING
    dialect = rng.choices(list(_DIALECTS), list(_DIALECTS.values()))[0]
    if dialect == "drill":
        return drill_conversation(rng, split=split)
    if dialect == "module":
        return module_drill(rng, split=split)
    if dialect == "skills":
        return skill_conversation(rng, split=split, thinking=thinking)
    size = rng.choices(_SIZES, _SIZE_SHARES)[0]
    if dialect == "repair":
        return repair_conversation(rng, split=split, size=size, thinking=thinking)
    return mini_conversation(rng, split=split, size=size, thinking=thinking, keep=1.0)


def learned_ranges(weights: list[float]) -> list[tuple[int, int]]:
    """Half-open ranges of the tokens that a row teaches with full weight."""
    ranges: list[tuple[int, int]] = []
    start = None
    for index, weight in enumerate([*weights, 0.0]):
        is_learned = weight == 1.0
        if is_learned and start is None:
            start = index
        elif not is_learned and start is not None:
            ranges.append((start, index))
            start = None
    return ranges


def world_transcripts(tokenizer: Tokenizer, seed: int, split: Split) -> Iterator[Transcript]:
    """Yield conversations as ids, without end; the same ones for the same seed."""
    number = 0
    while True:
        key = f"drafter/{seed}/{split}/{number}".encode()
        rng = random.Random(hashlib.sha256(key).digest())
        shortest = _LONG if rng.random() < _LONG_SHARE else 0
        row = encode_conversation(tokenizer, _draw(rng, split))
        while len(row.ids) < shortest:
            row = encode_conversation(tokenizer, _draw(rng, split))
        ranges = learned_ranges(row.weights)
        if ranges and len(row.ids) <= _LONGEST:
            yield Transcript(row.ids, ranges)
        number += 1


def capture_world(
    target: TargetModel,
    tokenizer: Tokenizer,
    work: Path,
    taps: tuple[int, ...],
    *,
    num_records: int,
    seed: int,
) -> Records:
    """Capture records of the train split into shards, or go on with those that are there.

    Args:
        target: nano.
        tokenizer: Its tokenizer.
        work: Folder of the shards; made if missing.
        taps: Layers to keep.
        num_records: How many, at least.
        seed: Of the conversations; shard i has a seed of its own.
    """
    work.mkdir(parents=True, exist_ok=True)
    shards: list[Records] = []
    began = time.perf_counter()
    num_done, num_new = 0, 0
    while num_done < num_records:
        path = work / f"records-{len(shards):04d}.safetensors"
        if path.exists():
            shard = Records.load(path)
        else:
            shard = _shard(target, world_transcripts(tokenizer, seed + len(shards), "train"), taps)
            shard.save(path)
            num_new += len(shard)
        shards.append(shard)
        num_done += len(shard)
        speed = num_new / (time.perf_counter() - began)
        logger.info(
            "records=%d of %d per_s=%.0f left_min=%.1f",
            num_done,
            num_records,
            speed,
            (num_records - num_done) / max(speed, 1e-9) / 60 if num_new else 0.0,
        )
    return Records.join(shards)


def _shard(
    target: TargetModel, transcripts: Iterator[Transcript], taps: tuple[int, ...]
) -> Records:
    parts: list[Records] = []
    while sum(map(len, parts)) < _SHARD_RECORDS:
        part = capture(target, next(transcripts), taps)
        if part is not None:
            parts.append(part)
    return Records.join(parts)
