"""What `bench step` measures: our forward and transformers' on the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dlite_agent.config import EngineConfig, sdpa_without_repeated_keys
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.device import resolve_device, resolve_dtype
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import load_target, resolve_checkpoint

__all__ = ["SHAPES", "Subject", "filled_cache", "open_subject"]

_RANDOM_20M = TargetConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=16_384,
    hidden_size=384,
    num_layers=8,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=1024,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=65_536,
    tie_word_embeddings=True,
    eos_token_ids=(),
)
SHAPES: Mapping[str, TargetConfig] = {
    "random-20M": _RANDOM_20M,
    "random-smollm2": replace(
        _RANDOM_20M,
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
    ),
    "random-0.6B": replace(
        _RANDOM_20M,
        vocab_size=151_936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=3072,
    ),
}
"""Shapes with random weights by name: a Qwen3 of 20M, of SmolLM2-135M's sizes, of Qwen3-0.6B's."""

_ROOM = 1024  # rows of the pool beside the longest context
_PATTERN_ROWS = 256


@dataclass
class Subject:
    """A model, loaded twice.

    Attributes:
        name: Of the model.
        target: Ours.
        theirs: The transformers model, or None.
        has_kernels: Ours runs the compiled row kernels.
    """

    name: str
    target: DenseTransformer
    theirs: Any
    has_kernels: bool

    def our_step(self, kv: KVCache, rows: int) -> Callable[[], None]:
        """One forward of M rows behind those of a cache, which leaves the cache as it was."""
        ids, every = _ids(self.target, rows), list(range(rows))

        def step() -> None:
            output = self.target.forward(ids, kv, logits_for=every)
            output.logits[0, 0].item()  # waits for the device
            kv.commit(0)

        return step

    def their_cache(self, context: int) -> Any:
        """Transformers' own growing cache, with as many rows as `filled_cache` gives ours."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(self.target.config.num_layers):
            keys, values = _pattern(self.target, context)
            cache.update(keys[None], values[None], layer)
        return cache

    def their_step(self, cache: Any, rows: int) -> Callable[[], None]:
        """The same as `our_step`, with a cache of `their_cache`."""
        ids = _ids(self.target, rows)[None]

        def step() -> None:
            with torch.inference_mode(), sdpa_without_repeated_keys():
                output = self.theirs(input_ids=ids, cache=cache, use_cache=True)
                output.logits[0, 0, 0].item()
                cache.crop(-rows)

        return step


def open_subject(model: str, dtype: str, max_context: int, *, with_theirs: bool) -> Subject:
    """Load a model for both sides.

    Args:
        model: A name of `SHAPES`, or as for `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        max_context: The longest one to be measured.
        with_theirs: Load transformers' too.
    """
    from transformers import AutoModelForCausalLM

    theirs: Any = None
    if model in SHAPES:
        config, device = SHAPES[model], resolve_device("auto")
        num_weights = sum(math.prod(shape) for shape in weight_shapes(config).values())
        kind = resolve_dtype(dtype, device, num_weights)
        theirs = _random_model(config, kind)
        room = (max_context + _ROOM) * config.kv_bytes_per_token(kind.itemsize)
        weights = theirs.state_dict()
        target = DenseTransformer(
            config, weights.__getitem__, dtype=kind, device=device, max_kv_bytes=2 * room
        )
        theirs = theirs if with_theirs else None
    else:
        target = load_target(model, dtype=dtype)
        folder = resolve_checkpoint(model)
        if with_theirs and folder.is_dir():
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
            theirs.train(mode=False).to(target.device)
    kernels = load_row_kernels(EngineConfig().cache_folder())
    return Subject(model, target, theirs, target.use_kernels(kernels))


def _random_model(config: TargetConfig, dtype: torch.dtype) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: torch.nn.Module = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    return model.to(dtype).eval()


def _pattern(target: DenseTransformer, rows: int) -> tuple[Tensor, Tensor]:
    """Keys and values [K, rows, D] that no step's time depends on."""
    config = target.config
    shape = (config.num_kv_heads, _PATTERN_ROWS, config.head_dim)
    repeats = (1, -(-rows // _PATTERN_ROWS), 1)
    generator = torch.Generator().manual_seed(0)
    halves = [
        torch.randn(shape, generator=generator).to(target.device, target.dtype) for _ in range(2)
    ]
    keys, values = (half.repeat(repeats)[:, :rows].contiguous() for half in halves)
    return keys, values


def filled_cache(target: DenseTransformer, rows: int) -> KVCache:
    """A cache with so many rows, which cost no forward."""
    kv = target.new_cache()
    kv.reserve(rows)
    for layer in range(target.config.num_layers):
        kv.write(layer, *_pattern(target, rows))
    kv.commit(rows)
    return kv


def _ids(target: DenseTransformer, count: int) -> Tensor:
    """Ids without a pattern, the same at every call."""
    return torch.arange(count, device=target.device) * 7919 % target.config.vocab_size
