"""What a recipe will take: bytes from its numbers, seconds from what this machine computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.packed_taps import packed_bytes
from dlite_agent.training.recipe import CaptureOptions

__all__ = ["Speed", "capture_s", "num_weights", "row_bytes", "stage_s", "train_bytes"]

_SMALL_BYTES = 25
"""Ids, numbers, hints and the mark of a position."""


class Speed:
    """What this machine's CPU does in a second, measured in a tenth of one.

    Attributes:
        flops: Of a float32 product.
        read_bytes: From memory.
    """

    def __init__(self) -> None:
        size = 512
        square = torch.ones(size, size)
        self.flops = 2 * size**3 / _fastest(lambda: square @ square)
        vector = torch.ones(16 * 2**20)
        self.read_bytes = vector.nbytes / _fastest(vector.sum)


def row_bytes(config: DLiteConfig, dtype: str) -> int:
    """Bytes of a captured position."""
    state = packed_bytes(config.hidden_size) if dtype == "int8" else 2 * config.hidden_size
    return len(config.taps) * state + _SMALL_BYTES


def train_bytes(config: DLiteConfig, options: AlignOptions) -> int:
    """Bytes that training takes beside the records: weights, moments, gradients, and logits."""
    weights = sum(math.prod(shape) for shape in dlite_shapes(config).values())
    num_logits = options.max_vocab or config.vocab_size
    logits = min(options.part_size, options.batch_size) * config.block_size * num_logits
    frozen = 2 * config.vocab_size * config.hidden_size
    return 4 * (4 * weights + 6 * logits + frozen)


def capture_s(target: TargetConfig, options: CaptureOptions, num_turns: int, speed: Speed) -> float:
    """Seconds of a capture at most, roughly: one read of the target a token, prompts left out."""
    tokens = min(options.max_records, num_turns * options.max_answer)
    return tokens * 2.0 * num_weights(target) / speed.read_bytes


def stage_s(config: DLiteConfig, options: AlignOptions, speed: Speed) -> float:
    """Seconds of a stage on this machine's CPU, roughly: products of the layers and the head."""
    weights = sum(math.prod(shape) for shape in dlite_shapes(config).values())
    head = (options.max_vocab or config.vocab_size) * config.hidden_size
    per_slot = 6 * weights + 6 * head  # forward, backward; the frozen head twice forward, once back
    return options.steps * options.batch_size * config.block_size * per_slot / speed.flops


def num_weights(target: TargetConfig) -> int:
    """Weights of a target, norms left out."""
    hidden, dim = target.hidden_size, target.head_dim
    attention = hidden * dim * (2 * target.num_heads + 2 * target.num_kv_heads)
    layer = attention + 3 * hidden * target.intermediate_size
    ends = target.vocab_size * hidden * (1 if target.tie_word_embeddings else 2)
    return target.num_layers * layer + ends


def _fastest(call: Callable[[], object]) -> float:
    found = []
    for _ in range(4):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return max(min(found), 1e-9)
